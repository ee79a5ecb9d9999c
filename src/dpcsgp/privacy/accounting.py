"""eps of what was released, and the noise for an eps: every answer is an upper bound, within
seconds.

Answers come from privacy-loss distributions on a grid of bounded size (`bounds.py`). They lie above
the exact eps by about 0.1 %. Small sampling rates need more than one grid can give; there the small
and the rare large losses are composed apart (`rare_losses.py`), and the smaller of both upper
bounds counts. Where delta is below 1e-14 per release, beyond floating point, the looser Renyi bound
takes over.

Reference: Koskela, Jälkö, Honkela, "Computing Tight Differential Privacy Guarantees Using FFT"
(2020)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.events import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    ReleaseEvent,
    check_delta,
    check_epsilon,
    check_steps,
    neighbouring_relation,
)
from dpcsgp.privacy.passes import OVERFLOW
from dpcsgp.privacy.pld import loss_distribution_epsilon
from dpcsgp.privacy.rare_losses import split_epsilon
from dpcsgp.privacy.rdp import renyi_epsilon

__all__ = [
    "ADD_OR_REMOVE_ONE",
    "NO_MEANINGFUL_PRIVACY",
    "REPLACE_ONE",
    "EpsilonMeter",
    "ReleaseEvent",
    "calibrate_noise",
    "composed_epsilon",
    "composed_relation",
    "describe_epsilon",
    "epsilon",
    "neighbouring_relation",
    "paper_noise_multiplier",
    "releases_within",
]

NO_MEANINGFUL_PRIVACY: Final = (
    50.0  # an attacker's odds may rise by exp(50); larger values differ in name only
)
MOST_RELEASES: Final = 10**7
_COARSE: Final = (
    0.02  # a grid that adds this much variance raises eps by up to 1 %: worth a second method
)
_NO_NOISE: Final = 1e-6  # less noise than this counts as none: its eps would be above 1e11
_LEAST_NOISE: Final = 0.01
_MOST_NOISE: Final = 1e7


def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    sampling: str = "poisson",
) -> float:
    """Return the eps of `steps` equal releases at this delta, under
    `neighbouring_relation(sampling)`.

    >>> round(epsilon(noise_multiplier=1.1, sampling_rate=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    check_steps(steps)
    event = ReleaseEvent.of(sampling, sampling_rate, noise_multiplier)
    return composed_epsilon([(event, int(steps))], delta)


def composed_relation(releases: Iterable[tuple[ReleaseEvent, int]]) -> str:
    """Return the relation that `composed_epsilon` answers for: replacing one example as soon as one
    release is uniform."""
    uniform = any(event.sampling == "uniform" and count > 0 for event, count in releases)
    return REPLACE_ONE if uniform else ADD_OR_REMOVE_ONE


def composed_epsilon(releases: Iterable[tuple[ReleaseEvent, int]], delta: float) -> float:
    """Return the eps of all these releases together, each event with its count, under
    `composed_relation(releases)`.

    Poisson releases beside uniform ones are accounted for under replacing one example too, with
    twice the sensitivity."""
    check_delta(delta)
    counts: Counter[ReleaseEvent] = Counter()
    for event, count in releases:
        check_steps(count)
        counts[event] += int(count)
    found = [(event, count) for event, count in counts.items() if count > 0]
    found.sort(key=lambda item: (item[0].sampling, item[0].sampling_rate, item[0].noise_multiplier))
    return _composed_epsilon(tuple(found), float(delta))


@lru_cache(maxsize=4096)
def _composed_epsilon(releases: tuple[tuple[ReleaseEvent, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(event.noise_multiplier < _NO_NOISE for event, _ in releases):
        return math.inf
    delta -= sum(OVERFLOW * count for event, count in releases if _may_overflow(event))
    if delta <= 0:
        return math.inf
    relation = composed_relation(releases)
    bound = loss_distribution_epsilon(releases, delta, relation)
    best = bound.epsilon
    if bound.inflation > _COARSE:
        best = min(best, split_epsilon(releases, delta, relation).epsilon)
    return best if math.isfinite(best) else renyi_epsilon(releases, delta)


def _may_overflow(event: ReleaseEvent) -> bool:
    """Tell whether a batch may exceed its fixed places: then nothing is promised, so its
    probability is part of delta."""
    return event.sampling == "poisson" and event.sampling_rate < 1


def calibrate_noise(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, sampling: str = "poisson"
) -> float:
    """Return the smallest noise multiplier (within 0.1 % of eps) whose verified eps is at most
    `epsilon`.

    >>> noise = calibrate_noise(epsilon=1.5, delta=1e-5, sampling_rate=0.01, steps=1000)
    >>> 1.05 < noise < 1.15
    True
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_steps(steps)
    ReleaseEvent.of(sampling, sampling_rate, 1.0)  # refuses bad sampling settings by name
    return _calibrated(float(epsilon), float(delta), float(sampling_rate), int(steps), sampling)


@lru_cache(maxsize=1024)
def _calibrated(
    target: float, delta: float, sampling_rate: float, steps: int, sampling: str
) -> float:
    if steps == 0:
        return 0.0

    def verified(noise: float) -> float:
        return composed_epsilon([(ReleaseEvent.of(sampling, sampling_rate, noise), steps)], delta)

    low, high = _bracket(verified, target)
    if low is None:
        raise ConfigError(
            f"privacy.epsilon = {target:g}, privacy.delta = {delta:g}: noise of {_LEAST_NOISE} x "
            "clip_norm would already "
            "satisfy this, which protects nobody; use a smaller epsilon, and a delta well below "
            "1 / (examples of a node)"
        )
    return _narrow(verified, target, low, high)


def _bracket(verified: Callable[[float], float], target: float) -> tuple[float | None, float]:
    """Return noise multipliers (too small, large enough), a factor of at most two apart; (None, _)
    if any would do."""
    noise = 1.0
    if verified(noise) > target:
        while verified(2 * noise) > target:
            noise *= 2
            if noise > _MOST_NOISE:
                raise ConfigError(
                    f"privacy.epsilon = {target:g}: not reachable with noise below "
                    f"{_MOST_NOISE:.0e}; raise it"
                )
        return noise, 2 * noise
    while verified(noise / 2) <= target:
        noise /= 2
        if noise < _LEAST_NOISE:
            return None, noise
    return noise / 2, noise


def _narrow(verified: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return a noise multiplier with target * 0.999 <= verified <= target, by interpolating log eps
    in log noise.

    Every other move halves the bracket, so a kink of eps cannot stall the search.
    """
    for turn in range(60):
        eps_low, eps_high = verified(low), verified(high)
        if eps_high >= 0.999 * target or high / low < 1 + 1e-7:
            break
        share = 0.5
        if turn % 2 == 0 and eps_high > 0 and math.isfinite(eps_low):
            share = math.log(eps_low / (0.9995 * target)) / math.log(eps_low / eps_high)
        noise = low * (high / low) ** min(max(share, 0.02), 0.98)
        if verified(noise) <= target:
            high = noise
        else:
            low = noise
    return high


def releases_within(
    event: ReleaseEvent,
    epsilon: float,
    delta: float,
    spent: Iterable[tuple[ReleaseEvent, int]] = (),
) -> int:
    """Return how many more releases of this event fit into (epsilon, delta) beside what was spent;
    at most 10^7.

    >>> event = ReleaseEvent("poisson", sampling_rate=0.01, noise_multiplier=1.1)
    >>> fit = releases_within(event, epsilon=1.6, delta=1e-5)
    >>> composed_epsilon([(event, fit)], 1e-5) <= 1.6 < composed_epsilon([(event, fit + 1)], 1e-5)
    True
    """
    check_epsilon(epsilon)
    before = tuple(spent)

    def fits(count: int) -> bool:
        return composed_epsilon((*before, (event, count)), delta) <= epsilon

    low, high = 0, 1
    while fits(high):
        low, high = high, min(8 * high, MOST_RELEASES + 1)
        if low == MOST_RELEASES + 1:
            return MOST_RELEASES
    while high - low > 1:
        middle = math.isqrt(low * high) if high > 2 * low else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def paper_noise_multiplier(
    epsilon: float, delta: float, steps: int, num_examples: int, c2: float = 1.0
) -> float:
    """Return sigma / G of Proposition 1: c2 sqrt(T log(1 / delta)) / (J eps), for one example drawn
    per step.

    The proposition asks for eps < c1 T / J^2 with an unknown c1; outside of it the noise is far too
    small for the eps it names, so report `epsilon(...)` of what was released beside the claim.

    >>> round(paper_noise_multiplier(0.5, 1e-4, steps=10_000, num_examples=6000), 4)
    0.1012
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_steps(steps)
    if num_examples < 1:
        raise ConfigError(
            f"num_examples = {num_examples}: expected a declared number of examples of at least 1"
        )
    if not (math.isfinite(c2) and c2 > 0):
        raise ConfigError(
            f"privacy.c2 = {c2}: expected a finite number above 0; the paper leaves it open, 1 "
            "is the default"
        )
    return c2 * math.sqrt(steps * math.log(1 / delta)) / (num_examples * epsilon)


def describe_epsilon(value: float) -> str:
    """Return eps as people should read it: three digits, and a plain word where it promises
    nothing.

    >>> describe_epsilon(0.4999), describe_epsilon(346.3)
    ('0.500', '346 (no meaningful privacy: above 50)')
    """
    if math.isinf(value):
        return "infinite (no privacy)"
    if value > NO_MEANINGFUL_PRIVACY:
        return f"{value:.0f} (no meaningful privacy: above {NO_MEANINGFUL_PRIVACY:g})"
    return f"{value:#.3g}"


@dataclass(frozen=True)
class EpsilonMeter:
    """eps after k equal releases, for progress lines: asks the accountant at `marks` values of k
    and never understates.

    Between two marks it answers with the value at the next one; it is exact at `planned` and
    beyond."""

    event: ReleaseEvent
    delta: float
    planned: int
    spent: tuple[tuple[ReleaseEvent, int], ...] = ()
    marks: int = 50

    def after(self, count: int) -> float:
        """Return an upper bound on eps after `count` further releases."""
        if 0 < count < self.planned:
            count = math.ceil(
                math.ceil(count * self.marks / self.planned) * self.planned / self.marks
            )
        return composed_epsilon((*self.spent, (self.event, count)), self.delta)
