"""Examples from a file or a function: .npz, .csv, .parquet, or `module:function`.

Errors name the file, the line and the remedy. They are for the machine that holds the data.

Legend: J examples.
"""

from __future__ import annotations

import csv
import importlib
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpcsgp.errors import DataError
from dpcsgp.tasks.node_data import NodeData

FORMS: Final = ".npz (x, y), .csv, .parquet or module:function"


def load_examples(
    source: str, target: str | None = None, input_shape: Sequence[int] | None = None
) -> NodeData:
    """Return the examples that a file holds or a function returns.

    Args:
        source: path of a .npz, .csv or .parquet file, or "module:function".
        target: name of the column with the targets; None: the last one.
        input_shape: rows of tables are given this shape if they have as many numbers.

    Raises:
        DataError: the source cannot be read.
    """
    path = Path(source)
    readers = {".npz": _npz, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None and ":" in source and not path.exists():
        return _called(source)
    if reader is None:
        raise DataError(f"data {source}: expected {FORMS}")
    if not path.is_file():
        raise DataError(f"data {source}: no such file; expected {FORMS}")
    if target is not None and reader is _npz:
        raise DataError(f"--target {target}: the targets of a .npz file are its array y")
    inputs, targets = reader(path, target)
    return _shaped(np.asarray(inputs, dtype=np.float32), input_shape), _whole(targets, source)


def _npz(path: Path, target: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the arrays x and y; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x"], arrays["y"]
    except KeyError as error:
        raise DataError(
            f"data {path}: no array {error}; write it with numpy.savez(file, x=..., y=...)"
        ) from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"data {path} cannot be read ({type(error).__name__}); write it with "
            "numpy.savez(file, x=..., y=...), numbers only"
        ) from None


def _csv(path: Path, target: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read rows of numbers, with or without a line of names."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = [(number, row) for number, row in enumerate(csv.reader(file), start=1) if row]
    if not lines:
        raise DataError(f"data {path}: the file is empty")
    named = any(_number(cell) is None for cell in lines[0][1])
    names = [cell.strip() for cell in lines[0][1]] if named else None
    column = _column(names, len(lines[0][1]), target, path)
    rows = [_numbers(row, len(lines[0][1]), f"{path}, line {n}") for n, row in lines[named:]]
    table = np.asarray(rows, dtype=np.float64).reshape(len(rows), len(lines[0][1]))
    return np.delete(table, column, axis=1), table[:, column]


def _column(names: Sequence[str] | None, width: int, target: str | None, path: Path) -> int:
    """Return the number of the column with the targets."""
    if width < 2:
        raise DataError(f"data {path}: one column; expected inputs and a target, with commas")
    if target is None:
        return width - 1
    if names is None or names.count(target) != 1:
        found = ", ".join(names[:20]) if names else "the file has no line of names"
        if names and len(names) > 20:  # the last one is most often the target
            found += f", ... {names[-1]} ({len(names)} columns)"
        raise DataError(f"--target {target}: expected one column of this name in {path}: {found}")
    return names.index(target)


def _numbers(row: Sequence[str], width: int, where: str) -> list[float]:
    if len(row) != width:
        raise DataError(f"data {where}: {len(row)} values, the first line has {width}")
    values = [_number(cell) for cell in row]
    if None in values:
        cell = row[values.index(None)]
        raise DataError(
            f"data {where}: {cell[:40]!r} is no number; fill in missing values and encode "
            "categories as numbers first"
        )
    return [value for value in values if value is not None]


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parquet(path: Path, target: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read a table of numbers with pandas, if it is there."""
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
    column = _column(names, len(names), target, path)
    try:
        table = frame.to_numpy(dtype=np.float64)
    except (ValueError, TypeError):
        raise DataError(
            f"data {path}: a column holds no numbers; encode categories first"
        ) from None
    return np.delete(table, column, axis=1), table[:, column]


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


def _whole(targets: np.ndarray, source: str) -> np.ndarray:
    """Return classes as whole numbers."""
    targets = np.asarray(targets)
    if not np.issubdtype(targets.dtype, np.number):
        raise DataError(f"data {source}: targets are no numbers; number the classes from 0 on")
    rounded = np.asarray(targets).astype(np.int64)
    wrong = np.flatnonzero((rounded != targets).reshape(len(targets), -1).any(axis=1))
    if len(wrong):
        raise DataError(
            f"data {source}, example {wrong[0]}: the target is no whole number; number the classes "
            "from 0 on"
        )
    return rounded
