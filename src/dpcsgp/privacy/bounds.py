"""Rigorous upper bounds on the eps of composed releases: privacy-loss distributions and, where these fail, Renyi.

The privacy loss of one release is a random variable; eps follows from the distribution of the sum of all losses. Here
a release becomes a distribution on a grid that provably dominates it (connect-the-dots: the mass of a bucket moves to
the bucket's two ends so that both the upper and the lower distribution keep their mass there). Composition and the
read-out of eps are dp-accounting's. The discretisation is ours for three reasons: it is vectorised and picks its own
grid (the library's fixed grid takes minutes for small noise), it works with bucket masses rather than differences of
near-equal deltas (no spurious mass on fine grids), and it also covers sampling without replacement.

With `s` the noise multiplier, `q` the sampling rate, `N(m) = Normal(m, s^2)` and `mix = (1 - q) N(0) + q N(-1)`:

* poisson, remove: (mix, N(0)); poisson, add: (N(0), mix) mirrored. eps is the larger of the two.
* replace one: the divergence curve max over both directions, i.e. (mix, N(0)) for losses above 0 and (N(0), mix) below,
  with `s` halved. It holds for uniform sampling and, with the same rate, for Poisson sampling: both make the output
  `(1 - q) a + q b` against `(1 - q) a + q b'` where `a`, `b`, `b'` are pairwise at most `2 clip_norm` apart, and advanced
  joint convexity then gives `H_(1 + q (t - 1)) <= q H_t(Gaussian, shift 2)` for t >= 1.

References: Doroshenko et al., "Connect the Dots" (2022); Zhu, Dong, Wang, "Optimal Accounting of Differential Privacy
via Characteristic Function" (2022); Balle, Barthe, Gaboardi, "Privacy Amplification by Subsampling" (2018); Wang, Balle,
Kasiviswanathan, "Subsampled Renyi Differential Privacy" (2019).

Legend: L grid losses, ascending multiples of the grid interval; buckets lie between neighbouring losses (L - 1 of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.signal import lfilter
from scipy.special import ndtr, ndtri

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.events import ADD_OR_REMOVE_ONE, ReleaseEvent

Releases = Sequence[tuple[ReleaseEvent, int]]

_GRID_TOLERANCE: Final = 1e-3  # variance that the grid may add, as a fraction; measured to move eps by about half of it
_FEWEST_BUCKETS: Final = 2**10
_MOST_BUCKETS: Final = 2**15
_MOST_COMPOSED: Final = 2**19
_TAIL_SHARE: Final = 1e-4  # share of delta that truncated tails may use up; they are booked as infinite losses
_FFT_ERROR: Final = (
    1e-16  # mass per release that rounding in the Fourier transforms may misplace (measured: under 1e-17)
)
_ORDERS: Final = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class LossPair:
    """The pair (mix, N(0)) behind a release: the noise multiplier that counts and the sampling rate."""

    noise: float
    rate: float

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return log(mix(x) / N(0)(x)), which falls in x from infinity to log(1 - rate)."""
        with np.errstate(divide="ignore", over="ignore"):
            return np.logaddexp(np.log1p(-self.rate), math.log(self.rate) - (0.5 + x) / self.noise**2)

    def cut(self, losses: np.ndarray) -> np.ndarray:
        """Return the x at which the loss equals `losses`; infinity where no x has so small a loss."""
        small = np.minimum(losses, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            near = np.log1p(np.maximum(np.expm1(small) / self.rate, -1.0))  # exact around 0
            far = losses + np.log1p((self.rate - 1) * np.exp(-np.maximum(losses, 1.0))) - math.log(self.rate)
        return -0.5 - self.noise**2 * np.where(losses > 1.0, far, near)

    def masses(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the masses of mix and of N(0) between x = low and x = high."""
        normal = _normal_mass(low / self.noise, high / self.noise)
        shifted = _normal_mass((low + 1) / self.noise, (high + 1) / self.noise)
        return (1 - self.rate) * normal + self.rate * shifted, normal


def pair_of(event: ReleaseEvent, relation: str) -> LossPair:
    """Return the pair of a release; replacing one example moves the sum twice as far, which halves the noise."""
    scale = 1.0 if relation == ADD_OR_REMOVE_ONE else 0.5
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
        return largest + math.log(float(self.masses[held] @ np.exp(exponents - largest)))


def loss_distribution_epsilon(releases: Releases, delta: float, relation: str) -> tuple[float, bool]:
    """Return an upper bound on eps from composed privacy-loss distributions, and whether it is tight.

    Not tight (infinite, or on a grid that is too coarse) means that `renyi_epsilon` may be smaller.
    """
    counts = [count for _, count in releases]
    usable_delta = delta - _FFT_ERROR * sum(counts)
    if usable_delta < 0.99 * delta:
        return math.inf, False
    # A power of two per release, so that neighbouring counts share their grids.
    tail = _TAIL_SHARE * delta / 2 ** math.ceil(math.log2(sum(counts)))
    pairs = [pair_of(event, relation) for event, _ in releases]
    interval, tight = _choose_interval(pairs, counts, tail)
    build = _poisson_grids if relation == ADD_OR_REMOVE_ONE else _replace_grid
    directions = zip(*[build(pair, interval, tail) for pair in pairs], strict=True)
    composed = [_compose(grids, counts, _TAIL_SHARE * delta) for grids in directions]
    return max(_read_epsilon(grid, usable_delta) for grid in composed), tight


def renyi_epsilon(releases: Releases, delta: float, relation: str) -> float:
    """Return an upper bound on eps from Renyi divergences: looser, but exact arithmetic for any delta."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    if len({event.sampling for event, _ in releases}) > 1:
        raise ConfigError(
            f"privacy.delta = {delta}: too small for composing Poisson with uniform releases; use a delta of at least "
            f"{100 * _FFT_ERROR * sum(count for _, count in releases):.0e} or account for them separately"
        )
    divergences = sum(count * np.asarray(_renyi_divergences(event)) for event, count in releases)
    return float(rdp.compute_epsilon(_ORDERS, np.asarray(divergences).tolist(), delta)[0])


@lru_cache(maxsize=256)
def _renyi_divergences(event: ReleaseEvent) -> tuple[float, ...]:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if event.sampling == "poisson":
        noisy = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        accountant = RdpAccountant(_ORDERS)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(event.sampling_rate, noisy))
        return tuple(accountant.rdp.tolist())
    orders = [order for order in _ORDERS if order <= 64]  # the cost grows with the square of the order
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    noisy = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
    # Only the ratio of the two sizes enters, so a data set of size one stands for all.
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, event.sampling_rate, noisy))  # pyright: ignore
    return (*accountant.rdp.tolist(), *[math.inf] * (len(_ORDERS) - len(orders)))


def _normal_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return Phi(high) - Phi(low), accurate in both tails because the upper one is mirrored into the lower."""
    flip = low > 0
    return ndtr(np.where(flip, -low, high)) - ndtr(np.where(flip, -high, low))


def _reach(pair: LossPair, tail: float) -> tuple[float, float]:
    """Return losses (lowest, highest) beyond which mix has at most `tail` mass on either side."""
    far = -pair.noise * float(ndtri(tail / 2))
    lowest, highest = pair.loss(np.array([far, -1.0 - far]))
    return float(lowest), float(highest)


def _choose_interval(pairs: Sequence[LossPair], counts: Sequence[int], tail: float) -> tuple[float, bool]:
    """Choose the coarsest grid (a power of two) that inflates the variance of the summed loss by little.

    A loss at fraction t of a bucket of width h is split between the two ends, which adds t (1 - t) h^2 of variance.
    """
    reach = max(max(map(abs, _reach(pair, tail))) for pair in pairs)
    z = np.linspace(-8.0, 8.0, 1001)
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    samples, variance = [], 0.0
    for pair, count in zip(pairs, counts, strict=True):
        losses = np.concatenate([pair.loss(pair.noise * z), pair.loss(pair.noise * z - 1)])
        shares = count * np.concatenate([(1 - pair.rate) * weights, pair.rate * weights])
        variance += float(shares @ (losses - shares @ losses / count) ** 2)
        samples.append((losses, shares))
    coarsest = 2.0 ** math.floor(math.log2(reach / _FEWEST_BUCKETS))
    finest = max(reach / _MOST_BUCKETS, 16 * math.sqrt(variance) / _MOST_COMPOSED)
    interval = max(coarsest, 2.0 ** math.ceil(math.log2(finest)))
    while True:
        fractions = [(np.mod(losses / interval, 1.0), shares) for losses, shares in samples]
        added = interval**2 * sum(float(shares @ (t * (1 - t))) for t, shares in fractions)
        if added <= _GRID_TOLERANCE * variance:
            return interval, True
        if interval / 2 < finest:
            return interval, False
        interval /= 2


def _connect_dots(upper: np.ndarray, lower: np.ndarray, left_L: np.ndarray, interval: float) -> np.ndarray:
    """Return the masses on the grid (L,) that keep the upper and lower mass of every bucket.

    Of a bucket's upper mass u and lower mass v the right end e + h gets (u - v exp(e)) / (1 - exp(-h)), the left end the
    rest. Capping exp(e) only moves mass to the right, which is the safe side.
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
    lowest, highest = _reach(pair, tail)
    first, last = math.floor(lowest / interval), math.ceil(highest / interval)
    losses_L = np.arange(first, last + 1) * interval
    x_L = pair.cut(losses_L)
    mix, normal = pair.masses(x_L[1:], x_L[:-1])
    ends = np.array([-np.inf, x_L[0]]), np.array([x_L[-1], np.inf])
    (mix_above, mix_below), (normal_above, normal_below) = pair.masses(*ends)
    remove = _connect_dots(mix, normal, losses_L[:-1], interval)
    add = _connect_dots(normal[::-1], mix[::-1], -losses_L[:0:-1], interval)
    remove[0] += mix_below  # losses below the grid are raised to its lowest point
    add[0] += normal_above
    return LossGrid(interval, first, remove, float(mix_above)), LossGrid(interval, -last, add, float(normal_below))


@lru_cache(maxsize=64)
def _replace_grid(pair: LossPair, interval: float, tail: float) -> tuple[LossGrid]:
    """Return the distribution for replacing one example, which is the same in both directions."""
    last = math.ceil(_reach(pair, tail)[1] / interval)
    losses_L = np.arange(last + 1) * interval
    x_L = pair.cut(losses_L)
    mix, normal = pair.masses(x_L[1:], x_L[:-1])
    mix_above, normal_above = pair.masses(np.array([-np.inf]), x_L[-1:])
    masses = np.zeros(2 * last + 1)
    masses[last:] += _connect_dots(mix, normal, losses_L[:-1], interval)
    masses[: last + 1] += _connect_dots(normal[::-1], mix[::-1], -losses_L[:0:-1], interval)
    masses[0] += normal_above[0]
    half = 0.5 / pair.noise
    masses[last] += (1 - pair.rate) * float(_normal_mass(np.array(-half), np.array(half)))  # the kink of the curve at 0
    return (LossGrid(interval, -last, masses, float(mix_above[0])),)


def _compose(grids: Sequence[LossGrid], counts: Sequence[int], tail: float) -> LossGrid:
    """Return the distribution of the sum of all losses, `counts[k]` independent ones from `grids[k]`.

    One Fourier transform of the length of the window that holds all but `tail` of the mass. What lies outside wraps
    around into the window; what lies above it is booked as infinite too, so the result dominates.
    """
    first, last = _window(grids, counts, tail / 2)
    length = next_fast_len(max(last - first + 1, *(len(grid.masses) for grid in grids)), real=True)
    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    for grid, count in zip(grids, counts, strict=True):
        spectrum *= rfft(grid.masses, length) ** count
    start = sum(grid.first * count for grid, count in zip(grids, counts, strict=True))
    masses = np.roll(irfft(spectrum, length), start - first)[: last - first + 1]
    finite = sum(count * math.log1p(-grid.infinite) for grid, count in zip(grids, counts, strict=True))
    return LossGrid(grids[0].interval, first, masses, tail - math.expm1(finite))


def _window(grids: Sequence[LossGrid], counts: Sequence[int], tail: float) -> tuple[int, int]:
    """Return indices (first, last) beyond which the sum of losses has at most `tail` mass on either side.

    Chernoff: P(sum > u) <= exp(K(t) - t u) for every t > 0, K being the log moment of the sum; likewise below.
    """
    interval, pairs = grids[0].interval, list(zip(grids, counts, strict=True))
    first = sum(count * grid.first for grid, count in pairs)
    last = sum(count * (grid.first + len(grid.masses) - 1) for grid, count in pairs)
    spread = sum(count * _variance(grid) for grid, count in pairs)
    if spread == 0:
        return first, last
    best = math.sqrt(-2 * math.log(tail) / spread)  # the optimal order if the sum were Gaussian
    for order in best * 2.0 ** np.arange(-6, 5):
        above = sum(count * grid.log_moment(order) for grid, count in pairs)
        below = sum(count * grid.log_moment(-order) for grid, count in pairs)
        last = min(last, math.ceil((above - math.log(tail)) / (order * interval)))
        first = max(first, math.floor(-(below - math.log(tail)) / (order * interval)))
    return first, max(last, first)


def _variance(grid: LossGrid) -> float:
    losses = grid.interval * np.arange(grid.first, grid.first + len(grid.masses))
    return float(grid.masses @ (losses - grid.masses @ losses) ** 2)


def _read_epsilon(grid: LossGrid, delta: float) -> float:
    """Return the smallest eps >= 0 with `infinite + sum over losses > eps of mass * (1 - exp(eps - loss)) <= delta`."""
    if grid.infinite > delta:
        return math.inf
    shrink = math.exp(-grid.interval)
    top_down = np.concatenate([[0.0], grid.masses[::-1]])  # one more point on top, above all losses
    above = np.cumsum(top_down) - top_down
    discounted = lfilter([0.0, shrink], [1.0, -shrink], top_down)  # sum over losses > own of mass * exp(own - loss)
    exceeding = np.flatnonzero(grid.infinite + above - discounted > delta)
    top = (grid.first + len(grid.masses)) * grid.interval
    # The curve crosses delta between the first exceeding point and the one above it.
    at = int(exceeding[0]) if len(exceeding) else len(top_down) - 1
    lower = top - at * grid.interval
    if grid.infinite + above[at] - delta <= 0 or discounted[at] <= 0:
        return max(0.0, lower)
    return max(0.0, lower + math.log((grid.infinite + above[at] - delta) / discounted[at]))
