"""Whatever holds numbers becomes a tensor: arrays of any kind, tables, lists; text becomes labels.

Tables are known by their `to_numpy`, so that pandas and the like are not needed here. Missing
entries become NaN, for the check of missing values to find.

Legend: J examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.errors import ConfigError, DataError, RefusedDataError

# Kinds of numpy dtypes: what torch takes, and what it takes after a change.
_NUMBERS: Final = "biuf"
_TEXT: Final = "USOT"
_SHOWN: Final = 12  # classes that a message lists
_UNSIGNED: Final = {"u2": np.int32, "u4": np.int64, "u8": np.int64}

Column = Tensor | np.ndarray  # an array only where it holds labels that are no numbers


def is_column(values: Any) -> bool:
    """Tell whether this is a tensor, an array or a table: values of many examples."""
    return isinstance(values, Tensor | np.ndarray) or hasattr(values, "to_numpy")


def read_column(values: Any, where: str, kind: str) -> Column:
    """Return a tensor (J, ...), or for text in targets an array of labels.

    Args:
        values: tensor, array, table, column of a table, sparse matrix or list.
        where: whose data, for errors.
        kind: "inputs" or "targets".
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, list) and values and all(isinstance(part, Tensor) for part in values):
        return torch.stack(values)
    array = _array(values, where, kind)
    if array.dtype.kind == "O":
        array = _from_objects(array)
    if array.dtype.kind in _NUMBERS:
        return _from_numbers(array)
    if array.dtype.kind not in _TEXT:
        raise RefusedDataError(
            where, f": {kind} are {array.dtype}; give numbers (dates, for example, as days)"
        )
    if kind == "inputs":
        raise RefusedDataError(
            where, ": inputs hold text; give numbers, such as one column per known value"
        )
    return array


def _array(values: Any, where: str, kind: str) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.filled(values.astype(np.float64), np.nan)
    if hasattr(values, "toarray"):  # a sparse matrix
        return values.toarray()
    if hasattr(values, "to_numpy"):
        return _from_table(values, where, kind)
    try:
        return np.asarray(values)
    except ValueError:
        raise RefusedDataError(
            where, f": {kind} are lists of unequal lengths; crop or pad them to one length"
        ) from None


def _from_table(table: Any, where: str, kind: str) -> np.ndarray:
    """Return a table's numbers as floats, one column's as they are; a missing entry is NaN."""
    columns = getattr(table, "columns", None)
    if columns is None or (kind == "targets" and len(columns) == 1):
        column = table if columns is None else table[next(iter(columns))]
        array = np.asarray(column.to_numpy())
        return _from_objects(array) if array.dtype.kind == "O" else array
    found = {name: np.asarray(table[name].to_numpy()) for name in columns}
    numbers = {
        name: _from_objects(part) if part.dtype.kind == "O" else part
        for name, part in found.items()
    }
    text = [str(name) for name, part in numbers.items() if part.dtype.kind not in _NUMBERS]
    if text:
        raise RefusedDataError(
            where,
            f": {kind}: columns {', '.join(map(repr, text))} of the table hold no numbers; leave "
            "them out or encode them, for example as one column per known value",
        )
    return np.stack([part.astype(np.float32) for part in numbers.values()], axis=1)


def _from_objects(array: np.ndarray) -> np.ndarray:
    """Return the numbers that an array of Python objects holds; text stays as it is."""
    flat = array.reshape(-1)
    if any(isinstance(value, str) for value in flat):
        return array
    # What is neither text nor a number, such as None or pandas' NA, is missing.
    numbers = [
        value if isinstance(value, bool | int | float | np.number | np.bool_) else np.nan
        for value in flat
    ]
    return np.array(numbers).reshape(array.shape)


def _from_numbers(array: np.ndarray) -> Tensor:
    """Return a tensor of an array of any byte order, stride and width."""
    code = array.dtype.str[1:]
    if code in _UNSIGNED:
        array = array.astype(_UNSIGNED[code])
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    shape, native = array.shape, array.dtype.newbyteorder("=")
    array = np.ascontiguousarray(array, dtype=native).reshape(shape)  # it adds an axis to scalars
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that may not be written: nobody writes here
        return torch.as_tensor(array)


def plain(values: Tensor, keep_bytes: bool = False) -> Tensor:
    """Return detached values in the number formats that models are trained in.

    Floating-point numbers become float32, whole ones int64; with `keep_bytes` bytes stay bytes.
    """
    values = values.detach()
    if values.is_floating_point():
        return values.to(torch.float32)
    if values.is_complex():
        raise DataError("complex numbers cannot be trained on; give real and imaginary parts")
    return values if values.dtype == torch.uint8 and keep_bytes else values.to(torch.int64)


def public_classes(labels: Column | None, given: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the public list of labels whose places are the numbers of classes; None: numbers.

    Args:
        labels: targets of the public test data, if there are any.
        given: the caller's `classes`.
    """
    if given is not None:
        classes = tuple(_value(label) for label in given)
        if len(set(classes)) < max(len(classes), 1) or isinstance(given, str):
            raise ConfigError(f"classes = {given!r}: expected a list of different labels")
        return classes
    if isinstance(labels, np.ndarray):
        return tuple(sorted({_value(label) for label in labels.reshape(-1)}, key=str))
    return None


def label_numbers(
    labels: Any, classes: tuple[Any, ...] | None, where: str, single: bool = False
) -> Tensor:
    """Return the place of every label in the public list.

    Args:
        labels: one label per example.
        classes: the public list; None: there is none.
        where: whose labels these are, for errors.
        single: whether `where` names the example already.

    Raises:
        RefusedDataError: for labels that are not in the list, and for text without a list.
    """
    if classes is None:
        raise RefusedDataError(
            where,
            ": targets hold text, and the order of classes is public: give classes=[...] with all "
            "labels that may occur, or test_data with all of them",
        )
    places = {label: place for place, label in enumerate(classes)}
    flat = [_value(label) for label in np.asarray(labels).reshape(-1)]
    unknown = next((row for row, label in enumerate(flat) if label not in places), None)
    if unknown is not None:
        shown = ", ".join(map(repr, classes[:_SHOWN])) + (", ..." if len(classes) > _SHOWN else "")
        raise RefusedDataError(
            where if single else f"{where}, example {unknown}",
            f": label {flat[unknown]!r} is not among the {len(classes)} public "
            f"classes ({shown}); correct it or leave the example out, or add the label to the "
            "public classes, the same everywhere",
        )
    numbers = torch.tensor([places[label] for label in flat], dtype=torch.int64)
    return numbers.reshape(np.shape(labels))


def _value(label: Any) -> Any:
    """Return a label as plain Python has it."""
    return label.item() if isinstance(label, np.generic | Tensor) else label
