"""The data of an audit: a canary that some victims hold, as one example or as a person's rows.

The model is linear with loss equal to its output, so an example's gradient is the example itself.

Legend: N nodes, E places for examples, D coordinates, M rows of a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from dpcsgp.records.metrics import Direction
from dpcsgp.tasks.base import random_like


def canary_axis(dim: int) -> Tensor:
    """Return the unit vector of the canary; it lies along no coordinate axis."""
    return (1.0 - 2.0 * (torch.arange(dim) % 3 == 0)) / dim**0.5


def output_as_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the output itself: the gradient of a linear model is then its input."""
    return outputs.flatten(start_dim=-1).sum(-1) + 0.0 * targets


@final
@dataclass(frozen=True)
class CanaryTask:
    """Every first node of a group is a victim: its row of `canary_ND` is its example 0.

    All other examples are zero.

    A row of zeros means that the victim does not hold the canary.
    """

    module: nn.Module
    canary_ND: Tensor
    num_examples: tuple[int, ...]
    loss: Any = output_as_loss

    @property
    def held_examples(self) -> tuple[int, ...]:
        """Every node holds what it declares."""
        return self.num_examples

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, D) and targets (N, E)."""
        canary_ND = self.canary_ND if rows is None else self.canary_ND[list(rows)]
        inputs_NED = canary_ND[:, None, :] * (indices_NE == 0)[:, :, None]
        return inputs_NED, torch.zeros(indices_NE.shape)

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return random rows and targets."""
        return random_like(self.canary_ND, count), torch.zeros(count)

    @property
    def directions(self) -> dict[str, Direction]:
        """Nothing is measured."""
        return {}

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """There is nothing to be good at."""
        return {}


@final
@dataclass(frozen=True)
class CanaryPersons:
    """The same with persons: every row of person 0 of a victim is the canary."""

    single: CanaryTask
    max_rows_per_unit: int

    @property
    def rows(self) -> CanaryPersons:
        """The rows of person k are M k, ..., M k + M - 1."""
        return self

    @property
    def held_examples(self) -> tuple[int, ...]:
        """How many persons each node holds."""
        return self.single.held_examples

    def unit_sizes(self, row: int, units_E: np.ndarray) -> np.ndarray:
        """Return the same number for all persons."""
        return np.full_like(units_E, self.max_rows_per_unit)

    def unit_rows(self, row: int, units_E: np.ndarray, places_EM: np.ndarray) -> np.ndarray:
        """Return the numbers of persons' rows."""
        return units_E[:, None] * self.max_rows_per_unit + places_EM

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rows by their numbers."""
        return self.single.examples(indices_NE // self.max_rows_per_unit, rows)

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return random rows and targets."""
        return self.single.public_rows(count)
