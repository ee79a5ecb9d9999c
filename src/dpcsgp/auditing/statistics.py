"""Tests with a stated false-alarm level, each with the smallest fault that it would have caught.

Every function returns a `Finding`: a p-value that is exact or too large, never too small, and the
size of fault that the same test, with the same sample, flags with probability `POWER`. Nothing is
approximated by a law that fails far out in the tails, because the levels are about one in a
million:

* counts: binomial tails, and the beta law for the fault;
* sums of squares: the chi-square law; correlations of Gaussian values: the t law of `r`;
* whole distributions: 2 exp(-2 n d^2) (Dvoretzky, Kiefer, Wolfowitz; constant by Massart, 1990),
  which holds for every n and for every law, discrete ones included.

Legend: R rows that are compared in pairs, M values of a row, P pairs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from scipy import optimize
from scipy.stats import beta, binom, chi2, ncx2, norm, t

POWER: Final = 0.99


class Finding(NamedTuple):
    """What one test saw: the deviation, its p-value, and the smallest one it would have caught."""

    seen: float
    p_value: float
    smallest: float


def proportion(
    successes: int, trials: int, rate: float, level: float, cases: int = 1, fewer: bool = False
) -> Finding:
    """Compare a count with Binomial(trials, rate) on both sides; deviations are shares of the rate.

    `cases` is of how many like counts this one is the most extreme. The smallest fault is a rate
    that is too large, or too small if `fewer` (or if nothing is larger); infinite if not even
    "never" shows.
    """
    below, above = binom.cdf(successes, trials, rate), binom.sf(successes - 1, trials, rate)
    p_value = min(1.0, 2 * cases * float(min(below, above)))
    tail = level / (2 * cases)
    low, high = int(binom.ppf(tail, trials, rate)), int(binom.isf(tail, trials, rate))
    # Flagged are counts below `low` and above `high`: which rate gives them with chance POWER?
    if fewer or high == trials:
        smallest = 1 - float(beta.ppf(1 - POWER, low, trials - low + 1)) / rate if low else math.inf
    else:
        smallest = float(beta.ppf(POWER, high + 1, trials - high)) / rate - 1
    return Finding(successes / trials / rate - 1, p_value, smallest)


def worst_proportion(counts: np.ndarray, trials: int, rate: float, level: float) -> Finding:
    """Compare the most extreme of several like counts with Binomial(trials, rate)."""
    tails = np.minimum(binom.cdf(counts, trials, rate), binom.sf(counts - 1, trials, rate))
    return proportion(int(counts[tails.argmin()]), trials, rate, level, len(counts))


def too_small(values: np.ndarray, level: float) -> Finding:
    """Say whether Normal(0, 1) values have a smaller spread than 1; deviations are shares of it."""
    size, total = values.size, float(np.square(values).sum())
    smallest = 1 - math.sqrt(chi2.ppf(level, size) / chi2.ppf(POWER, size))
    return Finding(1 - math.sqrt(total / size), float(chi2.cdf(total, size)), smallest)


def too_large(values: np.ndarray, level: float, allowed: float) -> Finding:
    """Say whether Normal(0, s) values have a spread s above 1 + allowed; deviations are from 1."""
    size, total = values.size, float(np.square(values).sum())
    p_value = float(chi2.sf(total / (1 + allowed) ** 2, size))
    ratio = math.sqrt(chi2.isf(level, size) / chi2.ppf(1 - POWER, size))
    return Finding(math.sqrt(total / size) - 1, p_value, (1 + allowed) * ratio - 1)


def shifted(values_MR: np.ndarray, level: float) -> Finding:
    """Say whether the R columns of Normal(0, 1) values have means other than 0."""
    size, columns = values_MR.shape
    means_R = values_MR.mean(0)
    critical = chi2.isf(level, columns)

    def missing(noncentrality: float) -> float:
        return float(ncx2.sf(critical, columns, noncentrality)) - POWER

    smallest = math.sqrt(
        float(optimize.root_scalar(missing, bracket=(1e-9, 10 * critical + 1e3)).root) / size
    )
    p_value = float(chi2.sf(size * np.square(means_R).sum(), columns))
    return Finding(float(np.abs(means_R).max()), p_value, smallest)


def correlated(first: np.ndarray, second: np.ndarray, level: float, pairs: int = 1) -> Finding:
    """Say whether Gaussian values of mean 0 follow others; `pairs` as `cases` above."""
    x, y = first.ravel(), second.ravel()
    length = math.sqrt(float(x @ x) * float(y @ y))
    return from_correlation(float(x @ y) / length if length else 0.0, x.size, level, pairs)


def any_pair_correlated(values_RM: np.ndarray, level: float) -> Finding:
    """Look at every pair of rows of Gaussian values of mean 0; report the most correlated."""
    lengths_R = np.maximum(np.linalg.norm(values_RM, axis=1), 1e-300)
    alike_RR = (values_RM @ values_RM.T) / np.outer(lengths_R, lengths_R)
    alike_P = alike_RR[np.triu_indices(len(values_RM), 1)]
    strongest = float(alike_P[np.abs(alike_P).argmax()])
    return from_correlation(strongest, values_RM.shape[1], level, len(alike_P))


def from_correlation(seen: float, size: int, level: float, pairs: int = 1) -> Finding:
    """Return the finding of a correlation about known means: t with size - 1 degrees."""
    freedom = size - 1
    strength = abs(seen) * math.sqrt(freedom / max(1 - seen**2, 1e-15))
    p_value = min(1.0, 2 * pairs * float(t.sf(strength, freedom)))
    critical = float(t.isf(level / (2 * pairs), freedom))
    least = critical / math.sqrt(freedom + critical**2)
    # Fisher: atanh(r) has standard deviation 1 / sqrt(size - 3) about atanh of the truth.
    smallest = math.tanh(math.atanh(least) + float(norm.ppf(POWER)) / math.sqrt(size - 3))
    return Finding(seen, p_value, smallest)


def other_law(values: np.ndarray, law: Callable[[np.ndarray], np.ndarray], level: float) -> Finding:
    """Compare values with a continuous distribution function: the largest distance between both."""
    sorted_values = np.sort(values, axis=None)
    steps = np.arange(len(sorted_values) + 1) / len(sorted_values)
    expected = law(sorted_values)
    return from_distance(
        float(max(np.abs(steps[1:] - expected).max(), np.abs(steps[:-1] - expected).max())),
        len(sorted_values),
        level,
    )


def other_counts(
    values: np.ndarray, law: Callable[[np.ndarray], np.ndarray], level: float
) -> Finding:
    """Compare whole numbers from 0 on with a distribution function."""
    shares = np.cumsum(np.bincount(values.ravel())) / values.size
    return from_distance(
        float(np.abs(shares - law(np.arange(len(shares)))).max()), values.size, level
    )


def from_distance(distance: float, size: int, level: float) -> Finding:
    """Return the finding of a distance between an empirical and a stated distribution function."""
    p_value = min(1.0, 2 * math.exp(-2 * size * distance**2))
    # The distance seen is within the second term of the true one with probability POWER at least.
    reach = math.sqrt(math.log(2 / level) / 2) + math.sqrt(math.log(2 / (1 - POWER)) / 2)
    return Finding(distance, p_value, reach / math.sqrt(size))


def exactly(deviation: float, allowed: float) -> Finding:
    """Return the finding of a comparison without chance: what is not allowed is a fault."""
    return Finding(deviation, float(deviation <= allowed), allowed)
