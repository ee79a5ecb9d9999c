"""The private step: draw, fetch, clip, add noise, divide, keep, spend and record, hand over.

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

from dpcsgp.errors import CheckpointError, PrivateStepError
from dpcsgp.privacy.accounting import composed_epsilon, epsilon_against
from dpcsgp.privacy.budget import Budget
from dpcsgp.privacy.clipping.engine import CheckedEngine, ClippingEngine
from dpcsgp.privacy.events import ReleaseEvent, ReleaseLog
from dpcsgp.privacy.fetching import Augment, DrawnBatch, UnitExamples
from dpcsgp.privacy.kept_releases import KeptReleases, Release
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.privacy.pair_noise import Gather
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows, units_of_rows
from dpcsgp.randomness import PrivateRandomness, torch_secrets

_CHECKED_ROWS: Final = 64


class PrivateExamples(Protocol):
    """Where the examples of the hosted nodes are, and public ones to check the engine with."""

    @property
    def held_examples(self) -> Sequence[int]:
        """Private: how many examples each node really holds, at most the declared number."""
        ...

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) by each node's own numbers.

        `rows` says which of the hosted nodes they are; None: all.
        """
        ...

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for checks: test data, or random ones of the same shapes."""
        ...


@final
@dataclass(frozen=True)
class PrivateGradients:
    """Private gradients of the hosted nodes.

    The event of a release is on the ledger's disk before the release leaves this object.

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
        node_weights: public factors of the nodes' gradients; None: every node counts equally, or
            the mechanism has weighed them before it added shared noise.
        kept: where releases stay until their step is in a checkpoint; None: nowhere.
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
    kept: KeptReleases | None = None

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
        if isinstance(self.source, UnitExamples):
            public = units_of_rows(public, self.source.max_rows_per_unit)
        engine, fixed = engine_with_equal_rows(self.engine, model_D, public, nodes_by_shape)
        mechanism = replace(self.mechanism, fixed_places=fixed)
        return replace(self, engine=engine, mechanism=mechanism)

    def join(self, first_step: int, steps: int, gather: Gather) -> int | None:
        """Agree with the other processes before the first release of this start.

        Args:
            first_step: number of the step that comes next.
            steps: number of steps of the run.
            gather: all-gathers a JSON value under a name, by rank.

        Returns:
            How many releases the richest hosted node may still make; None: without limit.
        """
        paid = self._settle(first_step)
        pairs = self.mechanism.pairs
        if pairs is not None:
            spent = {node: self.ledger.releases(node) for node in self.nodes}
            # With pairs a budget depends on when the others stop: it is known only now.
            ends = pairs.join(first_step, steps, spent, gather, paid)
            self.budget.remaining[:] = [
                max(0, end - first_step - steps_paid)
                for end, steps_paid in zip(ends, paid, strict=True)
            ]
        # Kept releases that are paid for carry a node further than its budget says.
        left = [
            None if remaining is None else remaining + steps_paid
            for remaining, steps_paid in zip(self.budget.remaining, paid, strict=True)
        ]
        known = [value for value in left if value is not None]
        return max(known, default=0) if len(known) == len(left) else None

    def _settle(self, first_step: int) -> list[int]:
        """Write the lines that kept releases of the next steps lack; they will be sent.

        Returns:
            How many of the next steps each hosted node has released, and paid for.
        """
        paid = [0] * len(self.nodes)
        if self.kept is None:
            return paid
        for place, step in enumerate(self.kept.steps_from(first_step)):
            release = self.kept.find(step)
            assert release is not None
            # A crash may have come before the line, or between the lines of two nodes.
            missing: list[ReleaseEvent | None] = [
                event if event and not self.ledger.has(node, step, release.attempt) else None
                for node, event in zip(self.nodes, release.events, strict=True)
            ]
            self._spend_and_record(step, missing, release.attempt)
            # After a gap (a file was deleted) steps are taken as they come, but not counted on.
            if step == first_step + place:
                paid = [
                    count + (event is not None)
                    for count, event in zip(paid, release.events, strict=True)
                ]
        return paid

    def __call__(self, model_ND: Tensor, step: int) -> Tensor:
        """Return this step's private gradients (N, D); zeros for nodes that release nothing.

        A release that an earlier start made and kept is returned as it is: nothing is drawn.
        """
        if self.kept is None:
            active = self._active(step)
            self._spend_and_record(step, self._events(step, active), self.attempt)
            return self._released(model_ND, step, active)
        release = self.kept.find(step)
        if release is not None:  # its lines were written when this start joined
            return self._as_large_as(model_ND, release.grad_ND)
        active = self._active(step)
        events = self._events(step, active)
        release = Release(self._released(model_ND, step, active), tuple(events), self.attempt)
        self.kept.keep(step, release)
        self._spend_and_record(step, events, self.attempt)
        return release.grad_ND

    def _as_large_as(self, model_ND: Tensor, grad_ND: Tensor) -> Tensor:
        """Refuse a kept release of another model."""
        if grad_ND.shape != model_ND.shape:
            raise CheckpointError(
                f"a kept release has the shape {tuple(grad_ND.shape)}, this run has "
                f"{tuple(model_ND.shape)}: ledger/kept is of another run; restore it from a backup"
            )
        return grad_ND.to(model_ND.dtype)

    def forget_before(self, step: int) -> None:
        """Let go of kept releases of earlier steps: no checkpoint leads back to them."""
        if self.kept is not None:
            self.kept.forget_before(step)

    def forget_all(self) -> None:
        """Let go of all kept releases: the run has ended everywhere."""
        if self.kept is not None:
            self.kept.clear()

    def _released(self, model_ND: Tensor, step: int, active: Sequence[bool]) -> Tensor:
        """Draw, fetch, clip, add noise, divide: the private gradients (N, D)."""

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

    def epsilon_all_collude(self) -> list[float]:
        """Return each hosted node's eps so far if all others tell all they know."""
        pairs = zip(self.nodes, self.deltas, strict=bool(self.deltas))
        return [epsilon_against(self.ledger.releases(node), delta, "all") for node, delta in pairs]

    def num_releases(self) -> list[int]:
        """Return how many releases each hosted node has made, replayed ones included."""
        return [sum(count for _, count in self.ledger.releases(node)) for node in self.nodes]

    def _active(self, step: int) -> list[bool]:
        """Say which nodes release: those with data and budget, as all others know."""
        pairs, has_data = self.mechanism.pairs, [n > 0 for n in self.mechanism.num_examples]
        known = pairs.active(step) if pairs is not None else None
        return [
            self.budget.allows(row) and has_data[row] and (known is None or known[node])
            for row, node in enumerate(pairs.nodes if pairs is not None else self.nodes)
        ]

    def _events(self, step: int, active: Sequence[bool]) -> list[ReleaseEvent | None]:
        """Return what the step costs each node; None for those that release nothing."""
        return [
            self.mechanism.event(row, step) if is_active else None
            for row, is_active in enumerate(active)
        ]

    def _spend_and_record(
        self, step: int, events: Sequence[ReleaseEvent | None], attempt: int
    ) -> None:
        """Count these releases and bring them to the disk."""
        # With pairs the budgets of a start are not known before all have joined.
        if self.mechanism.pairs is None or self.mechanism.pairs.joined:
            for row, event in enumerate(events):
                if event is not None:
                    self.budget.spend(row)
        made = {
            node: event for node, event in zip(self.nodes, events, strict=True) if event is not None
        }
        self.ledger.record(step, attempt, made)

    def _clipped_sum(
        self, model_ND: Tensor, indices_NE: Tensor, present_NE: Tensor, step: int
    ) -> Tensor:
        """Fetch the drawn examples and sum their clipped gradients: (N, D), in double if needed."""
        try:
            # Places past what a node really holds are blanks: the declared number alone is public.
            drawn_N = present_NE.sum(1)
            held_N1 = torch.tensor(self.source.held_examples)[:, None]
            present_NE = present_NE & (indices_NE < held_N1)
            # Passes run where the data are (`run.device`); state, noise and messages stay in host
            # memory.
            with torch_secrets(self.random, step):
                return self._sum_by_shape(model_ND, indices_NE, present_NE, drawn_N, step)
        except Exception as error:  # its text may quote an example, and all processes would hear it
            raise PrivateStepError(
                f"the private gradients of step {step} could not be computed "
                f"({type(error).__name__}); "
                "the reason is shown only on the machine that holds the data"
            ) from error

    def _sum_by_shape(
        self,
        model_ND: Tensor,
        indices_NE: Tensor,
        present_NE: Tensor,
        drawn_N: Tensor,
        step: int,
    ) -> Tensor:
        """Sum the nodes of each shape in their own passes: small ones are not padded to large."""
        groups = self.mechanism.rows_of_same_shape()
        sum_ND = torch.empty_like(model_ND, dtype=torch.float64)
        for shape, rows in groups.items():
            # Cut off only places that no drawn example took, held or not: counting those that are
            # present would lose the last ones where blanks lie between them.
            width = shape.width(int(drawn_N[rows].max()))
            batch = DrawnBatch(
                self.source,
                rows,
                indices_NE[rows, :width],
                present_NE[rows, :width],
                shape,
                self.random,
                step,
                self.augment,
            )
            sums = self._sum_of(model_ND[rows], batch, width).cpu()
            if len(groups) == 1:
                return sums
            sum_ND[rows] = sums.double()
        return sum_ND

    def _sum_of(self, model_ND: Tensor, batch: DrawnBatch, width: int) -> Tensor:
        """Sum a drawn batch, of which the engine fetches one pass at a time."""
        clip_norm, shape = self.mechanism.clip_norm, batch.shape
        if isinstance(self.engine, CheckedEngine):
            return self.engine.sum_passes(model_ND, width, batch, clip_norm, shape)
        # an engine that an audit broke on purpose knows whole batches only
        inputs, targets, present_NE, filled_NEM = batch(slice(0, width))
        units = {} if filled_NEM is None else {"filled_NEM": filled_NEM}
        return self.engine.clipped_sum(
            model_ND.to(inputs.device), inputs, targets, present_NE, clip_norm, shape, **units
        )
