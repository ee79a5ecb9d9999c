"""Which columns of a table are inputs, targets and persons: by public names, or by their places.

Errors name the file, the columns and the remedy. They are for the machine that holds the data.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from dpcsgp.errors import DataError

_MOST_NAMES: Final = 20  # of columns that an error lists


@final
@dataclass(frozen=True)
class TableForm:
    """What the columns of a file are.

    Attributes:
        target: columns with the targets, as the owner named them; empty: not named.
        unit: name of the column, or array, that says whose a row is; None: nobody asks.
        unit_needed: whether a file without that column is refused.
        input_shape: rows of tables are given this shape if they have as many numbers.
        target_shape: shape of targets that are numbers; None: they are classes.
        classes: the public labels of the classes; empty: they are numbered already.
        num_classes: how many there are; 0: not known, or targets are no classes.
        columns: public names of the inputs in their order; empty: the places count.
        public_target: public names of the columns with the targets; empty: there are none.
    """

    target: tuple[str, ...] = ()
    unit: str | None = None
    unit_needed: bool = True
    input_shape: tuple[int, ...] | None = None
    target_shape: tuple[int, ...] | None = None
    classes: tuple[str | int, ...] = ()
    num_classes: int = 0
    columns: tuple[str, ...] = ()
    public_target: tuple[str, ...] = ()

    @property
    def num_targets(self) -> int:
        """Number of columns that hold targets."""
        return math.prod(self.target_shape or ())

    @property
    def has_text(self) -> bool:
        """Whether targets are text."""
        return any(isinstance(label, str) for label in self.classes)


@final
@dataclass(frozen=True)
class Places:
    """The places of the columns of a table, and their names; None: it has no line of names."""

    inputs: list[int]
    targets: tuple[int, ...]
    unit: int | None
    names: tuple[str, ...] | None
    assumed: bool = False  # whether targets are the last columns because nobody named them

    @classmethod
    def of(cls, names: Sequence[str] | None, width: int, form: TableForm, path: Path) -> Places:
        """Find the columns; targets that nobody names are the last.

        Raises:
            DataError: a column is missing, there twice, or not expected.
        """
        unit = None
        if form.unit is not None and (form.unit_needed or form.unit in (names or ())):
            unit = _place(names, form.unit, "--unit", path)
        rest = [place for place in range(width) if place != unit]
        if len(rest) < 1 + form.num_targets:
            raise DataError(
                f"data {path}: one column; expected inputs and a target, with commas"
                if width < 2
                else f"data {path}: {width} columns; expected inputs and {form.num_targets} targets"
                + (" beside --unit" if unit is not None else "")
            )
        if form.target and len(form.target) != form.num_targets:
            raise DataError(
                f"--target {' --target '.join(form.target)}: {len(form.target)} columns, but a "
                f"target has {form.num_targets} numbers; name each of its columns once"
            )
        targets = tuple(_place(names, name, "--target", path) for name in form.target)
        if unit in targets or len(set(targets)) < len(targets):
            raise DataError(
                f"--target {' --target '.join(form.target)}: every column once, and another than "
                "that of --unit"
            )
        if form.columns and names is not None:
            return cls._by_name(names, unit, form, path)
        assumed, targets = not targets, targets or tuple(rest[-form.num_targets :])
        inputs = [place for place in rest if place not in targets]
        return cls(inputs, targets, unit, None if names is None else tuple(names), assumed)

    @classmethod
    def _by_name(
        cls, names: Sequence[str], unit: int | None, form: TableForm, path: Path
    ) -> Places:
        """Find the columns by their public names; refuse others, which nobody would look at."""
        target = form.public_target or form.target
        if both := [name for name in (*target, form.unit) if name in form.columns]:
            raise DataError(
                f"--target or --unit {both[0]}: the roster says that this column is an input "
                "(data.columns); name another one, or have a roster made without it"
            )
        known = {*form.columns, *target, form.unit}
        left = [name for name in names if name not in known]
        # A target that nobody names is what is left, if that leaves no choice.
        if not target and len(left) == form.num_targets == 1:
            target, left = tuple(left), []
        counts = Counter(names)
        wanted = (*form.columns, *target)
        missing = [name for name in wanted if not counts[name]]
        twice = [name for name in wanted if counts[name] > 1]
        found = {
            f"no column {listed(missing)}": missing and "rename or add what is missing",
            f"more than one column {listed(twice)}": twice and "remove what is there twice",
            f"unexpected columns {listed(left)}": left
            and "remove them, or have the roster made with them",
            "no target": not target and "name its column with --target NAME",
        }
        faults = {fault: remedy for fault, remedy in found.items() if remedy}
        if faults:
            raise DataError(
                f"data {path}: {'; '.join(faults)}. The inputs of all parties have the names in "
                f"data.columns of the roster: {'; '.join(map(str, faults.values()))}"
            )
        places = {name: place for place, name in enumerate(names)}
        inputs = [places[name] for name in form.columns]
        return cls(inputs, tuple(places[name] for name in target), unit, tuple(names))

    @property
    def input_names(self) -> tuple[str, ...] | None:
        """Names of the inputs, in the order in which they are used."""
        return None if self.names is None else tuple(self.names[place] for place in self.inputs)

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """Names of the targets."""
        return None if self.names is None else tuple(self.names[place] for place in self.targets)

    def told(self, place: int) -> str:
        """Name a column: by its name, or by its number from 1 on."""
        return f"column {place + 1}" if self.names is None else f"column {self.names[place]!r}"

    @property
    def told_target(self) -> str:
        """Name the first column with targets, and say why it is one."""
        last = " (the last)" if self.assumed else ""
        return f"{self.told(self.targets[0])}{last} was taken as target"

    @property
    def target_remedy(self) -> str:
        """Say how another column becomes the target."""
        if not self.assumed:
            return ""
        if self.names is None:
            return "put the target into the last column, or write a line of names; "
        return f"name the target with --target NAME (columns: {listed(self.names)}); "


def listed(names: Sequence[object]) -> str:
    """Return names for an error: the first ones and the last, which most often is the target."""
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown += f", ... {names[-1]!r} ({len(names)} in all)"
    return shown


def read_header(path: Path) -> list[str]:
    """Return the names in the first line of a CSV file; no other line is read.

    Raises:
        DataError: there is no such line.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = next((row for row in csv.reader(file) if row), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"data {path} cannot be read ({type(error).__name__}); expected a .csv file"
        ) from None
    names = [cell.strip() for cell in first]
    if not names or all(as_number(name) is not None for name in names):
        raise DataError(f"data {path}: the first line holds no names; write one name per column")
    return names


def as_number(cell: str) -> float | None:
    """Return the finite number that a cell holds; None: it holds none."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _place(names: Sequence[str] | None, name: str, option: str, path: Path) -> int:
    """Return the number of a column."""
    if names is None or names.count(name) != 1:
        found = ", ".join(names[:_MOST_NAMES]) if names else "the file has no line of names"
        if names and len(names) > _MOST_NAMES:
            found += f", ... {names[-1]} ({len(names)} columns)"
        raise DataError(f"{option} {name}: expected one column of this name in {path}: {found}")
    return names.index(name)
