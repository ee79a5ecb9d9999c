"""The mechanism audit passes what is right, flags planted faults, and its printed power is real.

Legend: S steps, N nodes, J examples, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binom
from torch import Tensor, nn

from dpcsgp.auditing import DRAWS, FAULTS
from dpcsgp.auditing.canaries import output_as_loss
from dpcsgp.auditing.draws import (
    DIM,
    NODES,
    Releases,
    Watch,
    axes,
    many_nodes,
    scaled,
    watch_releases,
)
from dpcsgp.auditing.experiment import Setting
from dpcsgp.auditing.faults import Faulty, Oversampled
from dpcsgp.auditing.laws import (
    ALARMS,
    SUM_TOLERANCE,
    MechanismAudit,
    audit_mechanism,
    judge_draws,
    magnitudes,
)
from dpcsgp.auditing.statistics import (
    POWER,
    Finding,
    any_pair_correlated,
    correlated,
    other_counts,
    other_law,
    proportion,
    shifted,
    too_large,
    too_small,
    worst_proportion,
)
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import GaussianMechanism, clipping_engine
from dpcsgp.randomness import PrivateRandomness
from dpcsgp.runs.calibration import build_mechanism

FEW = 10_000
ALL = "privacy.expected_batch_size=6000"
KINDS = [
    [],
    ["privacy.sampling=uniform"],
    [ALL],
    ["privacy.expected_batch_size=16", "privacy.clip_norm=0.7"],
]

# The check that a fault is named after: others may fail with it.
# shared noise: the observer's best combination of all messages shows these
SHOWN_AMONG_PAIRS = {
    "pair-stream-twice": "noise: steps 2k, 2k+1",
    "pair-sign": "noise above the stated",
    "one-more-colluder": "noise below the stated",
    "pair-within": "noise: steps 2k, 2k+1",
}
SHOWN_BY = {
    "noise": "noise below the stated",
    "clipping": "clipped one by one",
    "rate": "sampling rate",
    "double-rate": "sampling rate",
    "reused-noise": "noise: steps 2k, 2k+1",
    "same-batch": "batch of step 2k at 2k+1",
    "mean-clipping": "clipped one by one",
    "drawn-size": "drawn size: release",
    "copied-noise": "noise: any coordinates",
}


def setting(*values: str, seed: int = 1) -> Setting:
    return Setting.of(load_config(None, ["privacy.epsilon=1", f"privacy.seed={seed}", *values]))


def audit_of(
    spoil: Callable[[GaussianMechanism], Releases], *values: str, draws: int = FEW, seed: int = 1
) -> MechanismAudit:
    """Audit something else than the stated mechanism against the stated law."""
    stated = many_nodes(setting(*values))
    engine = clipping_engine(nn.Sequential(nn.Linear(DIM, 1, bias=False)), output_as_loss)
    private = PrivateRandomness.seeded(seed, range(NODES))
    return judge_draws(
        watch_releases(Watch(stated, engine), spoil(stated), private, draws), (1, 1), 0.0
    )


# The verdict


@pytest.mark.parametrize("values", KINDS, ids=str)
def test_the_mechanism_as_it_is_passes(values: list[str]) -> None:
    result = audit_mechanism(setting(*values), FEW)
    assert result.flagged == []
    assert result.passed
    assert result.draws == FEW == result.nodes * result.steps


@pytest.mark.slow
def test_twenty_of_twenty_seeds_pass() -> None:
    flagged = [audit_mechanism(setting(seed=seed), 4 * FEW).flagged for seed in range(100, 120)]
    assert flagged == [[]] * 20


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_every_planted_fault_is_flagged_at_eps_1_by_few_draws(fault: str) -> None:
    result = audit_mechanism(setting(), FEW, fault)
    assert not result.passed
    assert SHOWN_BY[fault] in result.flagged


@pytest.mark.slow
@pytest.mark.parametrize("fault", SHOWN_BY)
def test_every_planted_fault_is_flagged_by_the_default_draws_at_eps_8_too(fault: str) -> None:
    result = audit_mechanism(setting("privacy.epsilon=8"), DRAWS, fault)
    assert SHOWN_BY[fault] in result.flagged


def test_the_order_of_noise_and_encoding_is_no_matter_of_the_mechanism() -> None:
    assert set(FAULTS) == {*SHOWN_BY, *SHOWN_AMONG_PAIRS, "order", "rows-apart"}
    assert audit_mechanism(setting(), FEW, "order").passed


@pytest.mark.slow
@pytest.mark.parametrize("max_colluders", [0, 2])
def test_observers_with_as_many_colluders_as_stated_see_the_stated_noise(
    max_colluders: int,
) -> None:
    result = audit_mechanism(setting(f"privacy.max_colluders={max_colluders}"), FEW)
    assert result.flagged == []
    assert result.noise_multiplier == pytest.approx(setting().event.noise_multiplier, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*SHOWN_AMONG_PAIRS, "noise", "reused-noise"])
def test_every_fault_of_shared_noise_is_flagged(fault: str) -> None:
    result = audit_mechanism(setting("privacy.max_colluders=2"), FEW, fault)
    assert (SHOWN_AMONG_PAIRS | SHOWN_BY)[fault] in result.flagged


@pytest.mark.parametrize("fault", SHOWN_AMONG_PAIRS)
def test_faults_of_pairs_need_pairs(fault: str) -> None:
    with pytest.raises(ConfigError, match=f"--break {fault}: pairs share no noise here"):
        audit_mechanism(setting(), FEW, fault)


@pytest.mark.parametrize("fault", ["rate", "double-rate", "same-batch"])
def test_faults_of_uniform_sampling_are_flagged_too(fault: str) -> None:
    assert not audit_mechanism(setting("privacy.sampling=uniform"), FEW, fault).passed


def test_faults_that_change_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="--break same-batch: every example is in every batch"):
        audit_mechanism(setting(ALL), FEW, "same-batch")
    with pytest.raises(ConfigError, match="--break drawn-size: uniform batches have one size"):
        audit_mechanism(setting("privacy.sampling=uniform"), FEW, "drawn-size")
    with pytest.raises(
        ConfigError, match="--break gravity: expected one of noise, clipping, order, rate"
    ):
        audit_mechanism(setting(), FEW, "gravity")
    with pytest.raises(ConfigError, match="--draws 5: expected at least 10000"):
        audit_mechanism(setting(), 5)


# Faults that nobody can plant from the command line


class SharedByNodes(Faulty):
    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        noise_ND[500] = noise_ND[7]
        return noise_ND


class FlippedSigns(Faulty):
    _first_ND: Tensor | None = None

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        self._first_ND = noise_ND.clone() if self._first_ND is None else self._first_ND
        signs_ND = torch.sign(noise_ND)
        return signs_ND * self._first_ND.abs()


class ShortTails(Faulty):
    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        limit = 3.0 * self.noise_multipliers[0] * self.clip_norm
        return noise_ND.clamp(-limit, limit)


class LargerContribution(Faulty):
    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        return noise_ND + 0.5 * self.clip_norm * self._canary_N[:, None] * axes(DIM)[0]

    def batch(
        self,
        indices_NE: Tensor,
        present_NE: Tensor,
        step: int,
        random: PrivateRandomness,
        active: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        inside_N = torch.arange(NODES) % 2 == 0
        self._canary_N = ((indices_NE == 0) & present_NE).any(1) & inside_N
        return indices_NE, present_NE


class TwiceInABatch(Faulty):
    def batch(
        self,
        indices_NE: Tensor,
        present_NE: Tensor,
        step: int,
        random: PrivateRandomness,
        active: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        return torch.cat([indices_NE, indices_NE], 1), torch.cat([present_NE, present_NE], 1)


@pytest.mark.parametrize(
    ("spoil", "check", "draws"),
    [
        (SharedByNodes, "noise: any two nodes", FEW),
        (FlippedSigns, "size of noise: any two steps", FEW),
        pytest.param(ShortTails, "missing beyond 4 std", DRAWS, marks=pytest.mark.slow),
        pytest.param(
            LargerContribution, "canary adds one clip norm", DRAWS, marks=pytest.mark.slow
        ),
        (TwiceInABatch, "example twice in a batch", FEW),
        (lambda stated: replace(stated, sampling="uniform"), "law of the drawn size", FEW),
        (
            lambda stated: replace(stated, noise_multipliers=(5.85,) * NODES),
            "noise below the stated",
            FEW,
        ),
        pytest.param(
            lambda stated: Oversampled(stated, 1.01), "sampling rate", DRAWS, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_faults_are_flagged(spoil: Callable[..., Releases], check: str, draws: int) -> None:
    """Noise 2.8 % too small, a rate 1 % too large, batches of one size: all are seen."""
    assert check in audit_of(spoil, draws=draws).flagged


def test_a_release_that_is_not_a_number_is_flagged() -> None:
    class Broken(Faulty):
        def noise(self, noise_ND: Tensor, step: int) -> Tensor:
            return noise_ND * float("nan")

    assert not audit_of(Broken).passed


def test_the_wrapper_of_faults_spoils_nothing_by_itself() -> None:
    assert audit_of(Faulty).flagged == []


# The audited mechanism is the run's


@pytest.mark.parametrize(
    "values", [*KINDS, ["algorithm.name=dp2sgd", "graph.num_nodes=7"]], ids=str
)
def test_noise_rate_clip_norm_and_sampling_are_those_of_the_run(values: list[str]) -> None:
    made = setting(*values)
    batch, total = made.stated_batch
    run = build_mechanism(made.config, [total] * made.config.graph.num_nodes)
    audited = many_nodes(made)
    assert (run.expected_batch_sizes[0], run.num_examples[0]) == (batch, total)
    assert set(audited.noise_multipliers) == {run.noise_multipliers[0]}
    assert (audited.clip_norm, audited.sampling, type(audited)) == (
        run.clip_norm,
        run.sampling,
        type(run),
    )
    assert audited.event(0).sampling_rate == pytest.approx(run.event(0).sampling_rate, rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "total"),
    [(1, 3), (2048, 6000), (64, 60000), (1, 60000), (5999, 6000), (6000, 6000), (17, 997)],
)
def test_smaller_data_have_the_same_rate(batch: int, total: int) -> None:
    small, of = scaled(batch, total)
    assert small / of == pytest.approx(batch / total, rel=1e-3)
    assert 24 <= of <= max(1024, 2 * total / batch)
    assert 1 <= small <= of


# Level and power of the tests themselves

LEVEL = 1e-3
SIZE = 2000


def random(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def gauss(seed: int, *shape: int) -> np.ndarray:
    return random(seed).standard_normal(shape)


def pair(seed: int, size: float) -> Finding:
    x, y = gauss(seed, 2, SIZE)
    return correlated(x, size * x + np.sqrt(1 - size**2) * y, LEVEL)


def rows(seed: int, size: float) -> Finding:
    x = gauss(seed, 20, SIZE)
    x[7] = size * x[3] + np.sqrt(1 - size**2) * x[7]
    return any_pair_correlated(x, LEVEL)


def moved(seed: int, size: float) -> Finding:
    return shifted(gauss(seed, SIZE, 8) + size * np.eye(8)[2], LEVEL)


def drawn(seed: int, size: float) -> Finding:
    return proportion(int(random(seed).binomial(SIZE, 0.2 * (1 + size))), SIZE, 0.2, LEVEL)


def missing(seed: int, size: float) -> Finding:
    return proportion(
        int(random(seed).binomial(SIZE, 0.2 * (1 - size))), SIZE, 0.2, LEVEL, fewer=True
    )


def one_of_many(seed: int, size: float) -> Finding:
    counts = random(seed).binomial(SIZE, np.where(np.arange(30) == 4, 0.2 * (1 + size), 0.2))
    return worst_proportion(counts, SIZE, 0.2, LEVEL)


def atom(seed: int, size: float) -> Finding:
    values = gauss(seed, SIZE)
    return other_law(np.where(random(seed + 10**6).random(SIZE) < size, -9.0, values), ndtr, LEVEL)


def emptied(seed: int, size: float) -> Finding:
    sizes = random(seed).binomial(24, 1 / 3, SIZE)
    # All mass that is moved goes below everything else: the distance is what is moved.
    sizes = np.where(random(seed + 10**6).random(SIZE) < size, 0, sizes)
    return other_counts(sizes, binom(24, 1 / 3).cdf, LEVEL)


TESTS: dict[str, Callable[[int, float], Finding]] = {
    "too_small": lambda seed, size: too_small((1 - size) * gauss(seed, SIZE), LEVEL),
    "too_large": lambda seed, size: too_large((1 + size) * gauss(seed, SIZE), LEVEL, 0.01),
    "shifted": moved,
    "correlated": pair,
    "any_pair_correlated": rows,
    "proportion": drawn,
    "proportion, fewer": missing,
    "worst_proportion": one_of_many,
    "other_law": atom,
    "other_counts": emptied,
}


@pytest.mark.parametrize("name", TESTS)
def test_the_smallest_fault_is_caught_as_often_as_promised_and_a_third_of_it_seldom(
    name: str,
) -> None:
    """Of 300 samples with the printed fault 3 are missed on average; 10 have a chance of 0.1 %."""
    test = TESTS[name]
    smallest = test(0, 0.0).smallest
    assert 0 < smallest < 0.5
    caught = sum(test(seed, smallest).p_value <= LEVEL for seed in range(300))
    assert caught >= 300 * POWER - 7
    assert sum(test(seed, smallest / 3).p_value <= LEVEL for seed in range(300)) < 60


@pytest.mark.parametrize("name", TESTS)
def test_false_alarms_are_no_more_than_stated(name: str) -> None:
    """1000 samples without fault at one alarm per 1000: 6 or more have a chance of 0.06 %."""
    assert sum(TESTS[name](seed, 0.0).p_value <= LEVEL for seed in range(1000)) <= 5


def test_a_count_that_must_be_full_is_flagged_if_it_is_not() -> None:
    assert proportion(100, 100, 1.0, LEVEL).p_value == 1.0
    assert proportion(99, 100, 1.0, LEVEL).p_value == 0.0


def test_what_could_never_show_is_called_infinite() -> None:
    """Two expected, none seen: that is chance, so even tails that are cut off would pass."""
    assert proportion(0, 20_000, 1e-4, LEVEL, fewer=True).p_value > LEVEL
    assert proportion(0, 20_000, 1e-4, LEVEL, fewer=True).smallest == np.inf


def test_magnitudes_of_gaussian_values_are_gaussian() -> None:
    values = gauss(3, 100_000)
    assert other_law(magnitudes(values), ndtr, 1e-6).p_value > 1e-3
    assert abs(float(np.corrcoef(values, magnitudes(values))[0, 1])) < 0.02


def test_the_stated_level_is_shared_by_all_checks() -> None:
    result = audit_mechanism(setting(), FEW)
    assert result.false_alarm_level == ALARMS
    assert all(
        check.flagged == (check.p_value <= ALARMS / len(result.checks)) for check in result.checks
    )
    infinite = {check.name for check in result.checks if not np.isfinite(check.smallest)}
    assert infinite == {"missing beyond 4 std"}  # ten values of 160,000
    assert len({check.name for check in result.checks}) == len(result.checks)


def test_more_draws_show_smaller_faults() -> None:
    """More draws are more steps; a pair of steps is as long as before, and among more pairs."""
    few, more = (audit_mechanism(setting(), draws).checks for draws in (FEW, 3 * FEW))
    exact = (0.0, SUM_TOLERANCE)
    for before, after in zip(few, more, strict=True):
        assert before.name == after.name
        if before.smallest not in exact and not before.name.endswith("any two steps"):
            assert after.smallest < before.smallest
