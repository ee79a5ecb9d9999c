"""A task whose examples are read when they are drawn.

Legend: N hosted nodes, E places for examples, K models, D coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from dpcsgp.records.metrics import Direction
from dpcsgp.tasks.base import LossPerExample
from dpcsgp.tasks.examples import NodeExamples
from dpcsgp.tasks.supervised import Supervised


@final
@dataclass(frozen=True)
class LazySupervised:
    """A supervised task that keeps datasets instead of examples.

    Attributes:
        base: module, loss, sizes, public test data and metrics; it holds no private examples.
        nodes: where the examples of each hosted node are; None: it has none.
    """

    base: Supervised
    nodes: tuple[NodeExamples | None, ...]

    @property
    def module(self) -> nn.Module:
        """The model's architecture."""
        return self.base.module

    @property
    def loss(self) -> LossPerExample:
        """Loss of each example."""
        return self.base.loss

    @property
    def num_examples(self) -> Sequence[int]:
        """Declared, public number of examples of each hosted node."""
        return self.base.num_examples

    @property
    def held_examples(self) -> Sequence[int]:
        """Private: how many examples each hosted node really holds."""
        return self.base.held_examples

    def to(self, device: str) -> LazySupervised:
        """Return the task with module and test data on a device; examples follow when drawn."""
        return replace(self, base=self.base.to(device))

    def read_examples(
        self,
        indices_NE: Tensor,
        seeds_NE: Tensor,
        widths_N: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs (N, E, ...), targets (N, E, ...), and which places could be read.

        Args:
            indices_NE: numbers within the node's own examples; those of padding point anywhere.
            seeds_NE: a secret seed for whatever the row of a place draws.
            widths_N: how many places of each node are read.
            rows: which of the hosted nodes these are; None: all.
        """
        shape, device = indices_NE.shape, self.base.inputs.device
        inputs = self.base.inputs.new_zeros(*shape, *self.base.inputs.shape[1:])
        targets = self.base.targets.new_zeros(*shape, *self.base.targets.shape[1:])
        readable_NE = torch.zeros(shape, dtype=torch.bool)
        nodes = self.nodes if rows is None else [self.nodes[row] for row in rows]
        for row, (node, width) in enumerate(zip(nodes, widths_N, strict=True)):
            if node is None:
                continue
            indices_E, seeds_E = indices_NE[row, :width].tolist(), seeds_NE[row, :width].tolist()
            part, readable_NE[row, :width] = node.read(indices_E, seeds_E)
            inputs[row, :width], targets[row, :width] = (values.to(device) for values in part)
        return inputs, targets, readable_NE

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets with one and the same view of every row."""
        seeds_NE, widths_N = torch.zeros_like(indices_NE), [indices_NE.shape[1]] * len(indices_NE)
        inputs, targets, _ = self.read_examples(indices_NE, seeds_NE, widths_N, rows)
        return inputs, targets

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first test examples, or random ones like the training data."""
        return self.base.public_rows(count)

    @property
    def directions(self) -> dict[str, Direction]:
        """Metric -> which values of it are better."""
        return self.base.directions

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return each metric of each model on the test set."""
        return self.base.evaluate(models_KD)
