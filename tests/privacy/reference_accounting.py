"""A second accountant that brackets the exact eps, and closed forms; no code of the package.

Two stages, each with its error booked. First the noisy output is cut into cells. *Optimistic*:
publish only the cell, which is post-processing. *Pessimistic*: move the mass of a cell to its two
ends so that both distributions keep theirs (connect-the-dots, here on losses that are not equally
spaced). Then the losses are rounded to the nearest point of a fine lattice, all are shifted by the
mean rounding error, and the sum of what remains is bounded by Chernoff: with probability 1 - beta
the true sum lies within `slack` of the lattice sum (Gopi, Lee, Wutschitz, "Numerical Composition of
Differential Privacy", 2021). Rounding errors add up like sqrt(count) and not like count, so rates
of 1e-6 and 10^6 releases are in reach. Any number of cells and lattice points gives valid bounds;
more of them bring the two together.

Legend: A atoms of a discrete loss, C cells of the output, in units of the noise; the drawn example
moves it by `shift`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import mpmath
import numpy as np
from scipy.special import ndtr, ndtri

Direction = Literal["remove", "add", "replace"]

_BETA_SHARE: Final = 1e-5  # share of delta that each of the unlikely events below may cost
_FFT_ERROR: Final = 1e-15  # mass that the transform may misplace, per release


@dataclass(frozen=True)
class Losses:
    """A discrete loss: atoms and their masses.

    What is missing to one is an infinite loss (or none, if optimistic).
    """

    losses_A: np.ndarray
    masses_A: np.ndarray

    def log_moment(self, values_A: np.ndarray, order: float) -> float:
        """Return log E exp(order * value), given that the loss is finite."""
        exponents_A = order * values_A
        largest = float(exponents_A.max())
        mean = float(np.sum(self.masses_A * np.exp(exponents_A - largest)) / self.masses_A.sum())
        return largest + math.log(mean)

    def most(self, values_A: np.ndarray, count: int, beta: float) -> float:
        """Return u with P(sum of `count` values > u) <= beta, by the best Chernoff bound."""
        share_A = self.masses_A / self.masses_A.sum()
        variance = float(np.sum(share_A * (values_A - np.sum(share_A * values_A)) ** 2))
        if variance == 0:
            return count * float(values_A.max())
        best = math.sqrt(-2 * math.log(beta) / (count * variance))
        orders = best * 2.0 ** np.arange(-8.0, 4.5, 0.5)
        bounds = [
            (count * self.log_moment(values_A, order) - math.log(beta)) / order for order in orders
        ]
        return min(count * float(values_A.max()), *bounds)


def bracket(
    noise: float,
    rate: float,
    count: int,
    delta: float,
    direction: Direction,
    cells: int = 2**15,
    points: int = 2**20,
) -> tuple[float, float]:
    """Return (optimistic, pessimistic) eps of `count` releases.

    For "replace" of the curve with sensitivity 1.
    """
    tail = _BETA_SHARE * delta / count
    return (
        _composed(_cells(noise, rate, cells, tail, direction), count, delta, points, -1),
        _composed(_ends(noise, rate, cells, tail, direction), count, delta, points, +1),
    )


def exact_delta(noise: float, rate: float, eps: float, direction: Direction) -> Any:
    """Return the delta of one release at this eps, with 40 digits.

    `count` releases at rate 1 have noise / sqrt(count).
    """
    with mpmath.workdps(40):
        shift, rate, odds = 1 / mpmath.mpf(noise), mpmath.mpf(rate), mpmath.exp(mpmath.mpf(eps))
        if direction == "replace":
            return max(
                exact_delta(noise, rate, eps, "remove"), exact_delta(noise, rate, eps, "add")
            )
        ratio = ((odds if direction == "remove" else 1 / odds) - 1 + rate) / rate
        if ratio <= 0:
            return mpmath.mpf(0)  # adding loses at most -log(1 - rate)
        cut = (mpmath.log(ratio) + shift**2 / 2) / shift
        if direction == "remove":  # outputs above the cut
            without, moved = mpmath.ncdf(-cut), mpmath.ncdf(shift - cut)
            return (1 - rate) * without + rate * moved - odds * without
        without, moved = mpmath.ncdf(cut), mpmath.ncdf(cut - shift)
        return without - odds * ((1 - rate) * without + rate * moved)


def _edges(shift: float, cells: int, tail: float, direction: Direction) -> np.ndarray:
    """Return cell borders with at most `tail` mass beyond.

    For "replace" from shift / 2 on, where the loss is 0.
    """
    far = -float(ndtri(tail))
    return np.linspace(shift / 2 if direction == "replace" else -far, shift + far, cells + 1)


def _mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    flip = low > 0
    return ndtr(np.where(flip, -low, high)) - ndtr(np.where(flip, -high, low))


def _loss(excess: np.ndarray, rate: float) -> np.ndarray:
    """Return log(mass with the example / mass without it) where that ratio is 1 + rate * excess."""
    with np.errstate(
        divide="ignore"
    ):  # at rate 1 the ratio may round to 0; such atoms have no mass
        return np.log1p(rate * excess)


def _atoms(base_A: np.ndarray, excess_A: np.ndarray, rate: float, direction: Direction) -> Losses:
    """Return the loss of atoms with mass `base`, and `base (1 + rate excess)` with the example."""
    losses_A, with_A = _loss(excess_A, rate), base_A * (1 + rate * excess_A)
    if direction == "remove":
        return Losses(losses_A, with_A)
    if direction == "add":
        return Losses(-losses_A, base_A)
    # The larger of both curves: removing above 0, adding below; no other atoms are handed in.
    return Losses(np.concatenate([losses_A, -losses_A]), np.concatenate([with_A, base_A]))


def _with(found: Losses, extra: list[tuple[float, float]], tail: float) -> Losses:
    """Append atoms (loss, mass), and leave out what has next to no mass."""
    losses_A = np.append(found.losses_A, [loss for loss, _ in extra])
    masses_A = np.append(found.masses_A, [mass for _, mass in extra])
    kept = (masses_A > tail / len(masses_A)) & np.isfinite(losses_A)
    return Losses(losses_A[kept], masses_A[kept])


def _kink(noise: float, rate: float) -> tuple[float, float]:
    """Return the atom at loss 0 of the replacement curve."""
    return 0.0, (1 - rate) * (1 - 2 * float(ndtr(-0.5 / noise)))


def _cells(noise: float, rate: float, cells: int, tail: float, direction: Direction) -> Losses:
    """Return the loss of publishing the cell alone.

    Mass that is left out only lowers the answer.
    """
    shift = 1 / noise
    edges = np.append(_edges(shift, cells, tail, direction), np.inf)
    if direction != "replace":
        edges = np.append(-np.inf, edges)
    base_C, moved_C = _mass(edges[:-1], edges[1:]), _mass(edges[:-1] - shift, edges[1:] - shift)
    usable = base_C > 1e-290
    found = _atoms(base_C[usable], moved_C[usable] / base_C[usable] - 1, rate, direction)
    return _with(found, [_kink(noise, rate)] if direction == "replace" else [], tail)


def _ends(noise: float, rate: float, cells: int, tail: float, direction: Direction) -> Losses:
    """Return the loss with the mass of every cell moved to its ends.

    What is left out counts as infinite.
    """
    shift = 1 / noise
    edges = _edges(shift, cells, tail, direction)
    excess = np.expm1(shift * edges - shift**2 / 2)
    base_C, moved_C = _mass(edges[:-1], edges[1:]), _mass(edges[:-1] - shift, edges[1:] - shift)
    with np.errstate(
        invalid="ignore", divide="ignore"
    ):  # ends so low that their excess rounds to -1
        share = (moved_C - base_C * (1 + excess[:-1])) / np.diff(excess)
    right_C = np.clip(np.nan_to_num(share, nan=np.inf, posinf=np.inf), 0.0, base_C)
    base = np.zeros(len(edges))
    base[1:] += right_C
    base[:-1] += base_C - right_C
    # Beyond the ends: losses below the lowest are raised to it; adding loses at most -log(1 -
    # rate).
    lowest, highest = _loss(excess[[0, -1]], rate)
    beyond, above = float(ndtr(edges[0])), float(ndtr(-edges[-1]))
    extra = {
        "remove": [(lowest, beyond)],
        "add": [(-math.log1p(-rate) if rate < 1 else math.inf, beyond), (-highest, above)],
        "replace": [_kink(noise, rate), (-highest, above)],
    }
    return _with(_atoms(base, excess, rate, direction), extra[direction], tail)


def _composed(found: Losses, count: int, delta: float, points: int, side: int) -> float:
    """Return eps of `count` independent losses: an upper (side +1) or lower bound (-1)."""
    beta = _BETA_SHARE * delta
    losses_A = found.losses_A
    width = found.most(losses_A, count, beta) + found.most(-losses_A, count, beta)
    interval = max(width, 1e-9) / points
    first, lattice_A = 0, losses_A
    for _ in range(50):  # until the lattice holds the sum
        interval *= 1.05
        lattice_A = np.rint(losses_A / interval)
        first = math.floor(-found.most(-lattice_A, count, beta))
        if found.most(lattice_A, count, beta) - first < points:
            break
    else:
        raise AssertionError("no lattice of this length holds the sum of the losses")
    rounding_A = losses_A - interval * lattice_A
    mean = float(np.sum(found.masses_A * rounding_A) / found.masses_A.sum())
    slack = found.most(side * (rounding_A - mean), count, beta)
    masses = _sum_of(lattice_A.astype(np.int64), found.masses_A, count, points, first)
    sums = interval * (first + np.arange(points)) + count * mean + side * slack
    # Outside the lattice on either side, or off by more than the slack: beta each. An atom left
    # out: infinite, or none.
    finite = count * math.log(min(1.0, float(found.masses_A.sum())))
    doubt = 3 * beta + _FFT_ERROR * (count + 1)
    return _read(
        sums, masses, delta - doubt + math.expm1(finite) if side > 0 else delta + doubt, side
    )


def _sum_of(
    lattice_A: np.ndarray, masses_A: np.ndarray, count: int, points: int, first: int
) -> np.ndarray:
    """Return the masses of the sum at first, first + 1, ..., modulo the number of points."""
    lowest = int(lattice_A.min())
    single = np.bincount((lattice_A - lowest) % points, weights=masses_A, minlength=points)
    summed = np.fft.irfft(np.fft.rfft(single) ** count, points)
    return np.roll(summed, (count * lowest - first) % points)


def _read(sums: np.ndarray, masses: np.ndarray, delta: float, side: int) -> float:
    """Return the eps >= 0 at which the privacy profile of these masses falls to delta."""
    if delta <= 0:
        return math.inf

    def excess(eps: float) -> float:
        at = int(np.searchsorted(sums, eps, side="right"))
        return float(np.sum(masses[at:] * -np.expm1(eps - sums[at:]))) - delta

    low, high = 0.0, max(0.0, float(sums[-1]))
    if excess(low) <= 0:
        return 0.0
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high if side > 0 else low
