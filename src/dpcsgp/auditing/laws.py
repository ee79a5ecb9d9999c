"""Hold the drawn releases against the law that the mechanism states, one property at a time.

The stated law: every example is in a batch with the stated probability, whoever else is and
whatever was drawn before; a release is the sum of the examples, each clipped, plus Gaussian noise
of the stated size that is new in every coordinate, step and node, divided by a public constant.

All checks together raise a false alarm with probability `ALARMS` at most (Bonferroni).

Legend: S steps, N nodes, J examples of a node, D coordinates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from scipy.special import erfc, ndtr, ndtri
from scipy.stats import binom

from dpcsgp.auditing.draws import DRAWS, Draws, draw_mechanism
from dpcsgp.auditing.experiment import Setting
from dpcsgp.auditing.faults import check_fault
from dpcsgp.auditing.statistics import (
    POWER,
    Finding,
    any_pair_correlated,
    correlated,
    exactly,
    other_counts,
    other_law,
    proportion,
    shifted,
    too_large,
    too_small,
    worst_proportion,
)
from dpcsgp.privacy.passes import SUM_SLACK

ALARMS: Final = 1e-5
SUM_TOLERANCE: Final = SUM_SLACK  # clip norms: what the mechanism's noise is raised by for rounding
# noise may be this much above the stated one, which is raised for rounding: safe
_SPARE_NOISE: Final = 0.01
_TAIL: Final = 4.0  # standard deviations
_LEAST: Final = 1e-5  # noise is on a grid, and exact zeros would have a magnitude score of -inf

Test = Callable[[float], Finding]  # false-alarm level -> what it saw


@final
@dataclass(frozen=True)
class Check:
    """One property: how far off it was, and from where on it would have been caught."""

    name: str
    unit: str  # "%": `seen` and `smallest` are shares; otherwise what they count
    seen: float
    smallest: float
    p_value: float
    flagged: bool


@final
@dataclass(frozen=True)
class MechanismAudit:
    """What the draws of the mechanism showed."""

    draws: int
    nodes: int
    steps: int
    coordinates: int
    noise_multiplier: float
    sampling: str
    sampling_rate: float
    expected_batch_size: int
    num_examples: int
    stated_batch_size: int
    stated_examples: int
    false_alarm_level: float
    power: float
    passed: bool
    checks: tuple[Check, ...]
    seconds: float

    @property
    def flagged(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.flagged]


def audit_mechanism(
    setting: Setting, draws: int = DRAWS, fault: str | None = None
) -> MechanismAudit:
    """Draw the mechanism of these settings and hold it against its law."""
    started = time.monotonic()
    check_fault(fault, setting.mechanism, setting.rows_per_unit)
    return judge_draws(draw_mechanism(setting, draws, fault), setting.stated_batch, started)


def judge_draws(draws: Draws, stated: tuple[int, int], started: float) -> MechanismAudit:
    """Make all checks that apply to these settings."""
    # Bonferroni: every test gets an equal share of the false alarms
    tests = list(_tests(draws))
    level = ALARMS / len(tests)
    checks = tuple(_check(name, unit, test(level), level) for name, unit, test in tests)
    steps, nodes, dim = draws.noise_SND.shape
    event = draws.event
    return MechanismAudit(
        draws=draws.size,
        nodes=nodes,
        steps=steps,
        coordinates=dim,
        noise_multiplier=event.noise_multiplier,
        sampling=event.sampling,
        sampling_rate=event.sampling_rate,
        expected_batch_size=draws.expected_batch_size,
        num_examples=draws.num_examples,
        stated_batch_size=stated[0],
        stated_examples=stated[1],
        false_alarm_level=ALARMS,
        power=POWER,
        passed=not any(check.flagged for check in checks),
        checks=checks,
        seconds=time.monotonic() - started,
    )


def _check(name: str, unit: str, finding: Finding, level: float) -> Check:
    # Not "p_value <= level": a value that is not a number must be a fault, too.
    flagged = not finding.p_value > level
    return Check(name, unit, finding.seen, finding.smallest, finding.p_value, flagged)


def _tests(draws: Draws) -> Iterator[tuple[str, str, Test]]:
    """Yield (property, unit, test) for all that the stated law says under these settings."""
    # of unit size whatever the noise is: a wrong size is the business of two tests alone
    noise_SND = draws.noise_SND / max(float(np.sqrt(np.square(draws.noise_SND).mean())), 1e-300)
    scores_SND = magnitudes(noise_SND)
    yield from _sampling(draws)
    if draws.event.sampling_rate < 1:
        yield from _fresh_batches(draws)
    yield from _sums(draws)
    yield from _noise(draws, noise_SND)
    for name, values_SND in (("noise", noise_SND), ("size of noise", scores_SND)):
        yield from _fresh_noise(name, values_SND)
    if draws.event.sampling_rate < 1:
        yield from _noise_and_batch(draws, noise_SND, scores_SND)
    yield from _heard(draws)


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Map |Normal(0, 1)| to Normal(0, 1), so that correlations of sizes are exact, too."""
    return -ndtri(erfc(np.maximum(np.abs(values), _LEAST) / math.sqrt(2)))


def _sampling(draws: Draws) -> Iterator[tuple[str, str, Test]]:
    """Every example with the stated probability, and sizes to match."""
    rate, total, size = draws.event.sampling_rate, draws.num_examples, draws.size
    steps = len(draws.sizes_SN)
    drawn, canaries = int(draws.sizes_SN.sum()), int(draws.canary_SN.sum())
    if draws.event.sampling == "poisson":
        tries, sizes_SN, law = steps * total, draws.sizes_SN, binom(total, rate).cdf
        yield "sampling rate", "%", lambda level: proportion(drawn, size * total, rate, level)
        yield "sampling rate: any node", "%", _rate_of_any(sizes_SN.sum(0), tries, rate)
        yield "law of the drawn size", "distance", lambda level: other_counts(sizes_SN, law, level)
    else:
        off = float(np.abs(draws.sizes_SN - draws.expected_batch_size).max())
        yield "drawn size", "examples", lambda level: exactly(off, 0.0)
    yield "sampling rate: canary", "%", lambda level: proportion(canaries, size, rate, level)
    yield "sampling rate: any example", "%", _rate_of_any(draws.times_J, size, rate)
    repeats = float(max(draws.most_repeats - 1, 0))
    yield "example twice in a batch", "times", lambda level: exactly(repeats, 0.0)


def _rate_of_any(counts: np.ndarray, trials: int, rate: float) -> Test:
    return lambda level: worst_proportion(counts, trials, rate, level)


def _fresh_batches(draws: Draws) -> Iterator[tuple[str, str, Test]]:
    """Batches of other steps and nodes have no more in common than chance gives them."""
    # name -> examples in common, places where there could be one, chance of each
    rate, (steps, nodes) = draws.event.sampling_rate, draws.sizes_SN.shape
    places = nodes * draws.num_examples
    odd, even, first = draws.shared_S[1::2], draws.shared_S[2::2], draws.shared_first_S[1:]
    from_first = int(draws.sizes_SN[0].sum()) * (steps - 1)
    cases = {
        "batch of step 2k at 2k+1": (int(odd.sum()), places * len(odd), rate**2),
        "batch of step 2k+1 at 2k+2": (int(even.sum()), places * len(even), rate**2),
        "batch of the first step later": (int(first.sum()), from_first, rate),
        "batch of a node at the next": (draws.shared_nodes, steps * places // 2, rate**2),
    }

    def reused(shared: int, trials: int, chance: float) -> Test:
        # If a share s of batches is reused, a place agrees with chance rate (rate + s (1 - rate)).
        def test(level: float) -> Finding:
            found = proportion(shared, trials, chance, level)
            share = rate / (1 - rate)
            return Finding(found.seen * share, found.p_value, found.smallest * share)

        return test

    for name, case in cases.items():
        if case[1] > 0:
            yield name, "% reused", reused(*case)


def _sums(draws: Draws) -> Iterator[tuple[str, str, Test]]:
    """The data are summed once per release, and each example is clipped by itself."""
    off = float(max(abs(count - 1) for count in draws.sums_per_release))
    yield "sums of data per release", "sums", lambda level: exactly(off, 0.0)
    error = draws.sum_error
    yield "clipped one by one", "clip norms", lambda level: exactly(error, SUM_TOLERANCE)


def _noise(draws: Draws, noise_SND: np.ndarray) -> Iterator[tuple[str, str, Test]]:
    """Gaussian, of the stated size, about zero."""
    stated_SND = draws.noise_SND
    yield "noise below the stated", "%", lambda level: too_small(stated_SND, level)
    yield "noise above the stated", "%", lambda level: too_large(stated_SND, level, _SPARE_NOISE)
    flat_MD = noise_SND.reshape(-1, noise_SND.shape[2])
    yield "mean of noise", "std", lambda level: shifted(flat_MD, level)
    yield "law of noise", "distance", lambda level: other_law(noise_SND, ndtr, level)
    beyond = int((np.abs(noise_SND) > _TAIL).sum())
    chance = 2 * float(ndtr(-_TAIL))
    size = noise_SND.size
    yield "missing beyond 4 std", "%", lambda level: _missing(beyond, size, chance, level)


def _missing(beyond: int, size: int, chance: float, level: float) -> Finding:
    """Compare the tails with the stated ones; too little mass is what betrays."""
    found = proportion(beyond, size, chance, level, fewer=True)
    return Finding(-found.seen, found.p_value, found.smallest)


def _fresh_noise(name: str, values_SND: np.ndarray) -> Iterator[tuple[str, str, Test]]:
    """New in every step, coordinate and node: consecutive steps together, then every pair."""
    # consecutive steps: many pairs in one coefficient, so that a small share of reuse shows
    steps, nodes, dim = values_SND.shape
    pairs = {
        "2k, 2k+1": values_SND[: steps - steps % 2],
        "2k+1, 2k+2": values_SND[1 : steps - (steps + 1) % 2],
    }
    for label, part_SND in pairs.items():
        yield f"{name}: steps {label}", "correl.", _follows(part_SND[0::2], part_SND[1::2])
    # every pair by itself: finds two that are alike, wherever they are
    rows = {
        "any two steps": values_SND.reshape(steps, -1),
        "any coordinates": values_SND.reshape(-1, dim).T,
        "any two nodes": values_SND.transpose(1, 0, 2).reshape(nodes, -1),
    }
    for label, values_RM in rows.items():
        yield f"{name}: {label}", "correl.", _any_follows(values_RM)


def _follows(first: np.ndarray, second: np.ndarray) -> Test:
    return lambda level: correlated(first, second, level)


def _any_follows(values_RM: np.ndarray) -> Test:
    return lambda level: any_pair_correlated(values_RM, level)


def _noise_and_batch(
    draws: Draws, noise_SND: np.ndarray, scores_SND: np.ndarray
) -> Iterator[tuple[str, str, Test]]:
    """What is left after the stated sum knows nothing about the batch: neither canary nor size."""
    inside, event = draws.inside_N, draws.event
    # what is left along the canary must not follow whether it was drawn
    drawn = draws.canary_SN[:, inside] - event.sampling_rate
    along_SN = noise_SND[:, inside] @ draws.canary_axis_D

    def contribution(level: float) -> Finding:
        found = correlated(drawn, along_SN, level)
        per_unit = event.noise_multiplier / max(float(drawn.std()), 1e-300)
        return Finding(found.seen * per_unit, found.p_value, found.smallest * per_unit)

    yield "canary adds one clip norm", "clip norms", contribution
    # Poisson batches vary in size, which neither the release nor the noise may follow
    if event.sampling == "poisson":
        sizes_SN = draws.sizes_SN - draws.num_examples * event.sampling_rate
        yield "drawn size: release", "correl.", _follows(sizes_SN, noise_SND @ draws.other_axis_D)
        scores_SN = scores_SND.sum(2) / math.sqrt(scores_SND.shape[2])
        yield "drawn size: size of noise", "correl.", _follows(sizes_SN, scores_SN)


def _heard(draws: Draws) -> Iterator[tuple[str, str, Test]]:
    """What a receiver sees along the canary, with it and without, against the stated mixtures."""
    rate, spread = draws.event.sampling_rate, draws.event.noise_multiplier

    def mixture(canary: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: (1 - rate) * ndtr(x / spread) + rate * ndtr((x - canary) / spread)

    sides = (("with", draws.inside_N, 1.0), ("without", ~draws.inside_N, draws.other_canary))
    for label, rows_N, canary in sides:
        values, law = draws.heard_SN[:, rows_N], mixture(canary)
        yield f"release {label} canary", "distance", _distributed(values, law)


def _distributed(values: np.ndarray, law: Callable[[np.ndarray], np.ndarray]) -> Test:
    return lambda level: other_law(values, law, level)
