"""Rigorous upper bounds on the eps of composed releases, from privacy-loss distributions.

The privacy loss of one release is a random variable; eps follows from the distribution of the sum
of all losses. Here a release becomes a distribution on a grid that provably dominates it
(connect-the-dots: the mass of a bucket moves to the bucket's two ends so that both the upper and
the lower distribution keep their mass there), and composition is one Fourier transform. The method
is that of the package dp-accounting, against whose upper and lower estimates the tests hold these
numbers. Its own implementation is not called because it takes minutes for small noise on its fixed
grid, takes differences of near-equal deltas (spurious mass on fine grids), and refuses sampling
without replacement.

With `s` the noise multiplier, `q` the sampling rate, `N(m) = Normal(m, s^2)` and `mix = (1 - q)
N(0) + q N(-1)`:

* poisson, remove: (mix, N(0)); poisson, add: (N(0), mix) mirrored. eps is the larger of the two.
  That was removing in every case tried, and for Renyi divergences, which add up over releases, it
  always is (Mironov, Talwar, Zhang 2019). That does not settle it for eps at a given delta after
  many releases, so both are computed.
* replace one: the divergence curve max over both directions, i.e. (mix, N(0)) for losses above 0
  and (N(0), mix) below, with `s` halved. It holds for uniform sampling and, with the same rate, for
  Poisson sampling: both make the output `(1 - q) a + q b` against `(1 - q) a + q b'` where `a`,
  `b`, `b'` are pairwise at most `2 clip_norm` apart, and advanced joint convexity then gives `H_(1
  + q (t - 1)) <= q H_t(Gaussian, shift 2)` for t >= 1.

References: Doroshenko et al., "Connect the Dots" (2022); Zhu, Dong, Wang, "Optimal Accounting of
Differential Privacy via Characteristic Function" (2022); Balle, Barthe, Gaboardi, "Privacy
Amplification by Subsampling" (2018).

Legend: L grid losses, ascending multiples of the grid interval; buckets lie between neighbouring
losses (L - 1 of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import ndtr, ndtri

from dpcsgp.privacy.events import NeighbouringRelation, ReleaseEvent

Releases = Sequence[tuple[ReleaseEvent, int]]

# variance that the grid may add, as a fraction; measured to move eps by about half of it
_GRID_TOLERANCE: Final = 1e-3
_FEWEST_BUCKETS: Final = 2**10
_MOST_BUCKETS: Final = 2**15
MOST_COMPOSED: Final = 2**19
MOST_COARSENINGS: Final = 20
# share of delta that truncated tails may use up; they are booked as infinite losses
TAIL_SHARE: Final = 1e-4
# Mass per release that rounding in the Fourier transform may misplace (largest seen against long
# doubles: 4e-16).
FFT_ERROR: Final = 5e-16


@dataclass(frozen=True)
class LossPair:
    """The pair (mix, N(0)) behind a release: the noise that counts and the sampling rate."""

    noise: float
    rate: float

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return log(mix(x) / N(0)(x)), which falls in x from infinity to log(1 - rate)."""
        exponent = -(0.5 + x) / self.noise**2
        if self.rate == 1:
            return exponent
        # log(1 - q + q exp(exponent)), by the form that loses no digits: around 0, and far away
        near = np.log1p(self.rate * np.expm1(np.clip(exponent, -1.0, 1.0)))
        far = np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + exponent)
        return np.where(np.abs(exponent) > 1.0, far, near)

    def cut(self, losses: np.ndarray) -> np.ndarray:
        """Return the x at which the loss equals `losses`; infinity where no loss is so small."""
        return -0.5 - self.noise**2 * (losses if self.rate == 1 else self._exponent(losses))

    def _exponent(self, losses: np.ndarray) -> np.ndarray:
        """Return log((exp(loss) - (1 - rate)) / rate)."""
        rest, log_rate = 1 - self.rate, math.log(self.rate)
        # each range of losses by the form that loses no digits there
        with np.errstate(divide="ignore"):
            low = np.log(np.maximum(np.exp(np.minimum(losses, -1.0)) - rest, 0.0)) - log_rate
            near = np.log1p(np.maximum(np.expm1(np.clip(losses, -1.0, 1.0)) / self.rate, -1.0))
        high = losses + np.log1p(-rest * np.exp(-np.maximum(losses, 1.0))) - log_rate
        return np.where(losses < -1.0, low, np.where(losses > 1.0, high, near))

    def masses(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the masses of mix and of N(0) between x = low and x = high."""
        normal = normal_mass(low / self.noise, high / self.noise)
        shifted = normal_mass((low + 1) / self.noise, (high + 1) / self.noise)
        return (1 - self.rate) * normal + self.rate * shifted, normal


def pair_of(event: ReleaseEvent, relation: NeighbouringRelation) -> LossPair:
    """Return the pair of a release."""
    # Replacing one example moves the sum twice as far, which halves the noise.
    scale = 1.0 if relation is NeighbouringRelation.ADD_OR_REMOVE_ONE else 0.5
    return LossPair(event.noise_multiplier * scale, event.sampling_rate)


@dataclass(frozen=True)
class LossGrid:
    """Masses on the losses `(first + index) * interval`, and the mass of an infinite loss."""

    interval: float
    first: int
    masses: np.ndarray
    infinite: float

    def log_moment(self, order: float) -> float:
        """Return log sum masses * exp(order * loss)."""
        held = np.flatnonzero(self.masses > 0)
        exponents = order * self.interval * (self.first + held)
        largest = float(exponents.max())
        # No BLAS product here: for such short vectors its threads cost more than they save, on a
        # busy machine 10 times.
        return largest + math.log(float(np.sum(self.masses[held] * np.exp(exponents - largest))))


@dataclass(frozen=True)
class GridBound:
    """Upper bounds on eps, one per direction: removing and adding, or replacing.

    `inflation` estimates the fraction by which the grid raised the variance of the summed loss.
    """

    directions: tuple[float, ...]
    inflation: float = 0.0

    @property
    def epsilon(self) -> float:
        """Return what holds in every direction."""
        return max(self.directions)


def loss_distribution_epsilon(
    releases: Releases, delta: float, relation: NeighbouringRelation
) -> GridBound:
    """Return an upper bound on eps from composed privacy-loss distributions.

    Infinite where delta is below 5e-15 per release: rounding in the transform could hide a tenth of
    that.
    """
    counts = [count for _, count in releases]
    usable_delta = delta - FFT_ERROR * (sum(counts) + 1)
    if usable_delta < 0.9 * delta:
        return GridBound((math.inf,))
    tail = tail_per_release(delta, counts)
    pairs = [pair_of(event, relation) for event, _ in releases]
    interval, inflation = _choose_interval(pairs, counts, tail)
    build = _poisson_grids if relation is NeighbouringRelation.ADD_OR_REMOVE_ONE else _replace_grid
    # Coarsen until the window that holds nearly all of the sum fits into one transform.
    for _ in range(MOST_COARSENINGS):
        directions = list(zip(*[build(pair, interval, tail) for pair in pairs], strict=True))
        windows = [window_of(grids, counts, TAIL_SHARE * delta / 2) for grids in directions]
        excess = max(last - first for first, last in windows) / MOST_COMPOSED
        if excess <= 1:
            break
        coarser = 2.0 ** math.ceil(math.log2(excess))
        interval, inflation = interval * coarser, inflation * coarser
    else:
        return GridBound((math.inf,), inflation)
    composed = [
        compose(grids, counts, window, TAIL_SHARE * delta)
        for grids, window in zip(directions, windows, strict=True)
    ]
    return GridBound(tuple(read_epsilon(grid, usable_delta) for grid in composed), inflation)


def tail_per_release(delta: float, counts: Sequence[int]) -> float:
    """Return the mass that a release's grid may leave out."""
    # a power of two per count, so that neighbouring counts share grids
    return TAIL_SHARE * delta / 2 ** math.ceil(math.log2(sum(counts)))


def normal_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return Phi(high) - Phi(low), accurate in both tails."""
    # Phi is near 1 in the upper tail and a difference there loses all digits: mirror it
    flip = low > 0
    return ndtr(np.where(flip, -low, high)) - ndtr(np.where(flip, -high, low))


def loss_reach(pair: LossPair, tail: float) -> tuple[float, float]:
    """Return losses (lowest, highest) beyond which mix has at most `tail` mass on either side."""
    far = -pair.noise * float(ndtri(tail / 2))
    lowest, highest = pair.loss(np.array([far, -1.0 - far]))
    return float(lowest), float(highest)


def _choose_interval(
    pairs: Sequence[LossPair], counts: Sequence[int], tail: float
) -> tuple[float, float]:
    """Choose the coarsest grid (a power of two) that adds little variance; say how much.

    A loss at fraction t of a bucket of width h is split between the two ends, which adds t (1 - t)
    h^2 of variance.
    """
    reach = max(max(map(abs, loss_reach(pair, tail))) for pair in pairs)
    # the variance of the summed loss, from samples of both parts of the mixture
    z = np.linspace(-8.0, 8.0, 1001)
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    samples, variance = [], 0.0
    for pair, count in zip(pairs, counts, strict=True):
        losses = np.concatenate([pair.loss(pair.noise * z), pair.loss(pair.noise * z - 1)])
        shares = count * np.concatenate([(1 - pair.rate) * weights, pair.rate * weights])
        variance += float(shares @ (losses - shares @ losses / count) ** 2)
        samples.append((losses, shares))
    # from the coarsest grid down, while it adds too much and its transform stays affordable
    coarsest = 2.0 ** math.floor(math.log2(reach / _FEWEST_BUCKETS))
    finest = max(reach / _MOST_BUCKETS, 16 * math.sqrt(variance) / MOST_COMPOSED)
    interval = max(coarsest, 2.0 ** math.ceil(math.log2(finest)))
    while True:
        fractions = [(np.mod(losses / interval, 1.0), shares) for losses, shares in samples]
        added = interval**2 * sum(float(shares @ (t * (1 - t))) for t, shares in fractions)
        if added <= _GRID_TOLERANCE * variance or interval / 2 < finest:
            return interval, added / variance
        interval /= 2


def connect_dots(
    upper: np.ndarray, lower: np.ndarray, left_L: np.ndarray, interval: float
) -> np.ndarray:
    """Return the masses on the grid (L,) that keep the upper and lower mass of every bucket.

    Of a bucket's upper mass u and lower mass v the right end e + h gets (u - v exp(e)) / (1 -
    exp(-h)), the left end the rest. Capping exp(e) only moves mass to the right, which is the safe
    side.
    """
    right = (upper - lower * np.exp(np.minimum(left_L, 700.0))) / -math.expm1(-interval)
    right = np.clip(right, 0.0, upper)
    masses = np.zeros(len(upper) + 1)
    masses[1:] += right
    masses[:-1] += upper - right
    return masses


@lru_cache(maxsize=64)
def _poisson_grids(pair: LossPair, interval: float, tail: float) -> tuple[LossGrid, LossGrid]:
    """Return the distributions for removing and for adding one example."""
    lowest, highest = loss_reach(pair, tail)
    first, last = math.floor(lowest / interval), math.ceil(highest / interval)
    losses_L = np.arange(first, last + 1) * interval
    x_L = pair.cut(losses_L)  # descending: the loss falls in x
    mix, normal = pair.masses(x_L[1:], x_L[:-1])
    ends = np.array([-np.inf, x_L[0]]), np.array([x_L[-1], np.inf])
    (mix_above, mix_below), (normal_above, normal_below) = pair.masses(*ends)
    remove = connect_dots(mix, normal, losses_L[:-1], interval)
    add = connect_dots(normal[::-1], mix[::-1], -losses_L[:0:-1], interval)
    remove[0] += mix_below  # losses below the grid are raised to its lowest point
    add[0] += normal_above
    removing = LossGrid(interval, first, remove, float(mix_above))
    return removing, LossGrid(interval, -last, add, float(normal_below))


@lru_cache(maxsize=64)
def _replace_grid(pair: LossPair, interval: float, tail: float) -> tuple[LossGrid]:
    """Return the distribution for replacing one example, which is the same in both directions."""
    last = math.ceil(loss_reach(pair, tail)[1] / interval)
    losses_L = np.arange(last + 1) * interval
    x_L = pair.cut(losses_L)
    mix, normal = pair.masses(x_L[1:], x_L[:-1])
    mix_above, normal_above = pair.masses(np.array([-np.inf]), x_L[-1:])
    # losses above 0 from (mix, N(0)), those below from (N(0), mix): the curve's maximum over both
    masses = np.zeros(2 * last + 1)
    masses[last:] += connect_dots(mix, normal, losses_L[:-1], interval)
    masses[: last + 1] += connect_dots(normal[::-1], mix[::-1], -losses_L[:0:-1], interval)
    masses[0] += normal_above[0]
    half = 0.5 / pair.noise
    # the kink of the curve at 0
    masses[last] += (1 - pair.rate) * float(normal_mass(np.array(-half), np.array(half)))
    return (LossGrid(interval, -last, masses, float(mix_above[0])),)


def compose(
    grids: Sequence[LossGrid], counts: Sequence[int], window: tuple[int, int], tail: float
) -> LossGrid:
    """Return the distribution of the sum of `counts[k]` independent losses from each `grids[k]`.

    One Fourier transform of the length of the window that holds all but `tail` of the mass. What
    lies outside wraps around into the window; what lies above it is booked as infinite too, so the
    result dominates.
    """
    first, last = window
    wanted = max(last - first + 1, *(len(grid.masses) for grid in grids))
    length = cast(int, next_fast_len(wanted, real=True))
    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    for grid, count in zip(grids, counts, strict=True):
        spectrum *= np.fft.rfft(grid.masses, length) ** count
    # the sum starts at `start`; turn the circle so that the window's first loss comes first
    start = sum(grid.first * count for grid, count in zip(grids, counts, strict=True))
    masses = np.roll(np.fft.irfft(spectrum, length), start - first)[: last - first + 1]
    finite = sum(
        count * math.log1p(-grid.infinite) for grid, count in zip(grids, counts, strict=True)
    )
    return LossGrid(grids[0].interval, first, masses, tail - math.expm1(finite))


def window_of(grids: Sequence[LossGrid], counts: Sequence[int], tail: float) -> tuple[int, int]:
    """Return indices (first, last) beyond which the sum has at most `tail` mass on either side.

    Chernoff: P(sum > u) <= exp(K(t) - t u) for every t > 0, K being the log moment of the sum;
    likewise below.
    """
    interval, pairs = grids[0].interval, list(zip(grids, counts, strict=True))
    first = sum(count * grid.first for grid, count in pairs)
    last = sum(count * (grid.first + len(grid.masses) - 1) for grid, count in pairs)
    spread = sum(count * _variance(grid) for grid, count in pairs)
    if spread < 1e-200:
        return first, last
    start = math.sqrt(-2 * math.log(tail) / spread)  # the optimal order if the sum were Gaussian

    def reached(order: float) -> float:
        """Return beyond which loss the tail lies: above for orders > 0, below for orders < 0."""
        moment = sum(count * grid.log_moment(order) for grid, count in pairs)
        return (moment - math.log(tail)) / (abs(order) * interval)

    last = min(last, math.ceil(_least(reached, start)))
    first = max(first, math.floor(-_least(reached, -start)))
    return first, max(last, first)


def _least(bound: Callable[[float], float], start: float) -> float:
    """Return the least of `bound` around start, in steps of two; its valley may lie far below."""
    values = [bound(start * 2.0**power) for power in range(-6, 5)]
    power = -7  # rare large losses ask for small orders
    while values[0] == min(values) and power > -30:
        values.insert(0, bound(start * 2.0**power))
        power -= 1
    return min(values)


def _variance(grid: LossGrid) -> float:
    losses = grid.interval * np.arange(grid.first, grid.first + len(grid.masses))
    return float(np.sum(grid.masses * (losses - np.sum(grid.masses * losses)) ** 2))


def read_epsilon(grid: LossGrid, delta: float) -> float:
    """Return the smallest eps >= 0 at which the privacy profile is at most delta.

    The profile is infinite + sum over losses > eps of mass * (1 - exp(eps - loss)).
    """
    if grid.infinite > delta:
        return math.inf
    # all grid losses at once, from the top down: sums of masses above, and of discounted masses
    shrink = math.exp(-grid.interval)
    top_down = np.concatenate([[0.0], grid.masses[::-1]])  # one more point on top, above all losses
    above = np.cumsum(top_down) - top_down
    # sum over losses > own of mass * exp(own - loss)
    from scipy.signal import lfilter  # takes half a second to import

    discounted = lfilter([0.0, shrink], [1.0, -shrink], top_down)
    exceeding = np.flatnonzero(grid.infinite + above - discounted > delta)
    at = int(exceeding[0]) if len(exceeding) else len(grid.masses)
    loss = (grid.first + len(grid.masses) - at) * grid.interval
    if not len(exceeding):
        return max(0.0, loss)
    # The curve crosses delta between this loss and the next one above it, where it is above -
    # discounted * exp(eps - loss).
    share = (grid.infinite + above[at] - delta) / discounted[at] if discounted[at] > 0 else math.inf
    return max(0.0, loss + min(math.log(share), grid.interval))
