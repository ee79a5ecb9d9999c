"""Units of several rows, such as all rows of one person: who owns which row, and their task.

Legend: N hosted nodes, E places for examples, J rows of a node, K models, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, final
from uuid import UUID

import numpy as np
from torch import Tensor, nn

from dpcsgp.errors import RefusedDataError
from dpcsgp.records.metrics import Direction
from dpcsgp.tasks.base import LossPerExample
from dpcsgp.tasks.lazy_task import LazySupervised
from dpcsgp.tasks.supervised import Supervised

# what an identifier may be: two of one kind that mean the same are equal
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "a number": (int, float),
    "text": str,
    "bytes": bytes,
    "a time": datetime,
    "a date": date,  # after times, which are dates too
    "a decimal": Decimal,
    "a UUID": UUID,
}


@final
@dataclass(frozen=True)
class UnitRows:
    """The rows of each unit of a node: those of unit k are `order_J[starts[k] : starts[k + 1]]`."""

    order_J: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, identifiers: Any, where: str) -> UnitRows:
        """Bring rows with equal identifiers together; `where` names the data in errors.

        Raises:
            RefusedDataError: for identifiers that are missing, of different kinds, or not one per
                row.
        """
        plain = [
            _identifier(value, f"{where}, example {row}")
            for row, value in enumerate(_plain_list(identifiers, where))
        ]
        _refuse_different_kinds(plain, where)
        numbers: dict[Hashable, int] = {}
        found = [numbers.setdefault(_meaning(value), len(numbers)) for value in plain]
        unit_J = np.array(found, dtype=np.int64)
        counts = np.bincount(unit_J, minlength=len(numbers))
        order_J = np.argsort(unit_J, kind="stable")
        return cls(order_J, np.concatenate([[0], np.cumsum(counts)]))

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        """Number of rows of all units together."""
        return len(self.order_J)

    def sizes(self, units_E: np.ndarray) -> np.ndarray:
        """Return how many rows each of these units has (E)."""
        return self.starts[units_E + 1] - self.starts[units_E]

    def at(self, units_E: np.ndarray, places_EM: np.ndarray) -> np.ndarray:
        """Return the numbers (E, M) of the rows at these places of each of the units."""
        return self.order_J[self.starts[units_E][:, None] + places_EM]


def _plain_list(identifiers: Any, where: str) -> list[Any]:
    """Return identifiers of any kind of column as plain Python values."""
    if isinstance(identifiers, str | bytes | Mapping | Set) or not isinstance(
        identifiers, Iterable
    ):
        raise RefusedDataError(
            where, f": unit is a {type(identifiers).__name__}; expected one identifier per row"
        )
    if getattr(identifiers, "ndim", 1) != 1:
        raise RefusedDataError(
            where,
            f": unit has the shape {tuple(identifiers.shape)}; expected one identifier per row",  # pyright: ignore[reportAttributeAccessIssue]
        )
    if hasattr(identifiers, "tolist"):
        return identifiers.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    return list(identifiers)


def _identifier(value: Any, where: str) -> Hashable:
    """Return an identifier; a missing one equals no other, and would hide whose row it is."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1:
        value = value.item()
    if _is_missing(value):
        raise RefusedDataError(
            where, ": its identifier is missing; give every row one, or leave the row out"
        )
    if _kind(value) is None:  # others may equal only themselves
        raise RefusedDataError(
            where,
            f": its identifier is a {type(value).__name__}; expected a number or text",
        )
    assert isinstance(value, Hashable)
    return value


def _meaning(value: Hashable) -> Hashable:
    """Return what an identifier means: text that is a number is that number, spaces do not count.

    Each by itself, without a look at the others: were "7" and "7.0" one person or two depending on
    what somebody else is called, one person could split all others. Two persons in one are safe,
    one person in two is not.
    """
    if isinstance(value, tuple):
        return tuple(map(_meaning, value))
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text


def _is_missing(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_missing, value))
    if isinstance(value, float | Decimal):
        return value != value
    if isinstance(value, str):
        return not value.strip()
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _kind(value: Any) -> str | None:
    """Return the kind of an identifier, or of all parts of a tuple; None: it cannot be one."""
    if isinstance(value, tuple):
        kinds = [_kind(part) for part in value]
        return None if None in kinds else f"({', '.join(map(str, kinds))})"
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), None)


def _refuse_different_kinds(identifiers: Sequence[Hashable], where: str) -> None:
    """Refuse 7 beside "7": whoever is called both would count as two persons, and pay for one.

    Tables that were read piece by piece hold such columns.
    """
    kinds = [_kind(value) for value in identifiers]
    for row, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise RefusedDataError(
                f"{where}, example {row}",
                f": its identifier is {kind}, that of example 0 is {kinds[0]}; equal ones would "
                "count as two persons: give all rows one kind, such as text",
            )


@final
@dataclass(frozen=True)
class UnitTask:
    """A supervised task whose examples are units of several rows.

    Attributes:
        rows: the task of single rows; `examples` and `read_examples` of it take row numbers.
        units: whose rows belong together, for each hosted node; None: it has no data.
        num_examples: declared, public number of units of each hosted node.
        max_rows_per_unit: the public cap on the rows of a unit that count in one step.
    """

    rows: Supervised | LazySupervised
    units: tuple[UnitRows | None, ...]
    num_examples: tuple[int, ...]
    max_rows_per_unit: int

    @property
    def module(self) -> nn.Module:
        """The model's architecture."""
        return self.rows.module

    @property
    def loss(self) -> LossPerExample:
        """Loss of each row."""
        return self.rows.loss

    @property
    def held_examples(self) -> tuple[int, ...]:
        """Private: how many units each hosted node really holds."""
        return tuple(len(units) if units is not None else 0 for units in self.units)

    def unit_sizes(self, row: int, units_E: np.ndarray) -> np.ndarray:
        """Return how many rows each of these units of a hosted node has; without data, none."""
        units = self.units[row]
        return units.sizes(units_E) if units else np.zeros_like(units_E)

    def unit_rows(self, row: int, units_E: np.ndarray, places_EM: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows at these places of each of the units."""
        units = self.units[row]
        return units.at(units_E, places_EM) if units else np.zeros_like(places_EM)

    def to(self, device: str) -> UnitTask:
        """Return the task with module and data on a device."""
        return replace(self, rows=self.rows.to(device))

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return single rows by their numbers."""
        return self.rows.examples(indices_NE, rows)

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first test examples, or random ones like the training data."""
        return self.rows.public_rows(count)

    @property
    def directions(self) -> Mapping[str, Direction]:
        """Metric -> which values of it are better."""
        return self.rows.directions

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return each metric of each model on the test set, row by row."""
        return self.rows.evaluate(models_KD)
