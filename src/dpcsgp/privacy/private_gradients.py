"""The private step: spend and record, draw, fetch, clip, add noise, divide by public constants,
forget.

Private examples are fetched here and nowhere else; what comes out is private already.

Legend: N hosted nodes, E places for examples, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from dpcsgp.errors import PrivateStepError
from dpcsgp.privacy.budget import Budget
from dpcsgp.privacy.clipping.engine import ClippingEngine
from dpcsgp.privacy.ledger import LedgerBook
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.randomness import PrivateRandomness, torch_secrets


class Augment(Protocol):
    """Random views of examples, drawn from a private stream."""

    def __call__(self, inputs: Tensor, random: PrivateRandomness, step: int) -> Tensor:
        """Turn inputs (N, E, ...) into views (N, E, M, ...), without the axis M if there is one
        view."""
        ...


@final
@dataclass(frozen=True)
class PrivateGradients:
    """Private gradients of the hosted nodes; every release is on the ledger's disk before it is
    computed."""

    examples: Callable[[Tensor], tuple[Tensor, Tensor]]
    # how many each node really holds: private, at most the declared number
    held_examples: Sequence[int]
    engine: ClippingEngine
    mechanism: GaussianMechanism
    budget: Budget
    ledger: LedgerBook
    random: PrivateRandomness
    nodes: Sequence[int]
    attempt: int
    augment: Augment | None = None
    node_weights: Sequence[float] | None = None  # public factors; None: every node counts equally

    def __call__(self, model_ND: Tensor, step: int) -> Tensor:
        """Return the private gradients of this step (N, D); nodes without budget or data release
        nothing."""
        active = self._spend_and_record(step)

        def clipped_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
            return self._clipped_sum(model_ND, indices_NE, present_NE, step)

        grad_ND = self.mechanism.release(clipped_sum, step, self.random, active).to(model_ND.dtype)
        if self.node_weights is not None:  # on what is private already
            grad_ND.mul_(torch.tensor(self.node_weights, dtype=grad_ND.dtype)[:, None])
        return grad_ND

    def _spend_and_record(self, step: int) -> list[bool]:
        """Count the releases of this step and bring them to the disk; return which nodes make
        one."""
        rows = range(len(self.nodes))
        active = [self.budget.allows(row) and self.mechanism.num_examples[row] > 0 for row in rows]
        spending = [row for row in rows if active[row]]
        for row in spending:
            self.budget.spend(row)
        events = {self.nodes[row]: self.mechanism.event(row) for row in spending}
        self.ledger.record(step, self.attempt, events)
        return active

    def _clipped_sum(
        self, model_ND: Tensor, indices_NE: Tensor, present_NE: Tensor, step: int
    ) -> Tensor:
        """Fetch the drawn examples and sum their clipped gradients: (N, D), in double precision
        where that is needed."""
        try:
            # the others are blanks
            present_NE = present_NE & (indices_NE < torch.tensor(self.held_examples)[:, None])
            inputs, targets = self.examples(indices_NE)
            if self.augment is not None:  # per example and before clipping
                inputs = self.augment(inputs, self.random, step)
            # Passes run where the data are (`run.device`); state, noise and messages stay in host
            # memory.
            model_ND, present_NE = model_ND.to(inputs.device), present_NE.to(inputs.device)
            with torch_secrets(self.random, step):
                return self._sum_by_shape(model_ND, inputs, targets, present_NE).cpu()
        except (
            Exception
        ) as error:  # its text may quote an example, and would be told to all processes of the run
            raise PrivateStepError(
                f"the private gradients of step {step} could not be computed "
                f"({type(error).__name__}), on blank rows neither; "
                "the reason is shown only on the machine that holds the data"
            ) from error

    def _sum_by_shape(
        self, model_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor
    ) -> Tensor:
        """Sum the nodes of each shape in passes of their own, so that small ones are not padded to
        large."""
        clip_norm, groups = self.mechanism.clip_norm, self.mechanism.rows_of_same_shape()
        if len(groups) == 1:
            (shape,) = groups
            return self.engine.clipped_sum(model_ND, inputs, targets, present_NE, clip_norm, shape)
        sum_ND = torch.empty_like(model_ND, dtype=torch.float64)
        for shape, rows in groups.items():
            width = shape.width(int(present_NE[rows].sum(1).max()))
            examples, labels, present = (
                part[rows, :width] for part in (inputs, targets, present_NE)
            )
            sums = self.engine.clipped_sum(
                model_ND[rows], examples, labels, present, clip_norm, shape
            )
            sum_ND[rows] = sums.double()
        return sum_ND
