"""Tighter upper bounds on eps for small sampling rates, where one grid cannot hold all losses.

At rate 1e-6 a release nearly always loses about 1e-6 and hardly ever much more, and 10^6 small
losses make up most of the sum: a grid of bounded size is either too coarse for the small or too
short for the large ones. So a release is taken apart at a loss `cut` into two that are made
independently and say at least as much together:

* rare: whether the loss is above the cut, and its value if it is; otherwise "small";
* small: a draw from the outputs with a loss up to the cut, also where the rare part is published.

Whoever sees both can rebuild the release (the second counts where the first says "small"), so their
composition is an upper bound. "Small" has the loss `offset`, the log ratio of the two masses up to
the cut, and the small part's losses fall by it; together: small losses as they are, rare ones less
the offset. Small parts are composed on a fine grid of their own; their sum goes onto the grid of
the rare ones once instead of once per release.

Legend: L grid losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dpcsgp.privacy.events import NeighbouringRelation
from dpcsgp.privacy.pld import (
    FFT_ERROR,
    MOST_COARSENINGS,
    MOST_COMPOSED,
    TAIL_SHARE,
    GridBound,
    LossGrid,
    LossPair,
    Releases,
    compose,
    connect_dots,
    loss_reach,
    normal_mass,
    pair_of,
    read_epsilon,
    tail_per_release,
    window_of,
)

_MOST_RATE: Final = 0.1  # above, one grid is fine enough
_SMALL_BUCKETS: Final = 2**15
_RARE_BUCKETS: Final = 2**17
_PER_DEVIATION: Final = 8  # points of the fine grid per standard deviation of a small loss


@dataclass(frozen=True)
class Split:
    """Where a release is taken apart: small losses are multiples of `interval`, at most `cut`."""

    pair: LossPair
    interval: float
    cut: int

    @property
    def cut_loss(self) -> float:
        return self.cut * self.interval

    def beyond(self, loss: float) -> tuple[float, float]:
        """Return the masses of mix and of N(0) with a larger loss."""
        mix, normal = self.pair.masses(np.array([-np.inf]), self.pair.cut(np.array([loss])))
        return float(mix[0]), float(normal[0])

    def above(self, way: str) -> float:
        """Return the probability of a rare loss."""
        mix, normal = self.beyond(self.cut_loss)
        return {"remove": mix, "add": normal}.get(way, mix + normal)

    def buckets(self, losses_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the masses of mix and of N(0) between neighbouring losses."""
        x_L = self.pair.cut(losses_L)
        return self.pair.masses(x_L[1:], x_L[:-1])


def split_epsilon(releases: Releases, delta: float, relation: NeighbouringRelation) -> GridBound:
    """Return upper bounds on eps with small and rare losses apart; infinite where of no use."""
    counts = [count for _, count in releases]
    # Both parts of a release pass through a transform.
    usable_delta = delta - FFT_ERROR * (2 * sum(counts) + len(counts) + 1)
    if usable_delta < 0.9 * delta or any(event.sampling_rate > _MOST_RATE for event, _ in releases):
        return GridBound((math.inf,))
    tail = tail_per_release(delta, counts)
    splits = [_choose_split(pair_of(event, relation), count, tail) for event, count in releases]
    ways = ("remove", "add") if relation is NeighbouringRelation.ADD_OR_REMOVE_ONE else ("replace",)
    return GridBound(
        tuple(_one_way(splits, counts, way, (delta, usable_delta, tail)) for way in ways)
    )


def _choose_split(pair: LossPair, count: int, tail: float) -> Split:
    """Choose the fine grid by the spread of the small losses, and the cut far outside of that."""
    z = np.linspace(-4.0, 4.0, 801)
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    losses = pair.loss(pair.noise * z)
    deviation = math.sqrt(float(np.sum(weights * (losses - np.sum(weights * losses)) ** 2)))
    lowest, highest = math.log1p(-pair.rate), loss_reach(pair, tail)[1]
    # No loss is below `lowest`; the cut lies at least as far above 0 as that lies below.
    cut = min(max(1000 * deviation, -lowest), highest / 2)
    interval = max(
        deviation / _PER_DEVIATION,
        (cut - lowest) / _SMALL_BUCKETS,
        18 * deviation * math.sqrt(count) / MOST_COMPOSED,
    )
    return Split(pair, interval, math.ceil(cut / interval))


def _one_way(
    splits: Sequence[Split], counts: Sequence[int], way: str, deltas: tuple[float, float, float]
) -> float:
    """Return eps for one direction; `deltas`: delta, what rounding leaves of it, a tail."""
    delta, usable_delta, tail = deltas
    # 1. Compose the small parts of each kind of release, on its own fine grid.
    sums: list[LossGrid] = []
    for split, count in zip(splits, counts, strict=True):
        small = small_grid(split, way)
        window = window_of([small], [count], TAIL_SHARE * delta / 2)
        if window[1] - window[0] > 2 * MOST_COMPOSED:
            return math.inf
        sums.append(compose([small], [count], window, TAIL_SHARE * delta))
    # 2. Compose these sums with all rare parts on one grid, coarsened until the window fits.
    reach = max(loss_reach(split.pair, tail)[1] for split in splits)
    width = sum(grid.interval * len(grid.masses) for grid in sums)
    interval = max(reach / _RARE_BUCKETS, width / MOST_COMPOSED)
    for _ in range(MOST_COARSENINGS):
        grids = [rare_grid(split, interval, tail, way) for split in splits]
        grids += [regrid(grid, interval) for grid in sums]
        times = [*counts, *[1] * len(sums)]
        window = window_of(grids, times, TAIL_SHARE * delta / 2)
        excess = (window[1] - window[0]) / MOST_COMPOSED
        if excess <= 1:
            return read_epsilon(compose(grids, times, window, TAIL_SHARE * delta), usable_delta)
        interval *= 2.0 ** math.ceil(math.log2(excess))
    return math.inf


def small_grid(split: Split, way: str) -> LossGrid:
    """Return the losses up to the cut, given that they are; on the fine grid."""
    interval, cut = split.interval, split.cut
    lowest = 0 if way == "replace" else math.floor(math.log1p(-split.pair.rate) / interval)
    losses_L = np.arange(lowest, cut + 1) * interval
    mix, normal = split.buckets(losses_L)  # no loss is below log(1 - rate), so none is left out
    removed = connect_dots(mix, normal, losses_L[:-1], interval)
    added = connect_dots(normal[::-1], mix[::-1], -losses_L[:0:-1], interval)
    kept = 1 - split.above(way)
    if way == "remove":
        return LossGrid(interval, lowest, removed / kept, 0.0)
    if way == "add":
        return LossGrid(interval, -cut, added / kept, 0.0)
    masses = np.zeros(2 * cut + 1)
    masses[cut:] += removed
    masses[: cut + 1] += added
    masses[cut] += _kink(split.pair)
    return LossGrid(interval, -cut, masses / kept, 0.0)


def _kink(pair: LossPair) -> float:
    """Return the mass at loss 0, where the curves of both directions meet."""
    half = 0.5 / pair.noise
    return (1 - pair.rate) * float(normal_mass(np.array(-half), np.array(half)))


def rare_grid(split: Split, interval: float, tail: float, way: str) -> LossGrid:
    """Return "small" at 0 and the losses above the cut, less the offset."""
    mix_above, normal_above = split.beyond(split.cut_loss)
    offset = 0.0 if way == "replace" else math.log1p(-mix_above) - math.log1p(-normal_above)
    first = math.floor((split.cut_loss - offset) / interval)
    last = max(first + 1, math.ceil((loss_reach(split.pair, tail)[1] - offset) / interval))
    ends_L = offset + interval * np.arange(first, last + 1)
    # the first bucket starts at the cut
    mix, normal = split.buckets(np.maximum(ends_L, split.cut_loss))
    mix_beyond, normal_beyond = split.beyond(float(ends_L[-1]))
    masses = np.zeros(2 * last + 1)
    if way != "add":
        masses[last + first :] += connect_dots(mix, normal, ends_L[:-1], interval)
    if way != "remove":
        masses[: last - first + 1] += connect_dots(
            normal[::-1], mix[::-1], -ends_L[:0:-1], interval
        )
        masses[0] += normal_beyond  # raised to the lowest loss
    masses[last] += 1 - split.above(way)
    return LossGrid(interval, -last, masses, 0.0 if way == "add" else mix_beyond)


def regrid(grid: LossGrid, interval: float) -> LossGrid:
    """Return a distribution on another grid that dominates: connect-the-dots, atom by atom."""
    losses_L = grid.interval * (grid.first + np.arange(len(grid.masses)))
    left_L = np.floor(losses_L / interval)
    right = grid.masses * np.expm1(left_L * interval - losses_L) / math.expm1(-interval)
    places = left_L.astype(np.int64) - int(left_L[0])
    masses = np.bincount(places, grid.masses - right, places[-1] + 2)
    masses += np.bincount(places + 1, right, places[-1] + 2)
    return LossGrid(interval, int(left_L[0]), masses, grid.infinite)
