"""What a task is: a model, a loss per example, private examples per node, and public evaluation data.

Legend: N hosted nodes, E places for examples, K models, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

LossPerExample = Callable[[Tensor, Tensor], Tensor]  # (outputs (E, ...), targets (E, ...)) -> losses (E,)


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

    def examples(self, indices_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) of each node's own examples by their local numbers."""
        ...

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return metric -> (K,) on public evaluation data; `accuracy` is the one that is printed first."""
        ...
