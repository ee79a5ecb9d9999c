"""Draw, add noise, divide by public constants: one object that also states the cost.

A release is `(clipped sum over a random batch + noise) / expected batch size`. The mechanism holds
the clip norm; an engine clips to it and sums, through a callback. The drawn batch, its size, the
raw gradients and the clipped sum never leave `privacy/` and what it calls.

Which places the drawn examples take is random, and how many places there are is public (see
`passes`).

Legend: N hosted nodes, E places for examples, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.events import ReleaseEvent, Sampling
from dpcsgp.privacy.noise import SENSITIVITY_SLACK, add_noise_, add_rounded_
from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.privacy.passes import MOST_PLACES, PassShape, pass_shape
from dpcsgp.privacy.shared_noise import SharedNoise
from dpcsgp.randomness import PrivateRandomness

ClippedSum = Callable[[Tensor, Tensor], Tensor]  # (indices_NE, present_NE) -> sum_ND


@final
@dataclass(frozen=True)
class GaussianMechanism:
    """The subsampled Gaussian mechanism of every hosted node.

    Poisson sampling takes each example with probability `expected_batch_size / num_examples`;
    uniform sampling draws exactly `expected_batch_size` examples without replacement. The divisor
    is `expected_batch_size`, never the drawn size.

    Args:
        clip_norm: largest Euclidean norm of an example's gradient.
        noise_multipliers: standard deviations of the noise on the sum, in clip norms; per node.
        expected_batch_sizes: examples per step on average; per node.
        num_examples: declared, public numbers of examples; per node.
        sampling: "poisson" or "uniform".
        fixed_places: for engines whose rows depend on their place (see `passes`).
        most_places: of a pass; fewer take less memory and change nothing that is released but
            rounding.
        shared: own and shared noise of all nodes of the run, if pairs of nodes share noise; the
            noise multipliers are then those that it amounts to.
        pairs: the hosted nodes' part of it, with their secrets; None: a design without keys.

    Raises:
        ConfigError: for a clip norm that is not positive, or a batch larger than its node.
    """

    clip_norm: float
    noise_multipliers: tuple[float, ...]
    expected_batch_sizes: tuple[int, ...]
    num_examples: tuple[int, ...]
    sampling: Sampling = "poisson"
    fixed_places: bool = False
    most_places: int = MOST_PLACES
    shared: SharedNoise | None = None
    pairs: PairNoise | None = None

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise ConfigError(f"privacy.clip_norm = {self.clip_norm}: expected a number above 0")
        for node, (batch, total) in enumerate(
            zip(self.expected_batch_sizes, self.num_examples, strict=True)
        ):
            if total > 0 and not 1 <= batch <= total:
                raise ConfigError(
                    f"privacy.expected_batch_size = {batch}: node {node} has {total} examples; "
                    f"choose a batch size from 1 to {total}"
                )

    def event(self, row: int, step: int | None = None) -> ReleaseEvent:
        """Return what one release of this node costs.

        Args:
            row: which hosted node.
            step: number of the step; None: a step in which all nodes with data release.
        """
        if self.pairs is not None and step is not None:
            return self.pairs.event(row, step)
        if self.shared is not None:
            return self.shared.event(self.pairs.nodes[row] if self.pairs else row)
        return ReleaseEvent(
            sampling=self.sampling,
            sampling_rate=self.expected_batch_sizes[row] / self.num_examples[row],
            noise_multiplier=self.noise_multipliers[row],
        )

    @cached_property
    def shapes(self) -> tuple[PassShape, ...]:
        """The public shape of each node's passes."""
        sizes = zip(self.expected_batch_sizes, self.num_examples, strict=True)
        return tuple(
            pass_shape(max(batch, 1), total, self.sampling, self.fixed_places, self.most_places)
            for batch, total in sizes
        )

    def rows_of_same_shape(self) -> dict[PassShape, list[int]]:
        """Return shape -> rows of the nodes that share passes."""
        groups: dict[PassShape, list[int]] = {}
        for row, shape in enumerate(self.shapes):
            groups.setdefault(shape, []).append(row)
        return groups

    def release(
        self, clipped_sum: ClippedSum, step: int, random: PrivateRandomness, active: Sequence[bool]
    ) -> Tensor:
        """Return the private gradients (N, D) of this step.

        An empty batch is noise alone, and is released.

        Args:
            clipped_sum: turns drawn examples into clipped gradient sums.
            step: number of the gradient step; picks the streams of sampling and noise.
            random: the nodes' secret keys.
            active: which nodes release; the others (no budget, no data) get zeros.
        """
        indices_NE, present_NE = self.draw(step, random, active)
        sum_ND = clipped_sum(indices_NE, present_NE)
        del indices_NE, present_NE  # nobody below may look at who was drawn
        grad_ND = torch.empty(sum_ND.shape, dtype=torch.float32)
        pairs_ND = self.pairs.counts(step, sum_ND.shape[1]) if self.pairs is not None else None
        for row, is_active in enumerate(active):
            if not is_active:
                grad_ND[row] = 0
                continue
            # Always in double precision: how many passes a batch took must not show in which
            # numbers can come out.
            exact_D = sum_ND[row].to("cpu", torch.float64, copy=True)
            if pairs_ND is not None:
                self._add_own_and_shared_(exact_D, pairs_ND[row], step, random, row)
                grad_ND[row] = exact_D
                continue
            if self.noise_multipliers[row] > 0:
                add_noise_(exact_D, self.noise_multipliers[row], self.clip_norm, random, step, row)
            grad_ND[row] = exact_D.div_(self.expected_batch_sizes[row])
        return grad_ND

    def _add_own_and_shared_(
        self,
        sum_D: Tensor,
        counts_D: np.ndarray,
        step: int,
        random: PrivateRandomness,
        row: int,
    ) -> None:
        """Make `weight / batch * sum + own noise + shared noise` in place, on the common grid.

        Everything is a whole multiple of the grid, so that shared noise cancels as integers do.
        """
        assert self.pairs is not None
        law, node, dim = self.pairs.law, self.pairs.nodes[row], sum_D.numel()
        grid = law.grid(dim)
        sum_D.mul_(law.factors[node])
        scale = law.own[node] * (1 + SENSITIVITY_SLACK)
        add_rounded_(sum_D.numpy(), scale / grid, grid, random, step, row)
        sum_D.add_(torch.from_numpy(counts_D), alpha=law.lattice(dim))

    def draw(
        self, step: int, random: PrivateRandomness, active: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """Draw each active node's batch: example numbers (N, E), and which places are taken."""
        drawn = [
            self._draw_row(step, random, row) if is_active else np.zeros(0, dtype=np.int64)
            for row, is_active in enumerate(active)
        ]
        widths = [
            shape.width(len(indices)) for shape, indices in zip(self.shapes, drawn, strict=True)
        ]
        indices_NE = np.zeros((len(drawn), max(widths, default=0)), dtype=np.int64)
        present_NE = np.zeros(indices_NE.shape, dtype=bool)
        for row, indices in enumerate(drawn):
            count = len(indices)
            # Random places, or a random order side by side (see `passes`).
            if self.shapes[row].fixed:
                # In distribution, one example less is then one hole more.
                places = _random_order(widths[row], step, random, row)[:count]
            else:
                places, indices = np.arange(count), indices[_random_order(count, step, random, row)]
            indices_NE[row, places] = indices
            present_NE[row, places] = True
        return torch.from_numpy(indices_NE), torch.from_numpy(present_NE)

    def _draw_row(self, step: int, random: PrivateRandomness, row: int) -> np.ndarray:
        total, batch = self.num_examples[row], self.expected_batch_sizes[row]
        if self.sampling == "poisson":
            # Rounded down: an example is never likelier than the rate that the event states.
            threshold = (batch << 32) // total
            words = random.row_bytes("sampling", step, row, 4 * total).view(np.uint32)
            return np.flatnonzero(words < threshold) if threshold < 2**32 else np.arange(total)
        # the examples with the smallest of random keys are a uniformly random subset
        words = random.row_bytes("sampling", step, row, 8 * total).view(np.uint64)
        return np.argpartition(words, batch - 1)[:batch]


def _random_order(count: int, step: int, random: PrivateRandomness, row: int) -> np.ndarray:
    """Return a uniformly random order of `count` things, from the node's private stream."""
    for attempt in range(100):
        words = random.row_bytes(f"order {attempt}", step, row, 8 * count).view(np.uint64)
        order = np.argsort(words)
        keys = words[order]
        # given that no two keys are equal, all orders are equally likely
        if not (keys[1:] == keys[:-1]).any():
            return order
    raise AssertionError("equal keys a hundred times: the random stream is broken")
