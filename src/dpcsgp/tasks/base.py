"""What a task is: a model, a loss per example, private examples per node, public test data.

Legend: N hosted nodes, E places for examples, J examples, K models, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from dpcsgp.randomness import torch_seed
from dpcsgp.records.metrics import Direction

# (outputs (E, ...), targets (E, ...)) -> losses (E,)
LossPerExample = Callable[[Tensor, Tensor], Tensor]


class Task(Protocol):
    """Training data of the hosted nodes, and how well a model does on public data."""

    @property
    def module(self) -> nn.Module:
        """The model's architecture; its parameters are the public starting point."""
        ...

    @property
    def loss(self) -> LossPerExample:
        """Loss of each example."""
        ...

    @property
    def num_examples(self) -> Sequence[int]:
        """Declared, public number of examples of each hosted node."""
        ...

    @property
    def held_examples(self) -> Sequence[int]:
        """Private: how many examples each hosted node really holds.

        At most the declared number; the rest are blanks.
        """
        ...

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) of each node's examples.

        Args:
            indices_NE: Numbers within the node's own examples, from 0.
            rows: Which of the hosted nodes they are of; None: all.
        """
        ...

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for checks of the model: test data or random rows like them."""
        ...

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return metric -> (K,) on public test data; `accuracy` is printed first."""
        ...

    @property
    def directions(self) -> Mapping[str, Direction]:
        """Metric -> which values of it are better."""
        ...


class MovableTask(Task, Protocol):
    """A task whose module and data can be put on a device."""

    def to(self, device: str) -> Task:
        """Return the task on a device, where forward and backward passes then run."""
        ...


def random_like(rows: Tensor, count: int) -> Tensor:
    """Return random rows like `rows`; whole numbers are 0 or 1, valid in any vocabulary."""
    shape = (count, *rows.shape[1:])
    with torch_seed(0, "rows for checks"):
        drawn = torch.randn(shape) if rows.is_floating_point() else torch.randint(0, 2, shape)
    return drawn.to(rows.device, rows.dtype)


def gather(
    indices_NE: Tensor,
    held_examples: Sequence[int],
    *values: Tensor,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Look up each node's examples by their local numbers.

    Args:
        indices_NE: Numbers within the node's own examples. Those of padding may point anywhere,
            past the end too.
        held_examples: How many examples each node holds.
        values: Tensors (J, ...) with the examples of one node after the other.
        rows: Which of the nodes the numbers belong to; None: all.

    Returns:
        (N, E, ...) of each tensor.
    """
    starts_N1 = torch.tensor([0, *accumulate(held_examples)][:-1], dtype=torch.int64)[:, None]
    if rows is not None:
        starts_N1 = starts_N1[list(rows)]
    total = len(values[0])
    if not total:  # every node of this process holds blanks alone
        return tuple(part.new_zeros(*indices_NE.shape, *part.shape[1:]) for part in values)
    # Padding past the end reads the last example; nobody counts it.
    flat = (indices_NE + starts_N1).reshape(-1).clamp_(max=total - 1).to(values[0].device)
    return tuple(
        part.index_select(0, flat).view(*indices_NE.shape, *part.shape[1:]) for part in values
    )
