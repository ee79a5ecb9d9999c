"""What the processes gather through the store, and the form and range of each of these values.

Without a key anybody who reaches the store can write such a value: it must not become a path, a
traceback or a number out of range in another process.
"""

from __future__ import annotations

import re
from typing import Any, Final

from dpcsgp.network.board import Fault

_MOST_STEPS: Final = 2**62
_MOST_ENTRIES: Final = 10**6
_NAME: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
# Strict JSON has no other spelling for these; None: not measured.
_NUMBERS_AS_TEXT: Final = ("inf", "-inf", "nan", None)


def is_count(value: Any, most: int = _MOST_STEPS) -> bool:
    """Say whether a value is an integer from 0 to `most`."""
    # bool is a subclass of int: `true` would pass for 1.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def number(value: Any) -> bool:
    """Say whether a value is a number, or one of the texts that stand for one."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric or ((value is None or isinstance(value, str)) and value in _NUMBERS_AS_TEXT)


def fault_of(name: str, mine: Any, author: int) -> Fault:
    """Return the check of what rank `author` may publish under a name.

    Args:
        name: the name under which values are gathered.
        mine: what this process published under it; the pattern for all other names.
        author: the rank whose value is checked.
    """

    def fault(value: Any) -> str | None:
        # Rank 0's value becomes a file name: no separators, no dots.
        if name in ("run id", "name of this start"):
            wrong = author == 0 and not (isinstance(value, str) and _NAME.fullmatch(value))
            return "letters and digits" if wrong else None
        if name == "whole checkpoints":
            right = isinstance(value, list) and all(is_count(step) for step in value)
            return None if right else "a list of steps"
        if name == "remaining releases":
            return None if is_count(value) else "a number of releases"
        if name.startswith("shared noise"):  # what stands under a node is read where it is used
            right = isinstance(value, dict) and len(value) <= _MOST_ENTRIES
            return None if right else "a table by node"
        return None if _alike(mine, value) else f"a value like this process's own, {str(mine)[:40]}"

    return fault


def _alike(mine: Any, value: Any) -> bool:
    """Say whether a value has the form of this process's own: the same keys and types inside."""
    if isinstance(mine, dict):
        same_keys = isinstance(value, dict) and mine.keys() == value.keys()
        return same_keys and all(_alike(item, value[key]) for key, item in mine.items())
    if isinstance(mine, list):
        return isinstance(value, list) and _lists_alike(mine, value)
    if number(mine):
        return number(value)
    return type(mine) is type(value)


def _lists_alike(mine: list[Any], value: list[Any]) -> bool:
    """Compare lists: of rows, which have one length everywhere, or of numbers, one per node."""
    # Evaluations are the same on all ranks; numbers differ in count, as ranks host unequal shares.
    if mine and isinstance(mine[0], dict):
        pairs = zip(mine, value, strict=False)
        return len(mine) == len(value) and all(_alike(own, other) for own, other in pairs)
    return not mine or all(_alike(mine[0], other) for other in value)
