"""Columns of private rows that look wrong: marks for missing values, and another scale.

The owner of the rows reads of it on the machine that holds them, before anything is released. It is
written nowhere, sent to nobody, and changes nothing.

Legend: J rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from dpcsgp.runs.telling import tell
from dpcsgp.tasks.examples import NodeExamples, StackedExamples

_MARKS: Final = (-999.0, -9999.0, -99999.0, -999999.0)  # usual ones for "missing"
_HUGE: Final = 1e20  # larger ones are fill values of file formats
_FAR: Final = 5.0  # times as large as all others of its column
_OTHER_SCALE: Final = 100.0
_FEWEST_ROWS: Final = 16  # with fewer, quartiles say nothing
_MOST_ROWS: Final = 2000  # of a node, spread over its rows
_MOST_VALUES: Final = 2**22  # of all nodes together
_MOST_NAMED: Final = 3


def warn_about_columns(
    parts: Mapping[int, NodeExamples], test: tuple[Tensor, Tensor] | None
) -> None:
    """Warn of marks for missing values, and of inputs on another scale than the test data's.

    Args:
        parts: node -> its examples; those in memory are looked at.
        test: public inputs and targets.
    """
    stacked = {node: part for node, part in parts.items() if isinstance(part, StackedExamples)}
    room = _MOST_VALUES // max(len(stacked), 1)
    marked, scaled = [], []
    for node, part in stacked.items():
        for kind, values in (("inputs", part.inputs), ("targets", part.targets)):
            marked += [f"node {node}, {found}" for found in _marks(values, kind)]
        if test is not None:
            found = _other_scale(part.inputs, test[0], room)
            scaled += [f"node {node}, {found}"] if found else []
    if marked:
        tell(
            f"{_some(marked)}: this looks like a mark for a missing value, and it would train the "
            "model as a number; fill it in with public values, or leave these examples out"
        )
    if scaled:
        tell(
            f"{_some(scaled)}. A model trained on one scale is of no use on the other; bring "
            "private and test data to the same unit, with published means and ranges"
        )


def _some(found: list[str]) -> str:
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def _marks(values: Tensor, kind: str) -> list[str]:
    """Return columns whose smallest or largest value stands for "missing"."""
    if not values.is_floating_point() or not values.numel():
        return []
    flat_JW = values.reshape(len(values), -1)
    low_W, high_W = flat_JW.amin(0), flat_JW.amax(0)
    names = []
    suspect_W = (low_W <= _MARKS[0]) | (high_W >= _HUGE)
    for column in suspect_W.nonzero().flatten().tolist():
        low, high = float(low_W[column]), float(high_W[column])
        if max(-low, high) >= _HUGE:
            names.append(f"{_named(values, column, kind)} goes beyond {_HUGE:g}")
        elif low in _MARKS and _stands_out(flat_JW[:, column], low):
            names.append(f"{_named(values, column, kind)} holds {low:g}")
    return names


def _stands_out(column_J: Tensor, mark: float) -> bool:
    """Tell whether no other value is negative, or all others are far smaller."""
    others = column_J[column_J != mark]
    if not len(others):
        return False
    return bool(others.min() >= 0) or abs(mark) > _FAR * float(others.abs().max())


def _other_scale(inputs: Tensor, test: Tensor, room: int) -> str:
    """Name the column that differs most from the test data's in size; empty: none does."""
    if not inputs.is_floating_point() or min(len(inputs), len(test)) < _FEWEST_ROWS:
        return ""
    if inputs.dim() != 2:  # pictures, series: one size for all their values
        sizes = [float(_spread(part, room).abs().mean()) for part in (inputs, test)]
        ratio = max(sizes) / max(min(sizes), 1e-30)
        return _sizes("the inputs are", *sizes) if min(sizes) > 0 and ratio > _OTHER_SCALE else ""
    here, there = (_quartiles(_spread(part, room)) for part in (inputs, test))
    # Columns that are mostly zero have no size. Quartiles keep columns of two modes apart.
    known_W = (here[1] > 0) & (there[1] > 0)
    apart_W = known_W & ((here[0] > there[2]) | (there[0] > here[2]))
    ratio_W = torch.where(apart_W, (here[1] / there[1]).log().abs(), 0.0)
    if not bool((ratio_W.exp() > _OTHER_SCALE).any()):
        return ""
    column = int(ratio_W.argmax())
    name = f"{_named(inputs, column, 'inputs')} is"
    return _sizes(name, float(here[1][column]), float(there[1][column]))


def _sizes(name: str, here: float, there: float) -> str:
    # Only the power of ten: it is enough to find the unit.
    times = max(here, there) / min(here, there)
    word = "larger" if here > there else "smaller"
    return (
        f"{name} more than {10 ** int(torch.tensor(times).log10())} times {word} than in test_data"
    )


def _spread(values: Tensor, room: int) -> Tensor:
    """Return some rows from all over, (J, W) in double."""
    width = max(values[:1].numel(), 1)
    rows = min(_MOST_ROWS, max(room // width, _FEWEST_ROWS))
    return values[:: max(1, len(values) // rows)].reshape(-1, width).double()


def _quartiles(values_JW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sorted_JW = values_JW.abs().sort(0).values
    low, middle, high = (int(share * (len(sorted_JW) - 1)) for share in (0.25, 0.5, 0.75))
    return sorted_JW[low], sorted_JW[middle], sorted_JW[high]


def _named(values: Tensor, column: int, kind: str) -> str:
    if kind == "targets":
        return "a target"
    if values.dim() == 2:
        return f"column {column} of the inputs"
    place = torch.unravel_index(torch.tensor(column), values.shape[1:])
    return f"the place {tuple(int(part) for part in place)} of the inputs"
