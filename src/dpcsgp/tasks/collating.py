"""Rows of different lengths, brought to one public shape by a collate function.

The function gets one row at a time and gives a batch of one: padding to the longest of a drawn
batch would tell everybody's row how long the others are. So it pads to a length that everybody may
know, and rows that then still differ are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from dpcsgp.errors import DataError
from dpcsgp.tasks.node_data import Columns, opened

Collate = Callable[[list[Any]], Any]  # [row] -> a batch of one


@final
@dataclass(frozen=True)
class CollatedRows:
    """A map-style dataset whose rows went through a collate function, one by one."""

    data: Any
    collate: Collate
    hint: ClassVar[str] = (
        "your collate returned {kind}s of shapes {here} and {first} (example 0); pad to one fixed, "
        "public length"
    )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return _only_row(self.collate([self.data[index]]))


def collated(data: Any, collate: Collate | None, where: str) -> Any:
    """Return the data with every row collated; without a function, or without data, as they are.

    Test data that are whole columns are public, and padded already.
    """
    if data is None or collate is None:
        return data
    rows = opened(data, where)
    if isinstance(rows, Columns):
        if where == "test_data":
            return data
        raise DataError(
            f"{where}: collate works on rows, and these are whole columns; give a list of rows or "
            "a map-style dataset, or leave collate out"
        )
    return CollatedRows(rows, collate)


def _only_row(batch: Any) -> Any:
    """Return the row of a batch of one."""
    if isinstance(batch, Mapping):
        return {key: _only_row(part) for key, part in batch.items()}
    if isinstance(batch, tuple | list) and not isinstance(batch[0], int | float | str):
        return tuple(_only_row(part) for part in batch)
    if len(batch) != 1:
        shape = tuple(batch.shape) if isinstance(batch, Tensor) else len(batch)
        raise ValueError(f"collate was given one row and returned a batch of {shape}")
    return batch[0]
