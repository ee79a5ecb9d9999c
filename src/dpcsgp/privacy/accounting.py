"""The eps of what was released, and the noise for an eps: upper bounds, within seconds.

Answers come from privacy-loss distributions on a grid of bounded size (`pld.py`). They lie above
the exact eps by about 0.1 %. Small sampling rates need more than one grid can give; there the small
and the rare large losses are composed apart (`rare_losses.py`), and the smaller of both upper
bounds counts. Where delta is below 1e-14 per release, beyond floating point, the looser Renyi bound
takes over.

Reference: Koskela, Jälkö, Honkela, "Computing Tight Differential Privacy Guarantees Using FFT"
(2020).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, Literal

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.events import (
    NeighbouringRelation,
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
    "NO_MEANINGFUL_PRIVACY",
    "NeighbouringRelation",
    "ReleaseEvent",
    "calibrate_noise",
    "composed_epsilon",
    "composed_relation",
    "describe_epsilon",
    "epsilon",
    "epsilon_against",
    "neighbouring_relation",
    "paper_noise_multiplier",
    "releases_within",
]

# an attacker's odds may rise by exp(50); larger values differ in name only
NO_MEANINGFUL_PRIVACY: Final = 50.0
MOST_RELEASES: Final = 10**7
# a grid that adds this much variance raises eps by up to 1 %: worth a second method
_COARSE: Final = 0.02
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
    """Return the eps of equal releases at this delta, under `neighbouring_relation(sampling)`.

    Args:
        noise_multiplier: standard deviation of the noise on the sum of gradients, in clip norms.
        sampling_rate: expected batch size / declared number of examples, in (0, 1].
        steps: number of releases, one per gradient step; from 0 to 10^9.
        delta: probability with which eps may fail, in (0, 1); well below 1 / examples.
        sampling: "poisson" or "uniform".

    Returns:
        An upper bound, above the exact eps by about 0.1 %; infinite without noise.

    Raises:
        ConfigError: for a value outside of its range.

    >>> round(epsilon(noise_multiplier=1.1, sampling_rate=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    check_steps(steps)
    event = ReleaseEvent.of(sampling, sampling_rate, noise_multiplier)
    return composed_epsilon([(event, int(steps))], delta)


def composed_relation(releases: Iterable[tuple[ReleaseEvent, int]]) -> NeighbouringRelation:
    """Return the relation of `composed_epsilon`: replace one as soon as one release is uniform."""
    if any(event.sampling == "uniform" and count > 0 for event, count in releases):
        return NeighbouringRelation.REPLACE_ONE
    return NeighbouringRelation.ADD_OR_REMOVE_ONE


def composed_epsilon(releases: Iterable[tuple[ReleaseEvent, int]], delta: float) -> float:
    """Return the eps of all these releases together, under `composed_relation(releases)`.

    Poisson releases beside uniform ones are accounted for under replacing one example too, with
    twice the sensitivity. Releases with shared noise count with the number of colluders that they
    state; `epsilon_against` asks for another number.

    Args:
        releases: each kind of release with its count, in any order.
        delta: probability with which eps may fail, in (0, 1).

    Returns:
        An upper bound; 0 without releases, infinite if one of them has no noise.

    Raises:
        ConfigError: for a delta or a count outside of its range.
    """
    check_delta(delta)
    counts: Counter[ReleaseEvent] = Counter()
    for event, count in releases:
        check_steps(count)
        # Shared noise counts as the independent noise that hides as well.
        counts[event.stated] += int(count)
    # one order for all callers: sums round alike, and the cache is met
    found = [(event, count) for event, count in counts.items() if count > 0]
    found.sort(key=lambda item: (item[0].sampling, item[0].sampling_rate, item[0].noise_multiplier))
    return _composed_epsilon(tuple(found), float(delta))


def epsilon_against(
    releases: Iterable[tuple[ReleaseEvent, int]], delta: float, colluders: int | Literal["all"]
) -> float:
    """Return the eps of all these releases if so many other nodes tell all they know.

    Args:
        releases: each kind of release with its count, in any order.
        delta: probability with which it may fail, in (0, 1).
        colluders: how many of the other nodes; "all": only the own noise is left.

    Returns:
        An upper bound; equal to `composed_epsilon` for independent noise.
    """
    return composed_epsilon([(event.against(colluders), n) for event, n in releases], delta)


@lru_cache(maxsize=4096)
def _composed_epsilon(releases: tuple[tuple[ReleaseEvent, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(event.noise_multiplier < _NO_NOISE for event, _ in releases):
        return math.inf
    # Where a batch exceeds its fixed places nothing is promised: that is paid from delta.
    delta -= sum(OVERFLOW * count for event, count in releases if _may_overflow(event))
    if delta <= 0:
        return math.inf
    # One grid first; small and rare losses apart where it was too coarse; Renyi as a last resort.
    relation = composed_relation(releases)
    bound = loss_distribution_epsilon(releases, delta, relation)
    best = bound.epsilon
    if bound.inflation > _COARSE:
        best = min(best, split_epsilon(releases, delta, relation).epsilon)
    return best if math.isfinite(best) else renyi_epsilon(releases, delta)


def _may_overflow(event: ReleaseEvent) -> bool:
    """Tell whether a batch of this event may exceed its fixed places."""
    return event.sampling == "poisson" and event.sampling_rate < 1


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    sampling: str = "poisson",
    spent: Iterable[tuple[ReleaseEvent, int]] = (),
) -> float:
    """Return the smallest noise multiplier whose verified eps is at most `epsilon`.

    Args:
        epsilon: budget of all releases together, above 0.
        delta: probability with which it may fail, in (0, 1); well below 1 / examples.
        sampling_rate: expected batch size / declared number of examples, in (0, 1].
        steps: number of releases, one per gradient step; from 0 to 10^9.
        sampling: "poisson" or "uniform".
        spent: what was released before and counts against the same budget.

    Returns:
        Standard deviation of the noise on the sum, in clip norms; its eps is within 0.1 % of the
        budget. Zero for no steps. The noise of the last release that was spent, where that is such
        a number.

    Raises:
        ConfigError: for a value outside of its range, a budget that nearly no noise would meet,
            or one that none can.

    >>> noise = calibrate_noise(epsilon=1.5, delta=1e-5, sampling_rate=0.01, steps=1000)
    >>> 1.05 < noise < 1.15
    True
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_steps(steps)
    ReleaseEvent.of(sampling, sampling_rate, 1.0)  # refuses bad sampling settings by name
    return _calibrated(
        float(epsilon), float(delta), float(sampling_rate), int(steps), sampling, tuple(spent)
    )


@lru_cache(maxsize=1024)
def _calibrated(
    target: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    sampling: str,
    spent: tuple[tuple[ReleaseEvent, int], ...],
) -> float:
    if steps == 0:
        return 0.0

    def verified(noise: float) -> float:
        event = ReleaseEvent.of(sampling, sampling_rate, noise)
        return composed_epsilon([*spent, (event, steps)], delta)

    if spent and 0.999 * target <= verified(spent[-1][0].noise_multiplier) <= target:
        return spent[-1][0].noise_multiplier
    low, high = _bracket(verified, target)
    if low is None:
        raise ConfigError(
            f"privacy.epsilon = {target:g}, privacy.delta = {delta:g}: noise of {_LEAST_NOISE} x "
            "clip_norm would already satisfy this, which protects nobody; use a smaller epsilon, "
            "and a delta well below 1 / (examples of a node)"
        )
    return _narrow(verified, target, low, high)


def _bracket(verified: Callable[[float], float], target: float) -> tuple[float | None, float]:
    """Return noise multipliers (too small, large enough) up to a factor of two apart.

    The first is None if any noise would do.
    """
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
    """Return a noise multiplier with 0.999 target <= verified <= target.

    By interpolating log eps in log noise. Every other move halves the bracket, so a kink of eps
    cannot stall the search.
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
    """Return how many more releases of this event fit into a budget beside what was spent.

    Args:
        event: the kind of release to come.
        epsilon: budget of all releases together, above 0.
        delta: probability with which it may fail, in (0, 1).
        spent: what was released before, each event with its count.

    Returns:
        A number of releases from 0 to 10^7.

    Raises:
        ConfigError: for a value outside of its range.

    >>> event = ReleaseEvent("poisson", sampling_rate=0.01, noise_multiplier=1.1)
    >>> fit = releases_within(event, epsilon=1.6, delta=1e-5)
    >>> composed_epsilon([(event, fit)], 1e-5) <= 1.6 < composed_epsilon([(event, fit + 1)], 1e-5)
    True
    """
    check_epsilon(epsilon)
    before = tuple(spent)

    def fits(count: int) -> bool:
        return composed_epsilon((*before, (event, count)), delta) <= epsilon

    # Grow by eights until too many, then bisect: by ratios first, as each try costs a composition.
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
    """Return sigma / G of Proposition 1: c2 sqrt(T log(1 / delta)) / (J eps).

    It is for one example drawn per step, and asks for eps < c1 T / J^2 with an unknown c1; outside
    of it the noise is far too small for the eps it names, so report `epsilon(...)` of what was
    released beside the claim.

    Args:
        epsilon: the eps that the proposition names, above 0.
        delta: its delta, in (0, 1).
        steps: T, number of releases.
        num_examples: J, declared number of examples of the node.
        c2: a constant that the paper leaves open.

    Returns:
        Standard deviation of the noise, in clip norms (G is the clip norm).

    Raises:
        ConfigError: for a value outside of its range.

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
    """Return eps as people should read it: three digits, and a word where it promises nothing.

    >>> describe_epsilon(0.4999), describe_epsilon(346.3)
    ('0.500', '346 (no meaningful privacy: above 50)')
    """
    if math.isinf(value):
        return "infinite (no privacy)"
    if value > NO_MEANINGFUL_PRIVACY:
        return f"{value:.0f} (no meaningful privacy: above {NO_MEANINGFUL_PRIVACY:g})"
    return f"{value:#.3g}"
