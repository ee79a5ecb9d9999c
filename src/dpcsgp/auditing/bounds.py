"""From an attacker's hits and false alarms to a lower bound on eps, with 95 % confidence.

The rates are bounded by Clopper-Pearson intervals (2.5 % each), so the pair (true positives >=
`hit_low`, false positives <= `alarm_high`) holds with 95 % confidence. Every (eps, delta)-private
mechanism obeys

    hit <= exp(eps) alarm + delta     and     1 - alarm <= exp(eps) (1 - hit) + delta.

* `any_mechanism`: solved for eps at the claimed delta. No assumption; with n trials it cannot pass
  log(n / 3.7).
* `same_family`: the claim names a whole curve of (eps, delta) pairs, that of a sampled Gaussian
  with the stated noise. A smaller noise whose curve the rates contradict is ruled out; the bound is
  the eps of the largest noise that is left. It exceeds the claim exactly if the rates contradict
  the claimed curve at some delta.

Legend: C candidate thresholds. Reference: Clopper and Pearson (1934); Nasr et al., "Tight auditing
of differentially private machine learning" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta

from dpcsgp.privacy import ReleaseEvent, composed_epsilon

CONFIDENCE: Final = 0.95
# where the claimed curve is looked at, beside the claimed delta: attacks are often strong at large
# deltas only
_DELTAS: Final = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3)
_PRECISION: Final = 1.005  # of the noise multiplier that is searched for
_LEAST_NOISE: Final = 0.02


@final
@dataclass(frozen=True)
class Rates:
    """What an attack achieved, at its worst within the confidence interval."""

    hit_low: float
    alarm_high: float

    @classmethod
    def of(
        cls, hits: int, positives: int, alarms: int, negatives: int, confidence: float = CONFIDENCE
    ) -> Rates:
        """Return the bounds for these counts; each side may fail with half of `1 - confidence`."""
        hit_low, _ = clopper_pearson(np.array(hits), positives, confidence)
        _, alarm_high = clopper_pearson(np.array(alarms), negatives, confidence)
        return cls(float(hit_low), float(alarm_high))

    def epsilon(self, delta: float) -> float:
        """Return the eps that these rates need at this delta, at least 0, by either inequality."""
        pairs = ((self.hit_low, self.alarm_high), (1 - self.alarm_high, 1 - self.hit_low))
        return max(
            [0.0, *(math.log((up - delta) / down) for up, down in pairs if up > delta and down > 0)]
        )


def clopper_pearson(
    successes: np.ndarray, trials: int, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds on a probability; both hold together with this confidence."""
    tail = (1 - confidence) / 2
    # quantiles of the beta law; 1e-9 only keeps it defined where the bound is trivial
    low = np.where(
        successes > 0, beta.ppf(tail, np.maximum(successes, 1e-9), trials - successes + 1), 0.0
    )
    high_b = np.maximum(trials - successes, 1e-9)
    high = np.where(successes < trials, beta.ppf(1 - tail, successes + 1, high_b), 1.0)
    return low, high


def best_threshold(
    inside: np.ndarray, outside: np.ndarray, claims: Mapping[float, float]
) -> tuple[float, tuple[float, float]]:
    """Return the threshold that contradicts the claimed curve (delta -> eps) most, and by how much.

    Compared are, in this order: the eps that the rates need beyond the claim at some delta (0 if
    none), and the distance ndtri(hit_low) - ndtri(alarm_high) in standard deviations.
    """
    # candidate thresholds lie halfway between neighbouring scores
    cuts_C = np.unique(np.concatenate([inside, outside]))
    cuts_C = (cuts_C[1:] + cuts_C[:-1]) / 2 if len(cuts_C) > 1 else cuts_C
    # rates above each threshold, at their worst within the confidence interval
    hits_C = len(inside) - np.searchsorted(np.sort(inside), cuts_C, side="right")
    alarms_C = len(outside) - np.searchsorted(np.sort(outside), cuts_C, side="right")
    hit_C, _ = clopper_pearson(hits_C, len(inside))
    _, alarm_C = clopper_pearson(alarms_C, len(outside))
    # eps needed beyond the claim, by both inequalities at every delta; a threshold below or above
    # everything separates nothing and divides by zero
    excess_C = np.zeros(len(cuts_C))
    with np.errstate(invalid="ignore", divide="ignore"):
        for up_C, down_C in ((hit_C, alarm_C), (1 - alarm_C, 1 - hit_C)):
            for delta, claimed in claims.items():
                needed_C = np.log(np.maximum(up_C - delta, 0.0) / down_C)
                excess_C = np.fmax(excess_C, needed_C - claimed)
        distance_C = np.nan_to_num(ndtri(hit_C) - ndtri(alarm_C), nan=-np.inf)
    best = int(np.lexsort((distance_C, excess_C))[-1])
    return float(cuts_C[best]), (float(excess_C[best]), float(distance_C[best]))


def claimed_curve(event: ReleaseEvent, steps: int, delta: float) -> dict[float, float]:
    """Return the eps that the claim allows at each delta that is looked at."""
    return {value: composed_epsilon([(event, steps)], value) for value in (*_DELTAS, delta)}


def any_mechanism(rates: Rates, delta: float) -> float:
    """Return the lower bound on eps that needs no assumption about the mechanism."""
    return rates.epsilon(delta)


def same_family(rates: Rates, event: ReleaseEvent, steps: int, delta: float) -> float:
    """Return the eps of the largest noise that these rates do not rule out, by bisection."""
    deltas = (*_DELTAS, delta)

    def ruled_out(noise: float) -> bool:
        return contradicts(rates, replace(event.stated, noise_multiplier=noise), steps, deltas)

    # Bracket: less noise allows more, so it is harder to rule out. `high` is ruled out, `low` not.
    low = high = event.noise_multiplier
    while ruled_out(low) and low > _LEAST_NOISE:
        low /= 2
    if low == high:
        while not ruled_out(high):
            low, high = high, 2 * high
            if high > 1e4 * event.noise_multiplier:
                return 0.0
    # Bisect in logarithms.
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ruled_out(middle) else (middle, high)
    # `high` is ruled out: whatever noise there is, it is below, and costs more than this.
    return composed_epsilon([(replace(event.stated, noise_multiplier=high), steps)], delta)


def contradicts(rates: Rates, event: ReleaseEvent, steps: int, deltas: Sequence[float]) -> bool:
    """Say whether these rates exceed what so many releases allow, at any of these deltas."""
    return any(
        (needed := rates.epsilon(delta)) > 0 and needed > composed_epsilon([(event, steps)], delta)
        for delta in deltas
    )
