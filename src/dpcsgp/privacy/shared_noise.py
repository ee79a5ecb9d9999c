"""How much noise nodes keep to themselves and how much pairs share, for all nodes of a run.

Everything is in the unit in which gradients are averaged: node i releases

    factor_i * (clipped sum) + own_i z_i + sum_j +- shared z_ij,    factor_i = weight_i / batch_i,

so that one example moves it by at most sensitivity_i = factor_i * clip_norm, and what pairs share
cancels in the average of all nodes. `cancelling` has the law, `docs/cancelling-noise.md` the proof.

The share between the two kinds of noise follows one rule (`calibrate_shared_noise`). More shared
noise hides the nodes behind each other and lets the average be cleaner, but makes every single
message rougher, which costs through compression and disagreement. With a level o every node keeps

    own_i = min(o, what independent noise would need),

pairs share the least noise that then hides everybody as promised, and o is the level with the least

    (variance of the average) + price * (mean variance of a single release).

The price of rough messages comes from the doctor's steady-state law (`runs.noise_price`).

Legend: N nodes of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, final

import numpy as np

from dpcsgp.errors import ConfigError
from dpcsgp.kernels.rounded_normal import LARGEST_SCALE
from dpcsgp.privacy.cancelling import effective_noise_multipliers, noise_groups
from dpcsgp.privacy.events import ReleaseEvent, Sampling
from dpcsgp.privacy.noise import SENSITIVITY_SLACK, grid_size

_LEVELS: Final = 48  # levels of own noise that are tried
_MOST_SHARED: Final = 30.0  # pairs share at most this many times what independent noise would be
# Deviation of the rounded pair noise's law from a Gaussian: exp(-2 pi^2 16) = 1e-137 per release.
_SMOOTH: Final = 4.0


@final
@dataclass(frozen=True)
class SharedNoise:
    """Own and shared noise of every node of a run, and what it promises.

    Attributes:
        own: standard deviation of each node's own noise, per coordinate.
        shared: standard deviation of what each pair of a group adds and subtracts.
        factors: weight over expected batch size of each node; 0 for nodes without data.
        clip_norm: largest norm of an example's gradient.
        sampling_rates: expected batch size / declared examples of each node.
        sampling: how batches are drawn.
        max_colluders: how many other nodes the promise may not trust.
    """

    own: tuple[float, ...]
    shared: float
    factors: tuple[float, ...]
    clip_norm: float
    sampling_rates: tuple[float, ...]
    sampling: Sampling
    max_colluders: int

    @property
    def sensitivities(self) -> tuple[float, ...]:
        """By how much one example moves each node's release."""
        return tuple(factor * self.clip_norm for factor in self.factors)

    def with_batch(self, batch: int, rate: float) -> SharedNoise:
        """Return the same promise for nodes that all draw `batch` examples at this rate."""
        ratio = 1 / (batch * max(self.factors))
        return replace(
            self,
            own=tuple(ratio * own for own in self.own),
            shared=ratio * self.shared,
            factors=tuple(ratio * factor for factor in self.factors),
            sampling_rates=(rate,) * len(self.own),
        )

    def event(self, node: int, active: tuple[bool, ...] | None = None) -> ReleaseEvent:
        """Return what a release costs this node, if these nodes release in the same step.

        Args:
            node: whose release it is; it must be active.
            active: which nodes release, and so have pairs; None: all that have data.
        """
        by_colluders = self._multipliers(active or tuple(map(bool, self.factors)))[node]
        # In a small group fewer others are left than may collude: then nobody else is honest.
        stated = by_colluders[min(self.max_colluders, len(by_colluders) - 1)]
        return ReleaseEvent(
            self.sampling, self.sampling_rates[node], stated, self.max_colluders, by_colluders
        )

    def _multipliers(self, active: tuple[bool, ...]) -> list[tuple[float, ...]]:
        return _by_colluders(self.own, self.shared, self.sensitivities, active)

    def grid(self, dim: int) -> float:
        """Return the common grid of all releases, a power of two.

        Half of what the smallest sensitivity allows: scaling by the factor rounds too.
        """
        smallest = min(value for value in self.sensitivities if value > 0)
        return grid_size(smallest, dim) / 2

    def lattice(self, dim: int) -> float:
        """Return the step of the shared noise, a power of two and a multiple of the grid.

        What is drawn is a rounded Gaussian: given the fractions that rounding cut off, a Gaussian
        on a shifted lattice. It is so fine that the own noise blurs it: with m nodes in a group and
        lambda = 1 / (1 / shared^2 + m / own^2), the step is at most sqrt(lambda) / 4, so that a
        lattice Gaussian under the own noise is a Gaussian but for a factor of 1 +- 1e-130
        (smoothing lemma). Where pairs fail to cancel, each end has a stream of its own: the largest
        eigenvalue of the streams' Gram matrix, m, grows to 2 (m - 1) at most, and the factor is
        1 +- 1e-60.

        Raises:
            ConfigError: where the own noise is too small for any step.
        """
        own = min(own for own, factor in zip(self.own, self.factors, strict=True) if factor)
        size = max(len(group) for group in noise_groups(len(self.own)))
        width = 1 / math.sqrt(1 / self.shared**2 + size / own**2)
        step = 2.0 ** math.floor(math.log2(width / _SMOOTH))
        if step < self.grid(dim):
            raise ConfigError(
                f"privacy.max_colluders = {self.max_colluders}: the own noise of some node "
                f"({own:g}) would be too small for the grid of {dim} coordinates; use a larger "
                'max_colluders, or "all"'
            )
        return step

    def check(self, dim: int) -> None:
        """Refuse what cannot be drawn, before anything is spent.

        Raises:
            ConfigError: the own noise of some node is far below the grid or the shared noise.
        """
        if self.shared * (1 + SENSITIVITY_SLACK) / self.lattice(dim) > LARGEST_SCALE:
            raise ConfigError(
                f"privacy.max_colluders = {self.max_colluders}: the nodes are too unequal for "
                f"shared noise ({self.shared / min(o for o in self.own if o):.0f} times the own "
                'noise of some node); set algorithm.node_weights = "examples", expected batch '
                'sizes nearer to each other, or privacy.max_colluders = "all"'
            )

    def variance_of_average(self) -> float:
        """Return the variance per coordinate of the average over all nodes: pairs cancel in it."""
        return sum(own**2 for own in self.own) / len(self.own) ** 2

    def variance_of_release(self) -> float:
        """Return the mean variance per coordinate of one node's release, pairs included."""
        return _release_variance(self.own, self.shared, self.sensitivities)


@lru_cache(maxsize=64)
def _by_colluders(
    own: tuple[float, ...],
    shared: float,
    sensitivities: tuple[float, ...],
    active: tuple[bool, ...],
) -> list[tuple[float, ...]]:
    """Return per node its multipliers against 0, 1, ... colluders; the last: all others."""
    moved = [
        value if is_active else 0.0 for value, is_active in zip(sensitivities, active, strict=True)
    ]
    largest = max(sum(moved[node] > 0 for node in group) for group in noise_groups(len(own)))
    rows = [
        effective_noise_multipliers(own, shared, moved, colluders) for colluders in range(largest)
    ]
    # More colluders never hide a node better: the running minimum takes out rounding.
    return [
        tuple(itertools.accumulate((row[node] for row in rows), min)) for node in range(len(own))
    ]


def _release_variance(own: Sequence[float], shared: float, sensitivities: Sequence[float]) -> float:
    total, count = 0.0, 0
    for group in noise_groups(len(own)):
        active = [node for node in group if sensitivities[node] > 0]
        total += sum(own[node] ** 2 + (len(active) - 1) * shared**2 for node in active)
        count += len(active)
    return total / count


def calibrate_shared_noise(
    needed: Sequence[float], sensitivities: Sequence[float], max_colluders: int, price: float
) -> tuple[tuple[float, ...], float]:
    """Return own noise per node and shared noise by the rule above.

    Args:
        needed: noise multiplier that each node's promise asks for; 0 for nodes without data.
        sensitivities: by how much one example moves each node's release; 0 likewise.
        max_colluders: against how many other nodes the promise holds.
        price: what variance of a single release costs, in variance of the average.

    Returns:
        Standard deviations in the unit of the sensitivities. Without a level that is better than
        independent noise, the shared noise is 0.
    """
    alone = tuple(m * s for m, s in zip(needed, sensitivities, strict=True))
    best = (_cost(alone, 0.0, sensitivities, price), alone, 0.0)
    for level in np.geomspace(max(alone) / math.sqrt(2 * len(alone)), max(alone), _LEVELS):
        own = tuple(min(float(level), value) for value in alone)
        shared = _least_shared(own, alone, sensitivities, max_colluders)
        if shared is not None:
            found = (_cost(own, shared, sensitivities, price), own, shared)
            best = min(best, found, key=lambda choice: choice[0])
    return best[1], best[2]


def _cost(
    own: Sequence[float], shared: float, sensitivities: Sequence[float], price: float
) -> float:
    average = sum(value**2 for value in own) / len(own) ** 2
    return average + price * _release_variance(own, shared, sensitivities)


def _least_shared(
    own: Sequence[float], alone: Sequence[float], sensitivities: Sequence[float], colluders: int
) -> float | None:
    """Return the least shared noise that hides every node as well as `alone` would; None: none."""

    def hides(shared: float) -> bool:
        found = effective_noise_multipliers(own, shared, sensitivities, colluders)
        pairs = zip(found, sensitivities, alone, strict=True)
        return all(value * moved >= wanted for value, moved, wanted in pairs if moved > 0)

    low, high = 0.0, _MOST_SHARED * max(alone)
    if hides(low):
        return low
    if not hides(high):
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high
