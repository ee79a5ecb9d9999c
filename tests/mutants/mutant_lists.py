"""Mutants: small faults to be planted in the sources, each of which some test must see.

The lists are the TOML files beside this one. A `source` is a file below src/dpcsgp and the tests
that guard it; a `mutant` replaces `old`, which occurs exactly once there, by `new`, and may name
other `tests` or another `marks` expression.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
_MARKS: Final = "not slow and not stress"


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is planted, and which tests (below tests/) have to see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    marks: str = _MARKS

    def applied(self, text: str) -> str:
        """Return the source with the fault in it; refuses one that moved on."""
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(
                f"mutant {self.name}: its old text occurs {found} times in "
                f"src/dpcsgp/{self.file}, expected once and "
                f"another new text; bring tests/mutants/*.toml up to date: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def load_mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """Read all lists."""
    lists = [tomllib.loads(path.read_text()) for path in sorted(folder.glob("*.toml"))]
    sources = [source for found in lists for source in found["source"]]
    return [_mutant(source, entry) for source in sources for entry in source["mutant"]]


def _mutant(source: dict[str, Any], entry: dict[str, str]) -> Mutant:
    fields = {"file": source["file"], "tests": source["tests"], **entry}
    return Mutant(**{**fields, "tests": tuple(fields["tests"])})
