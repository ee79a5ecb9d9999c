"""The private step: spend and record, draw, fetch, clip, add noise, divide, forget.

The sums are divided by public constants only.
Private examples are fetched here (`fetching`) and nowhere else; what comes out is private already.

Legend: N hosted nodes, E places for examples, D coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, final

import torch
from torch import Tensor

from dpcsgp.errors import PrivateStepError
from dpcsgp.privacy.accounting import composed_epsilon
from dpcsgp.privacy.budget import Budget
from dpcsgp.privacy.clipping.engine import CheckedEngine, ClippingEngine
from dpcsgp.privacy.events import ReleaseLog
from dpcsgp.privacy.fetching import fetch_examples
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows
from dpcsgp.randomness import PrivateRandomness, torch_secrets

_CHECKED_ROWS: Final = 64


class PrivateExamples(Protocol):
    """Where the examples of the hosted nodes are, and public ones to check the engine with."""

    @property
    def held_examples(self) -> Sequence[int]:
        """Private: how many examples each node really holds, at most the declared number."""
        ...

    def examples(self, indices_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) by each node's own numbers."""
        ...

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for checks: test data, or random ones of the same shapes."""
        ...


class Augment(Protocol):
    """Random views of examples, drawn from a private stream."""

    def __call__(self, inputs: Tensor, random: PrivateRandomness, step: int) -> Tensor:
        """Turn inputs (N, E, ...) into views (N, E, M, ...), without the axis M if M = 1."""
        ...


@final
@dataclass(frozen=True)
class PrivateGradients:
    """Private gradients of the hosted nodes.

    The event of a release is on the ledger's disk before the release is computed.

    Attributes:
        source: the nodes' examples; nobody else asks for them.
        engine: sums clipped gradients.
        mechanism: draws batches, adds noise, and states what a release costs.
        budget: how many releases each node may still make.
        ledger: where every release is written down first.
        random: the nodes' secret streams.
        nodes: numbers of the hosted nodes, in the order of all rows.
        attempt: number of this start of the run.
        deltas: the delta of each node's promise; empty: nobody asks for eps.
        augment: random views of an example, if any.
        node_weights: public factors of the nodes' gradients; None: every node counts equally.
    """

    source: PrivateExamples
    engine: ClippingEngine
    mechanism: GaussianMechanism
    budget: Budget
    ledger: ReleaseLog
    random: PrivateRandomness
    nodes: Sequence[int]
    attempt: int = 0
    deltas: Sequence[float] = ()
    augment: Augment | None = None
    node_weights: Sequence[float] | None = None

    def checked(self, model_D: Tensor) -> PrivateGradients:
        """Return these gradients with an engine whose rows do not depend on each other.

        Call it before the first release: the bound on an example's influence rests on it. A slower
        engine, or fixed places, are taken where that is needed.

        Raises:
            ModelError: where even one row at a time does not repeat itself bit for bit.
        """
        if not isinstance(self.engine, CheckedEngine) or not any(self.mechanism.num_examples):
            return self  # an engine that an audit broke on purpose, or nothing to release

        def nodes_by_shape(fixed: bool) -> dict[PassShape, int]:
            groups = replace(self.mechanism, fixed_places=fixed).rows_of_same_shape()
            return {shape: len(rows) for shape, rows in groups.items()}

        public = self.source.public_rows(_CHECKED_ROWS)
        engine, fixed = engine_with_equal_rows(self.engine, model_D, public, nodes_by_shape)
        mechanism = replace(self.mechanism, fixed_places=fixed)
        return replace(self, engine=engine, mechanism=mechanism)

    def __call__(self, model_ND: Tensor, step: int) -> Tensor:
        """Return this step's private gradients (N, D); zeros for nodes that release nothing."""
        active = self._spend_and_record(step)

        def clipped_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
            return self._clipped_sum(model_ND, indices_NE, present_NE, step)

        grad_ND = self.mechanism.release(clipped_sum, step, self.random, active).to(model_ND.dtype)
        if self.node_weights is not None:  # on what is private already
            grad_ND.mul_(torch.tensor(self.node_weights, dtype=grad_ND.dtype)[:, None])
        return grad_ND

    def epsilon_spent(self) -> list[float]:
        """Return each hosted node's eps so far, verified by the accountant from its ledger."""
        pairs = zip(self.nodes, self.deltas, strict=bool(self.deltas))
        return [composed_epsilon(self.ledger.releases(node), delta) for node, delta in pairs]

    def num_releases(self) -> list[int]:
        """Return how many releases each hosted node has made, replayed ones included."""
        return [sum(count for _, count in self.ledger.releases(node)) for node in self.nodes]

    def releases_left(self) -> int | None:
        """Return how many releases the richest hosted node may still make; None: without limit."""
        left = self.budget.remaining
        return None if None in left else max((value or 0 for value in left), default=0)

    def _spend_and_record(self, step: int) -> list[bool]:
        """Count the releases of this step and bring them to the disk; say which nodes make one."""
        rows = range(len(self.nodes))
        has_data = [total > 0 for total in self.mechanism.num_examples]
        active = [self.budget.allows(row) and has_data[row] for row in rows]
        spending = [row for row in rows if active[row]]
        for row in spending:
            self.budget.spend(row)
        events = {self.nodes[row]: self.mechanism.event(row) for row in spending}
        self.ledger.record(step, self.attempt, events)
        return active

    def _clipped_sum(
        self, model_ND: Tensor, indices_NE: Tensor, present_NE: Tensor, step: int
    ) -> Tensor:
        """Fetch the drawn examples and sum their clipped gradients: (N, D), in double if needed."""
        try:
            # Places past what a node really holds are blanks: the declared number alone is public.
            drawn_N = present_NE.sum(1)
            held_N1 = torch.tensor(self.source.held_examples)[:, None]
            present_NE = present_NE & (indices_NE < held_N1)
            inputs, targets, present_NE = fetch_examples(
                self.source, indices_NE, present_NE, self.mechanism.shapes, self.random, step
            )
            if self.augment is not None:  # per example and before clipping
                inputs = self.augment(inputs, self.random, step)
            # Passes run where the data are (`run.device`); state, noise and messages stay in host
            # memory.
            model_ND, present_NE = model_ND.to(inputs.device), present_NE.to(inputs.device)
            with torch_secrets(self.random, step):
                return self._sum_by_shape(model_ND, inputs, targets, present_NE, drawn_N).cpu()
        except Exception as error:  # its text may quote an example, and all processes would hear it
            raise PrivateStepError(
                f"the private gradients of step {step} could not be computed "
                f"({type(error).__name__}); "
                "the reason is shown only on the machine that holds the data"
            ) from error

    def _sum_by_shape(
        self,
        model_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        drawn_N: Tensor,
    ) -> Tensor:
        """Sum the nodes of each shape in their own passes: small ones are not padded to large."""
        clip_norm, groups = self.mechanism.clip_norm, self.mechanism.rows_of_same_shape()
        if len(groups) == 1:
            (shape,) = groups
            return self.engine.clipped_sum(model_ND, inputs, targets, present_NE, clip_norm, shape)
        sum_ND = torch.empty_like(model_ND, dtype=torch.float64)
        for shape, rows in groups.items():
            # Cut off only places that no drawn example took, held or not: counting those that are
            # present would lose the last ones where blanks lie between them.
            width = shape.width(int(drawn_N[rows].max()))
            examples, labels = inputs[rows, :width], targets[rows, :width]
            present = present_NE[rows, :width]
            sums = self.engine.clipped_sum(
                model_ND[rows], examples, labels, present, clip_norm, shape
            )
            sum_ND[rows] = sums.double()
        return sum_ND
