"""What the processes agree on at the store, and the form and range that each of these values must
have.

Without a key anybody who reaches the store can write such a value: it must not become a path, a
traceback or a number out of range in another process.
"""

from __future__ import annotations

import re
from typing import Any, Final

from dpcsgp.network.board import Fault

_MOST_STEPS: Final = 2**62
_NAME: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
# strict JSON has no other way; None: not measured
_NUMBERS_AS_TEXT: Final = (
    "inf",
    "-inf",
    "nan",
    None,
)


def whole(value: Any, most: int = _MOST_STEPS) -> bool:
    """Say whether a value is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def number(value: Any) -> bool:
    """Say whether a value is a number, or what stands for one."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric or ((value is None or isinstance(value, str)) and value in _NUMBERS_AS_TEXT)


def fault_of(name: str, mine: Any, author: int) -> Fault:
    """Return the check of what a rank may publish under the name under which this process published
    `mine`."""

    def fault(value: Any) -> str | None:
        if name in ("run id", "name of this start"):
            # it becomes a file name
            wrong = author == 0 and not (isinstance(value, str) and _NAME.fullmatch(value))
            return "letters and digits" if wrong else None
        if name == "whole checkpoints":
            right = isinstance(value, list) and all(whole(step) for step in value)
            return None if right else "a list of steps"
        if name == "remaining releases":
            return None if whole(value) else "a number of releases"
        return None if _alike(mine, value) else f"a value like this process's own, {str(mine)[:40]}"

    return fault


def _alike(mine: Any, value: Any) -> bool:
    """Say whether a value has the form of this process's own."""
    if isinstance(mine, dict):
        same_keys = isinstance(value, dict) and mine.keys() == value.keys()
        return same_keys and all(_alike(item, value[key]) for key, item in mine.items())
    if isinstance(mine, list):
        return isinstance(value, list) and _lists_alike(mine, value)
    if number(mine):
        return number(value)
    return type(mine) is type(value)


def _lists_alike(mine: list[Any], value: list[Any]) -> bool:
    """Lists of rows must be of one length; lists of numbers have one per hosted node."""
    if mine and isinstance(mine[0], dict):
        pairs = zip(mine, value, strict=False)
        return len(mine) == len(value) and all(_alike(own, other) for own, other in pairs)
    return not mine or all(_alike(mine[0], other) for other in value)
