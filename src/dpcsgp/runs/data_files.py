"""Examples from a file or a function: .npz, .csv, .parquet, or `module:function`.

Errors name the file, the line and the remedy. They are for the machine that holds the data.

Legend: J examples.
"""

from __future__ import annotations

import csv
import importlib
import math
import zipfile
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from dpcsgp.errors import DataError
from dpcsgp.runs.table_columns import Places, TableForm, as_number, listed
from dpcsgp.tasks.node_data import NodeData

FORMS: Final = ".npz (x, y), .csv, .parquet or module:function"
_MISSING: Final = ("", "na", "nan", "nat", "none", "null")  # cells that say nothing
_FILL_IN: Final = "fill in missing values, with public ones, or leave the example out"


@final
@dataclass(frozen=True)
class FileExamples:
    """The examples of a file, whose each row is, and the names of its columns; None: not known."""

    data: NodeData
    identifiers: Sequence[Any] | None = None
    columns: tuple[str, ...] | None = None
    target: tuple[str, ...] | None = None


@final
@dataclass(frozen=True)
class _Table:
    """What a file holds, and how its rows and columns are named in errors."""

    inputs: np.ndarray
    targets: np.ndarray
    identifiers: Sequence[Any] | None
    places: Places | None = None  # None: arrays without columns
    lines: Sequence[int] | None = None  # numbers of the lines that the rows stand in

    def row(self, number: int) -> str:
        """Name a row."""
        return f"example {number}" if self.lines is None else f"line {self.lines[number]}"

    def target_place(self, number: int) -> str:
        """Name a row, and the column with its target."""
        if self.places is None:
            return self.row(number)
        return f"{self.row(number)}, {self.places.told(self.places.targets[0])}"


def load_examples(source: str, form: TableForm = TableForm()) -> FileExamples:
    """Return the examples that a file holds or a function returns.

    Args:
        source: path of a .npz, .csv or .parquet file, or "module:function".
        form: what its columns are; what a function returns is taken as it is.

    Raises:
        DataError: the source cannot be read.
    """
    path = Path(source)
    reader = _readers().get(path.suffix.lower())
    if reader is None and ":" in source and not path.exists():
        return FileExamples(_called(source))
    if reader is None:
        raise DataError(f"data {source}: expected {FORMS}")
    if not path.is_file():
        raise DataError(f"data {source}: no such file; expected {FORMS}")
    if form.target and reader is _npz:
        raise DataError(f"--target {form.target[0]}: the targets of a .npz file are its array y")
    table = reader(path, form)
    try:
        with np.errstate(over="ignore"):  # what is too large is refused as not finite
            inputs = np.asarray(table.inputs, dtype=np.float32)
    except ValueError:
        raise DataError(f"data {source}: inputs are no numbers; encode them first") from None
    _refuse_missing(inputs, table, source)
    data = _shaped(inputs, form.input_shape), _targets(table, form, source)
    names = (None, None)
    if table.places is not None:
        names = table.places.input_names, table.places.target_names
    return FileExamples(data, table.identifiers, *names)


def is_file(source: str) -> bool:
    """Say whether a source is a file by its name, and no function."""
    return Path(source).suffix.lower() in _readers()


def _readers() -> dict[str, Callable[[Path, TableForm], _Table]]:
    return {".npz": _npz, ".csv": _csv, ".parquet": _parquet}


def _npz(path: Path, form: TableForm) -> _Table:
    """Read the arrays x and y, and that of the unit; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            unit = form.unit if form.unit in arrays or form.unit_needed else None
            return _Table(arrays["x"], arrays["y"], None if unit is None else arrays[unit])
    except KeyError as error:
        whose = f", {form.unit}=..." if form.unit is not None else ""
        raise DataError(
            f"data {path}: no array {error}; write it with numpy.savez(file, x=..., y=...{whose})"
        ) from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"data {path} cannot be read ({type(error).__name__}); write it with "
            "numpy.savez(file, x=..., y=...), numbers only"
        ) from None


def _csv(path: Path, form: TableForm) -> _Table:
    """Read rows of numbers, with or without a line of names; labels and persons may be text."""
    lines = _lines(path)
    if not lines:
        raise DataError(f"data {path}: the file is empty")
    first = lines[0][1]
    names = [cell.strip() for cell in first] if _has_names(first, form) else None
    places = Places.of(names, len(first), form, path)
    text = {places.unit, *(places.targets if form.has_text else ())}
    rows = lines[names is not None :]
    values = [_cells(row, places, len(first), text, path, number) for number, row in rows]
    table = np.asarray(values, dtype=np.float64).reshape(len(rows), len(first))
    targets = table[:, list(places.targets)]
    if form.has_text:
        labels = [[row[place].strip() for place in places.targets] for _, row in rows]
        targets = np.asarray(labels, dtype=object).reshape(len(rows), len(places.targets))
    whose = None if places.unit is None else _whose([row[places.unit] for _, row in rows])
    numbers = [number for number, _ in rows]
    return _Table(table[:, places.inputs], targets, whose, places, numbers)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the cells of every line that has some, and its number.

    A quote that is not closed would take all lines behind it into one cell, so that one row could
    delete others: no cell may hold the end of a line.
    """
    found: list[tuple[int, list[str]]] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                if any("\n" in cell or "\r" in cell for cell in row):
                    raise DataError(
                        f"data {path}, line {reader.line_num}: a cell goes on over several lines; "
                        'is a quotation mark not closed? Write quotation marks in a cell as ""'
                    )
                if row:
                    found.append((reader.line_num, row))
    except UnicodeDecodeError:
        raise DataError(f"data {path}: it is not UTF-8; save it as CSV in UTF-8") from None
    except csv.Error as error:
        where = f"data {path}, after line {found[-1][0] if found else 0}"
        raise DataError(f"{where}: this is no CSV ({error})") from None
    return found


def _has_names(first: Sequence[str], form: TableForm) -> bool:
    """Say whether the first line holds names: something in it is neither number nor label."""
    if form.columns and {cell.strip() for cell in first}.issuperset(form.columns):
        return True  # names may look like numbers
    # Without names the targets are the last columns; the label of an example is no name.
    labels = form.classes if form.has_text and not form.target and form.unit is None else ()
    return any(as_number(cell) is None and cell.strip() not in labels for cell in first)


def _cells(
    row: Sequence[str], places: Places, width: int, text: Container[int | None], path: Path,
    number: int,
) -> list[float]:  # fmt: skip
    """Return the numbers of a line; cells of columns with text count as 0."""
    where = f"data {path}, line {number}"
    if len(row) != width:
        raise DataError(f"{where}: {len(row)} values, the first line has {width}")
    values = [0.0 if place in text else as_number(cell) for place, cell in enumerate(row)]
    if None not in values:
        return [value for value in values if value is not None]
    place = values.index(None)
    where, cell = f"{where}, {places.told(place)}", row[place].strip()
    if cell.lower() in _MISSING:
        raise DataError(f"{where}: {cell!r} is no number; {_FILL_IN}")
    if place in places.targets:
        raise DataError(
            f"{where}: {cell[:40]!r} is no number, and {places.told_target}; "
            f"{places.target_remedy}number the classes from 0 on, or have data.classes in the "
            "roster list the labels"
        )
    raise DataError(f"{where}: {cell[:40]!r} is no number; encode categories as numbers first")


def _whose(cells: Sequence[str]) -> list[str | None]:
    """Return identifiers as they are, None for missing ones; `UnitRows` says which are equal."""
    return [None if cell.strip().lower() in _MISSING else cell for cell in cells]


def _parquet(path: Path, form: TableForm) -> _Table:
    """Read a table with pandas, if it is there."""
    try:
        pandas: Any = importlib.import_module("pandas")
        frame = pandas.read_parquet(path)
    except ImportError:
        raise DataError(
            f"data {path}: .parquet needs pandas and pyarrow; install them, or write a .csv"
        ) from None
    except (ValueError, OSError) as error:
        raise DataError(f"data {path} cannot be read ({type(error).__name__})") from None
    names = [str(name) for name in frame.columns]
    places = Places.of(names, len(names), form, path)
    inputs = _numbers(frame, places.inputs, places, path)
    if form.has_text:
        targets = frame.iloc[:, list(places.targets)].to_numpy(dtype=object)
    else:
        targets = _numbers(frame, places.targets, places, path)
    whose = None if places.unit is None else frame.iloc[:, places.unit].tolist()
    return _Table(inputs, targets, whose, places)


def _numbers(frame: Any, columns: Sequence[int], places: Places, path: Path) -> np.ndarray:
    """Return columns of a table as numbers; a missing entry is NaN."""
    found = []
    for place in columns:
        try:
            found.append(frame.iloc[:, place].to_numpy(dtype=np.float64, na_value=np.nan))
        except (ValueError, TypeError):
            why = f", and {places.told_target}" if place in places.targets else ""
            remedy = places.target_remedy if place in places.targets else ""
            raise DataError(
                f"data {path}, {places.told(place)}: it holds no numbers{why}; {remedy}encode "
                "categories first"
            ) from None
    return np.stack(found, axis=1) if found else np.zeros((len(frame), 0))


def _called(source: str) -> NodeData:
    """Import a module of this machine and call a function of it."""
    module_name, _, attribute = source.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise DataError(
            f"data {source}: cannot be imported ({error}); put its folder on PYTHONPATH"
        ) from None
    return function()


def _shaped(inputs: np.ndarray, input_shape: Sequence[int] | None) -> np.ndarray:
    """Give rows of a table the shape of the model's inputs."""
    if input_shape is not None and inputs.shape[1:] == (math.prod(input_shape),):
        return inputs.reshape(len(inputs), *input_shape)
    return inputs


def _refuse_missing(inputs: np.ndarray, table: _Table, source: str) -> None:
    """Refuse inputs that are missing or infinite, by row and column."""
    bad = np.argwhere(~np.isfinite(inputs))
    if not len(bad):
        return
    row, *place = (int(part) for part in bad[0])
    if table.places is not None:
        column = table.places.told(table.places.inputs[place[0]])
    else:
        column = f"column {place[0]}" if len(place) == 1 else f"at {tuple(place)}"
    raise DataError(
        f"data {source}, {table.row(row)}, {column}: the value is not finite; {_FILL_IN} "
        f"({len(set(bad[:, 0]))} of {len(inputs)} examples have such values)"
    )


def _targets(table: _Table, form: TableForm, source: str) -> np.ndarray:
    """Return targets in the shape of one example: labels, classes or numbers."""
    targets = np.atleast_1d(table.targets)
    shape = form.target_shape or ()
    if math.prod(targets.shape[1:]) == math.prod(shape):  # tables have a column for each number
        targets = targets.reshape(len(targets), *shape)
    if form.has_text:
        _refuse_unknown(targets, table, form, source)
        return targets
    if not np.issubdtype(targets.dtype, np.number):
        remedy = (
            "number the classes from 0 on, or have data.classes in the roster list the labels"
            if form.target_shape is None
            else "give numbers"
        )
        raise DataError(f"data {source}: targets are no numbers; {remedy}")
    if form.target_shape is not None:
        return targets.astype(np.float32)
    targets = _whole(targets, table, source)
    _refuse_unknown(targets, table, form, source)
    return targets


def _whole(targets: np.ndarray, table: _Table, source: str) -> np.ndarray:
    """Return classes as whole numbers."""
    with np.errstate(invalid="ignore"):  # NaN is no whole number either
        rounded = targets.astype(np.int64)
    wrong = np.flatnonzero((rounded != targets).reshape(len(targets), -1).any(axis=1))
    if not len(wrong):
        return rounded
    row = int(wrong[0])
    value = float(targets.reshape(len(targets), -1)[row, 0])
    if table.places is None:
        raise DataError(
            f"data {source}, {table.row(row)}: the target is no whole number; number the classes "
            "from 0 on"
        )
    raise DataError(
        f"data {source}: {table.places.told_target}, and {table.row(row)} holds {value:g} there, "
        f"no whole number; {table.places.target_remedy}number the classes from 0 on"
    )


def _refuse_unknown(targets: np.ndarray, table: _Table, form: TableForm, source: str) -> None:
    """Refuse labels outside of the public classes."""
    known = form.classes or range(form.num_classes)
    if not known or targets.ndim != 1:
        return  # their form is refused where it is compared
    allowed = set(known)
    row = next((row for row, label in enumerate(targets.tolist()) if label not in allowed), None)
    if row is None:
        return
    remedy = table.places.target_remedy if table.places is not None else ""
    where = f"data {source}, {table.target_place(row)}: label {targets.tolist()[row]!r}"
    if not form.classes:
        raise DataError(
            f"{where}, but there are {len(known)} classes: labels run from 0 to {len(known) - 1}; "
            f"{remedy}correct it or leave the example out"
        )
    raise DataError(
        f"{where} is not among the {len(known)} public classes ({listed(known)}); "
        f"{remedy}correct it or leave the example out, or have data.classes in the roster list it"
    )
