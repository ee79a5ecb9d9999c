"""The audit passes on the mechanism as it is and fails on broken ones; its bound is a bound."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from dpcsgp.auditing import audit
from dpcsgp.auditing.attack import gather
from dpcsgp.auditing.bounds import (
    Rates,
    best_threshold,
    claimed_curve,
    clopper_pearson,
    same_family,
)
from dpcsgp.auditing.colluders import TrialPairs
from dpcsgp.auditing.experiment import Groups, Setting, build_run, messages
from dpcsgp.config import Config, load_config
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import ReleaseEvent, composed_epsilon
from dpcsgp.privacy.noise import SENSITIVITY_SLACK
from dpcsgp.randomness import PrivateRandomness, PublicRandomness


def settings(*values: str) -> Config:
    common = [
        "algorithm.steps=8",
        "privacy.seed=2",
        "algorithm.polish_rounds=1",
        "privacy.epsilon=0.5",
    ]
    return load_config(None, [*common, *values])


def evidence_of(
    config: Config, inside: torch.Tensor
) -> tuple[Setting, np.ndarray, list[torch.Tensor]]:
    setting = Setting.of(config)
    nodes = range(2 * len(inside))
    public = PublicRandomness(0, nodes)
    tape = messages(build_run(setting, inside, PrivateRandomness.seeded(1, nodes), public))
    return setting, gather(setting, tape, public).steps_TS, tape


# The verdict

METHODS = [
    ["compression.spec=rot:1"],
    ["compression.spec=rand:0.5"],
    ["algorithm.name=dp-sgp"],
    ["algorithm.name=dp2sgd", "privacy.sampling=uniform"],
    ["algorithm.name=dp-block", "algorithm.num_blocks=4"],
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method[0])
@pytest.mark.parametrize("fault", [None, "noise", "clipping", "order"])
def test_only_broken_mechanisms_are_caught(method: list[str], fault: str | None) -> None:
    result = audit(settings(*method), 800 if fault == "order" else 400, fault, draws=10_000)
    assert result.epsilon_claimed == pytest.approx(0.5, rel=0.01)
    assert result.passed == (fault is None)
    assert (result.epsilon_lower_bound > result.epsilon_claimed) == (fault is not None)
    assert result.stream_passed == (fault is None)
    assert result.mechanism.passed == (fault in (None, "order"))  # the order is the algorithm's
    assert result.epsilon_lower_bound_any_mechanism <= max(result.epsilon_lower_bound, 1e-9) * 1.01
    assert result.epsilon_lower_bound <= result.epsilon_reachable * 1.01
    assert result.epsilon_lower_bound_any_mechanism <= result.epsilon_reachable_any_mechanism


def test_observers_with_colluders_recover_releases_with_exactly_the_stated_noise() -> None:
    """Two of four nodes collude; the attack hears all four and subtracts what those two know."""
    few = ("privacy.max_colluders=2", "compression.spec=none", "algorithm.steps=3")
    setting = Setting.of(settings(*few, "privacy.epsilon=6"))
    assert setting.group == 4
    inside = torch.arange(600) % 2 == 0
    nodes = range(setting.group * len(inside))
    public, private = PublicRandomness(0, nodes), PrivateRandomness.seeded(1, nodes)
    run = build_run(setting, inside, private, public)
    pairs = cast(TrialPairs, run.gradients.mechanism.pairs)
    steps_TS = gather(setting, messages(run), public, pairs).steps_TS
    wanted = setting.event.noise_multiplier * (1 + SENSITIVITY_SLACK)
    assert steps_TS[~inside, :2].std() == pytest.approx(wanted, rel=5 / math.sqrt(2 * 600))
    drawn = steps_TS[inside, :2].mean() - steps_TS[~inside, :2].mean()
    assert drawn == pytest.approx(setting.event.sampling_rate, abs=5 * wanted / math.sqrt(300))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "one-more-colluder"])
def test_an_audit_with_colluders_passes_unless_there_is_one_more(fault: str | None) -> None:
    shared = settings("privacy.max_colluders=1", "compression.spec=none", "algorithm.steps=4")
    result = audit(shared, 200, fault, draws=10_000)
    assert result.epsilon_claimed == pytest.approx(0.5, rel=0.01)
    assert result.passed == (fault is None)
    assert result.stream_passed


def test_a_bound_far_below_the_claim_is_not_called_informative() -> None:
    """100 trials: 25 right answers of each kind bound eps by log(25 / 3.7), assuming nothing."""
    result = audit(settings("algorithm.steps=2", "compression.spec=none"), trials=100, draws=10_000)
    assert result.passed
    assert result.epsilon_lower_bound < 0.25
    assert not result.stream_informative
    assert result.epsilon_reachable_any_mechanism == pytest.approx(np.log(25 / 3.7), abs=0.25)


def test_a_fault_that_only_the_draws_show_fails_the_audit() -> None:
    config = settings("algorithm.steps=2", "compression.spec=none")
    result = audit(config, trials=100, fault="reused-noise", draws=10_000)
    assert result.stream_passed
    assert not result.mechanism.passed
    assert not result.passed


@pytest.mark.slow
def test_the_bound_comes_near_the_claim_where_the_attack_is_the_best_possible() -> None:
    """One release of everything, exact messages: the likelihood ratio is optimal."""
    config = settings(
        "algorithm.name=dp-sgp",
        "algorithm.steps=1",
        "privacy.expected_batch_size=6000",
        "privacy.epsilon=4",
    )
    result = audit(config, trials=3000, draws=10_000)
    assert result.stream_informative
    assert (
        0.6 * 4 < result.epsilon_lower_bound <= result.epsilon_claimed == pytest.approx(4, rel=0.01)
    )


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ConfigError, match="sends no messages"):
        audit(settings("algorithm.name=local"))
    with pytest.raises(ConfigError, match="nothing is promised"):
        audit(settings("privacy.noise=none"))
    with pytest.raises(ConfigError, match="--trials 10"):
        audit(settings(), trials=10)
    with pytest.raises(
        ConfigError, match="--break gravity: expected one of noise, clipping, order"
    ):
        audit(settings("algorithm.steps=1"), trials=80, fault="gravity")


# The attacker's view


@pytest.mark.parametrize(
    "method", ["compression.spec=none", "algorithm.name=dp-sgp", "algorithm.name=dp2sgd"]
)
def test_exact_messages_give_back_every_noised_gradient(method: str) -> None:
    """The recovered steps are `drawn + noise`, with the stated mean and variance."""
    inside = torch.arange(120) % 2 == 0
    setting, steps_TS, _ = evidence_of(settings(method), inside)
    noise, rate = setting.event.noise_multiplier, setting.event.sampling_rate
    spread = noise / (60 * setting.steps) ** 0.5
    assert steps_TS[~inside.numpy()].mean() == pytest.approx(0.0, abs=4 * spread)
    assert steps_TS[inside.numpy()].mean() == pytest.approx(rate, abs=4 * spread + 0.1)
    assert steps_TS.std() == pytest.approx(noise, rel=0.08)


def test_the_tape_holds_every_round_of_every_node_polish_included() -> None:
    _, _, tape = evidence_of(settings("compression.spec=none"), torch.tensor([True, False]))
    assert [len(frames) for frames in tape] == [4] * 9


def test_pairs_mix_with_their_partner_only() -> None:
    mixed = Groups((0, 1, 2, 3)).mix(torch.tensor([[1.0], [3.0], [10.0], [30.0]]))
    assert mixed.flatten().tolist() == [2.0, 2.0, 20.0, 20.0]


# The bound


def test_clopper_pearson_covers() -> None:
    trials = 60
    low, high = clopper_pearson(np.arange(trials + 1), trials)
    for true in (0.01, 0.3, 0.5, 0.93):
        weights = binom.pmf(np.arange(trials + 1), trials, true)
        assert weights[low > true].sum() <= 0.025
        assert weights[high < true].sum() <= 0.025
    assert (low[0], high[-1]) == (0.0, 1.0)


def test_rates_need_the_eps_of_randomised_response() -> None:
    assert Rates(0.75, 0.25).epsilon(0.0) == pytest.approx(np.log(3))
    assert Rates(0.5, 0.5).epsilon(1e-4) == 0.0
    # the other direction counts too
    assert Rates(0.999, 0.5).epsilon(0.0) == pytest.approx(np.log(500))


@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_the_family_bound_inverts_the_gaussian_curve(noise: float) -> None:
    """The exact rates of the best attack on one Gaussian release give back that release's eps."""
    event = ReleaseEvent("poisson", 1.0, noise)
    cut = 0.5 / noise
    rates = Rates(float(norm.sf(cut - 1 / noise)), float(norm.sf(cut)))
    bound = same_family(rates, event, 1, 1e-4)
    exact = composed_epsilon([(event, 1)], 1e-4)
    assert 0.85 * exact < bound <= exact * 1.001


def test_rates_that_show_nothing_give_zero() -> None:
    assert same_family(Rates(0.4, 0.5), ReleaseEvent("poisson", 0.3, 2.0), 10, 1e-4) == 0.0


def test_the_threshold_separates() -> None:
    claims = claimed_curve(ReleaseEvent("poisson", 1.0, 10.0), 1, 1e-4)
    cut, (excess, distance) = best_threshold(np.arange(100.0) + 50, np.arange(100.0) - 60, claims)
    assert 39 < cut < 50
    assert excess > 0
    assert distance > 3


@pytest.mark.stress
def test_a_correct_mechanism_is_flagged_at_most_once_in_twenty() -> None:
    """40 audits: more than 5 flags would have a chance below 4 % at a true rate of 5 %."""
    base = [
        "algorithm.name=dp-sgp",
        "algorithm.steps=1",
        "privacy.expected_batch_size=6000",
        "privacy.epsilon=2",
    ]
    seeds = [f"privacy.seed={1000 * k}" for k in range(40)]
    flags = sum(not audit(settings(*base, seed), trials=400, draws=10_000).passed for seed in seeds)
    print(f"\n{flags} of 40 audits of a correct mechanism were flagged")
    assert flags <= 5


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, marks=pytest.mark.stress),
        pytest.param("rows-apart", marks=pytest.mark.slow),
    ],
)
def test_persons_are_audited_with_rows_that_are_all_too_long(fault: str | None) -> None:
    settings = [
        "privacy.max_rows_per_unit=4",
        "task.name=digits",
        "privacy.epsilon=4",
        "algorithm.steps=4",
        "privacy.seed=0",
    ]
    found = audit(load_config(None, settings), trials=200, fault=fault, draws=10_000)
    assert "one person with all rows" in found.neighbouring_relation
    assert found.mechanism.passed == found.stream_passed == (fault is None)


def test_rows_apart_is_refused_where_examples_have_one_row() -> None:
    with pytest.raises(ConfigError, match="max_rows_per_unit"):
        audit(load_config(None, ["task.name=digits"]), trials=80, fault="rows-apart")
