"""eps is an upper bound, close to exact: grows with steps, falls with noise, composes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.accounting import (
    NeighbouringRelation,
    ReleaseEvent,
    calibrate_noise,
    composed_epsilon,
    composed_relation,
    describe_epsilon,
    epsilon,
    neighbouring_relation,
    paper_noise_multiplier,
    releases_within,
)
from dpcsgp.privacy.passes import OVERFLOW
from dpcsgp.privacy.pld import LossPair, _poisson_grids, _replace_grid
from dpcsgp.privacy.rdp import renyi_epsilon

Density = Callable[[float], float]


def library_epsilon(
    noise: float,
    rate: float,
    steps: int,
    delta: float,
    *,
    upper: bool,
    interval: float = 1e-3,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    """Return dp-accounting's own estimate of eps, pessimistic (upper) or optimistic."""
    single = privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        pessimistic_estimate=upper,
        use_connect_dots=upper,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )
    return single.self_compose(steps).get_epsilon_for_delta(delta)


def root_of(function: Callable[[float], float], most: float) -> float:
    """Return where a falling function on [0, most] crosses zero."""
    root = optimize.brentq(function, 0.0, most, xtol=1e-9)
    return float(root)  # pyright: ignore[reportArgumentType]


def exact_one_step_epsilon(upper: Density, lower: Density, delta: float) -> float:
    """Integrate the hockey-stick divergence of two densities on the line and solve for eps."""

    def divergence(eps: float) -> float:
        def excess(x: float) -> float:
            return max(0.0, upper(x) - math.exp(eps) * lower(x))

        points = np.linspace(-40, 40, 81)
        return sum(integrate.quad(excess, a, b, limit=200)[0] for a, b in pairwise(points))

    if divergence(0.0) <= delta:
        return 0.0
    return root_of(lambda eps: divergence(eps) - delta, 60.0)


def normal(mean: float, deviation: float) -> Density:
    return lambda x: (
        math.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    )


def mixture(rate: float, first: Density, second: Density) -> Density:
    return lambda x: (1 - rate) * first(x) + rate * second(x)


# Known values


def test_the_reference_value() -> None:
    assert epsilon(
        noise_multiplier=1.1, sampling_rate=0.01, steps=1000, delta=1e-5
    ) == pytest.approx(1.515, abs=0.01)


@pytest.mark.parametrize(
    ("claimed", "steps", "noise", "verified"),
    [
        (0.5, 10_000, 0.1012, 345.0),
        (0.5, 100_000, 0.320, 20.3),
        (0.3, 10_000, 0.169, 90.6),
        (0.2, 10_000, 0.253, 22.8),
        (0.2, 100_000, 0.800, 0.290),
    ],
)
def test_the_papers_noise_does_not_give_the_eps_it_names(
    claimed: float, steps: int, noise: float, verified: float
) -> None:
    started = time.process_time()
    rule = paper_noise_multiplier(claimed, 1e-4, steps, 6000)
    assert rule == pytest.approx(noise, abs=5e-4)
    assert epsilon(
        noise_multiplier=rule, sampling_rate=1 / 6000, steps=steps, delta=1e-4
    ) == pytest.approx(verified, rel=0.01)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "sampling"),
    [
        (0.1012, 1 / 6000, 10_000, 1e-4, "poisson"),
        (0.01, 1 / 6000, 10_000, 1e-4, "poisson"),
        (0.01, 0.5, 10**6, 1e-6, "uniform"),
        (1.0, 1e-6, 10**7, 1e-6, "poisson"),
        (100.0, 1.0, 10**6, 1e-6, "uniform"),
        (2.0, 0.01, 10**6, 1e-10, "poisson"),
    ],
)
def test_hard_queries_answer_within_five_seconds(
    noise: float, rate: float, steps: int, delta: float, sampling: str
) -> None:
    started = time.process_time()
    value = epsilon(
        noise_multiplier=noise, sampling_rate=rate, steps=steps, delta=delta, sampling=sampling
    )
    assert time.process_time() - started < 5
    assert value >= 0
    assert math.isfinite(value)


# Upper bound, and close


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "interval"),
    [
        (1.1, 0.01, 1000, 1e-5, 1e-3),
        (0.6, 0.1, 1, 1e-5, 1e-3),
        (0.5, 0.2, 20, 1e-6, 5e-3),
        (6.0, 2048 / 6000, 30, 1e-4, 1e-3),
        (0.35, 0.001, 500, 1e-5, 5e-3),
        (2.0, 1.0, 10, 1e-8, 1e-3),
    ],
)
def test_poisson_lies_between_the_librarys_lower_and_upper_estimates(
    noise: float, rate: float, steps: int, delta: float, interval: float
) -> None:
    value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=steps, delta=delta)
    assert library_epsilon(noise, rate, steps, delta, upper=False, interval=interval) <= value
    assert value <= 1.002 * library_epsilon(
        noise, rate, steps, delta, upper=True, interval=interval
    )


@pytest.mark.parametrize(
    ("shift", "steps", "delta"),
    [
        (0.3, 1, 1e-5),
        (3.0, 1, 1e-10),
        (1.0, 100, 1e-9),
        (1.0, 10_000, 1e-9),
        (0.3, 10**6, 1e-7),
        (8.0, 1000, 1e-5),
    ],
)
@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_without_subsampling_eps_is_that_of_one_gaussian(
    shift: float, steps: int, delta: float, sampling: str
) -> None:
    noise = math.sqrt(steps) / shift * (2 if sampling == "uniform" else 1)

    def excess(eps: float) -> float:
        low = math.exp(eps + stats.norm.logcdf(-shift / 2 - eps / shift))
        return float(stats.norm.cdf(shift / 2 - eps / shift) - low - delta)

    exact = root_of(excess, 300.0)
    value = epsilon(
        noise_multiplier=noise, sampling_rate=1.0, steps=steps, delta=delta, sampling=sampling
    )
    assert exact <= value <= 1.001 * exact


@pytest.mark.parametrize(
    ("noise", "rate", "delta"), [(1.0, 0.1, 1e-3), (0.5, 0.02, 1e-4), (3.0, 0.5, 1e-5)]
)
def test_one_poisson_release_matches_exact_integration(
    noise: float, rate: float, delta: float
) -> None:
    present = mixture(rate, normal(0, noise), normal(1, noise))
    removed = exact_one_step_epsilon(present, normal(0, noise), delta)
    added = exact_one_step_epsilon(normal(0, noise), present, delta)
    value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=1, delta=delta)
    assert max(removed, added) - 1e-6 <= value <= 1.002 * max(removed, added) + 1e-6


@pytest.mark.parametrize(
    ("noise", "rate", "delta"),
    [(2.0, 0.1, 1e-3), (1.0, 0.02, 1e-4), (6.0, 0.5, 1e-5), (3.0, 1.0, 1e-4)],
)
def test_one_uniform_release_matches_exact_integration(
    noise: float, rate: float, delta: float
) -> None:
    # Worst case for replacing one example: all other gradients equal its old one, so the sum moves
    # by 2 or not at all.
    moved = mixture(rate, normal(0, noise), normal(2, noise))
    worst = exact_one_step_epsilon(moved, normal(0, noise), delta)
    opposite = exact_one_step_epsilon(normal(0, noise), moved, delta)
    # Another pair of data sets: the other gradients are zero, and the example's goes from -1 to +1.
    balanced = exact_one_step_epsilon(
        mixture(rate, normal(0, noise), normal(1, noise)),
        mixture(rate, normal(0, noise), normal(-1, noise)),
        delta,
    )
    value = epsilon(
        noise_multiplier=noise, sampling_rate=rate, steps=1, delta=delta, sampling="uniform"
    )
    assert max(worst, opposite, balanced) - 1e-6 <= value <= 1.002 * worst + 1e-6


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(2.0, 0.05, 100), (4.0, 0.3, 20), (1.2, 0.001, 500)]
)
def test_uniform_lies_between_an_attack_and_the_renyi_bound(
    noise: float, rate: float, steps: int
) -> None:
    value = epsilon(
        noise_multiplier=noise, sampling_rate=rate, steps=steps, delta=1e-5, sampling="uniform"
    )
    # the worst pair above, repeated
    attack = library_epsilon(noise / 2, rate, steps, 1e-5, upper=False)
    assert attack <= value <= renyi_epsilon([(ReleaseEvent("uniform", rate, noise), steps)], 1e-5)


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1.1, 0.01, 1000), (0.8, 0.1, 50), (5.0, 0.5, 100)]
)
def test_renyi_is_looser(noise: float, rate: float, steps: int) -> None:
    event = ReleaseEvent("poisson", rate, noise)
    assert composed_epsilon([(event, steps)], 1e-5) <= renyi_epsilon([(event, steps)], 1e-5)


def test_tiny_delta_falls_back_on_the_renyi_bound() -> None:
    event = ReleaseEvent("poisson", 0.01, 1.0)
    usable = 1e-13 - 1000 * OVERFLOW
    assert composed_epsilon([(event, 1000)], 1e-13) == pytest.approx(
        renyi_epsilon([(event, 1000)], usable), rel=1e-12
    )
    assert composed_epsilon([(event, 1000)], 1e-13) > composed_epsilon([(event, 1000)], 1e-10)


@pytest.mark.parametrize("rate", [1e-4, 0.3, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("noise", [0.05, 0.7, 30.0])
def test_grids_hold_all_the_mass_and_never_lower_it(noise: float, rate: float) -> None:
    pair = LossPair(noise, rate)
    interval = (1 / noise + 1 / noise**2) / 500
    for grid in (*_poisson_grids(pair, interval, 1e-12), *_replace_grid(pair, interval, 1e-12)):
        losses = interval * np.arange(grid.first, grid.first + len(grid.masses))
        assert grid.masses.min() >= 0
        assert grid.masses.sum() + grid.infinite == pytest.approx(1, abs=1e-12)
        # the lower distribution is a distribution too
        assert grid.masses @ np.exp(-losses) <= 1 + 1e-9


# Laws

events = st.builds(
    ReleaseEvent.of,
    sampling=st.sampled_from(["poisson", "uniform"]),
    sampling_rate=st.floats(1e-4, 1.0),
    noise_multiplier=st.floats(0.3, 20.0),
)
deltas = st.floats(-7, -3).map(lambda power: 10.0**power)


@settings(max_examples=30, deadline=None)
@given(event=events, steps=st.integers(1, 3000), factor=st.floats(1.1, 4.0), delta=deltas)
def test_eps_grows_with_steps_and_falls_with_noise_and_delta(
    event: ReleaseEvent, steps: int, factor: float, delta: float
) -> None:
    value = composed_epsilon([(event, steps)], delta)
    noisier = ReleaseEvent(event.sampling, event.sampling_rate, event.noise_multiplier * factor)
    slack = 1.003 * value + 1e-3  # grids differ between the two queries
    assert composed_epsilon([(noisier, steps)], delta) <= slack
    assert composed_epsilon([(event, steps)], delta * factor) <= slack
    assert value <= 1.003 * composed_epsilon([(event, math.ceil(steps * factor))], delta) + 1e-3


@settings(max_examples=20, deadline=None)
@given(
    first=events,
    second=events,
    counts=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    delta=deltas,
)
def test_composition_does_not_depend_on_order_and_costs_more_than_its_parts(
    first: ReleaseEvent, second: ReleaseEvent, counts: tuple[int, int], delta: float
) -> None:
    together = composed_epsilon([(first, counts[0]), (second, counts[1])], delta)
    assert together == composed_epsilon([(second, counts[1]), (first, counts[0])], delta)
    for event, count in ((first, counts[0]), (second, counts[1])):
        if event.relation == composed_relation([(first, counts[0]), (second, counts[1])]):
            assert composed_epsilon([(event, count)], delta) <= 1.01 * together + 1e-3


def test_counts_of_one_event_add_up() -> None:
    event = ReleaseEvent("poisson", 0.05, 1.5)
    assert composed_epsilon([(event, 30), (event, 70)], 1e-5) == composed_epsilon(
        [(event, 100)], 1e-5
    )


def test_two_kinds_of_gaussian_releases_compose_like_gaussians() -> None:
    mixed = composed_epsilon(
        [(ReleaseEvent("poisson", 1.0, 3.0), 9), (ReleaseEvent("poisson", 1.0, 5.0), 75)], 1e-5
    )
    # 9 / 3^2 + 75 / 5^2 = 1 / 0.5^2
    single = composed_epsilon([(ReleaseEvent("poisson", 1.0, 0.5), 1)], 1e-5)
    assert mixed == pytest.approx(single, rel=1e-3)


def test_poisson_beside_uniform_is_accounted_for_under_replacing_one_example() -> None:
    poisson, uniform = ReleaseEvent("poisson", 0.1, 2.0), ReleaseEvent("uniform", 0.1, 1000.0)
    both = [(poisson, 50), (uniform, 1)]
    assert composed_relation(both) is NeighbouringRelation.REPLACE_ONE
    assert (
        composed_relation([(poisson, 50), (uniform, 0)]) is NeighbouringRelation.ADD_OR_REMOVE_ONE
    )
    replace = NeighboringRelation.REPLACE_ONE
    exact = library_epsilon(2.0, 0.1, 50, 1e-5, upper=False, relation=replace)
    value = composed_epsilon(both, 1e-5)
    assert exact <= value
    assert value > composed_epsilon([(poisson, 50)], 1e-5)


def test_mixed_sampling_with_a_tiny_delta_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.delta = 9.5e-16: too small"):
        composed_epsilon(
            [(ReleaseEvent("poisson", 0.1, 2.0), 50), (ReleaseEvent("uniform", 0.1, 2.0), 50)],
            1e-15,
        )


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-300])
def test_no_noise_is_no_privacy(noise: float) -> None:
    assert math.isinf(epsilon(noise_multiplier=noise, sampling_rate=0.01, steps=1, delta=1e-5))


def test_one_release_without_noise_beside_others_is_no_privacy() -> None:
    loud, silent = (ReleaseEvent("poisson", 0.01, noise) for noise in (2.0, 0.0))
    assert math.isinf(composed_epsilon([(loud, 1000), (silent, 1)], 1e-5))
    assert math.isfinite(composed_epsilon([(loud, 1000), (silent, 0)], 1e-5))


def test_batches_that_exceed_their_places_are_part_of_delta() -> None:
    event, full = (ReleaseEvent("poisson", rate, 100.0) for rate in (0.5, 1.0))
    assert math.isinf(composed_epsilon([(event, 2)], 2 * OVERFLOW))
    assert math.isfinite(composed_epsilon([(event, 2)], 1e-12))
    assert math.isfinite(composed_epsilon([(full, 2)], 2 * OVERFLOW))


def test_nothing_released_costs_nothing() -> None:
    assert epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=0, delta=1e-5) == 0
    assert composed_epsilon([], 1e-5) == 0


# Calibration and budgets


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta"),
    [
        (0.5, 2048 / 6000, 30, 1e-4),
        (0.5, 1 / 6000, 10_000, 1e-4),
        (0.2, 256 / 6000, 200, 1e-4),
        (10.0, 0.01, 1000, 1e-5),
        (3.0, 1.0, 20, 1e-5),
        (0.01, 0.5, 5, 1e-6),
        (100.0, 0.2, 3, 1e-5),
    ],
)
def test_calibration_inverts_eps(
    target: float, rate: float, steps: int, delta: float, sampling: str
) -> None:
    started = time.process_time()
    noise = calibrate_noise(
        epsilon=target, delta=delta, sampling_rate=rate, steps=steps, sampling=sampling
    )
    assert time.process_time() - started < 5
    verified = epsilon(
        noise_multiplier=noise, sampling_rate=rate, steps=steps, delta=delta, sampling=sampling
    )
    assert 0.99 * target <= verified <= target
    again = calibrate_noise(
        epsilon=verified, delta=delta, sampling_rate=rate, steps=steps, sampling=sampling
    )
    assert again == pytest.approx(noise, rel=0.01)


def test_the_honest_noise_for_the_papers_setting() -> None:
    noise = calibrate_noise(epsilon=0.5, delta=1e-4, sampling_rate=1 / 6000, steps=10_000)
    assert noise == pytest.approx(0.547, abs=0.003)


def test_calibration_refuses_a_delta_that_allows_publishing_examples() -> None:
    with pytest.raises(ConfigError, match=r"privacy.delta = 0.01.*protects nobody"):
        calibrate_noise(epsilon=0.5, delta=0.01, sampling_rate=1e-4, steps=10)


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
@pytest.mark.parametrize(("rate", "noise"), [(0.3, 12.0), (0.01, 1.5), (1.0, 40.0)])
def test_releases_within_is_the_last_that_fits(rate: float, noise: float, sampling: str) -> None:
    event = ReleaseEvent.of(sampling, rate, noise)
    spent = [(ReleaseEvent.of(sampling, rate, 1.1 * noise), 3)]
    fit = releases_within(event, 1.0, 1e-5, spent)
    assert fit > 0
    assert (
        composed_epsilon([*spent, (event, fit)], 1e-5)
        <= 1.0
        < composed_epsilon([*spent, (event, fit + 1)], 1e-5)
    )
    assert fit < releases_within(event, 1.0, 1e-5)


def test_no_release_fits_a_spent_budget() -> None:
    event = ReleaseEvent("poisson", 0.5, 1.0)
    assert releases_within(event, 0.5, 1e-5) == 0
    assert releases_within(event, 5.0, 1e-5, [(event, 1000)]) == 0
    assert releases_within(ReleaseEvent("poisson", 0.5, 0.0), 5.0, 1e-5) == 0


def test_a_calibrated_run_fits_its_budget() -> None:
    noise = calibrate_noise(epsilon=0.5, delta=1e-4, sampling_rate=0.3, steps=40)
    assert releases_within(ReleaseEvent("poisson", 0.3, noise), 0.5, 1e-4) >= 40


# Input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"privacy\.epsilon = 0\.0"),
        ({"epsilon": -1.0}, r"privacy\.epsilon = -1\.0"),
        ({"epsilon": math.inf}, r"privacy\.epsilon = inf"),
        ({"epsilon": math.nan}, r"privacy\.epsilon = nan"),
        ({"delta": 0.0}, r"privacy\.delta = 0\.0"),
        ({"delta": 1.0}, r"privacy\.delta = 1\.0"),
        ({"delta": math.nan}, r"privacy\.delta = nan"),
        ({"sampling_rate": 0.0}, r"sampling_rate = 0\.0"),
        ({"sampling_rate": 1.5}, r"sampling_rate = 1\.5.*expected_batch_size"),
        ({"steps": -1}, r"algorithm\.steps = -1"),
        ({"steps": 2.5}, r"algorithm\.steps = 2\.5"),
        ({"sampling": "shuffle"}, r"privacy\.sampling = 'shuffle'"),
    ],
)
def test_bad_input_names_the_field_and_the_value(change: dict[str, float], message: str) -> None:
    good = {"epsilon": 0.5, "delta": 1e-4, "sampling_rate": 0.1, "steps": 10}
    with pytest.raises(ConfigError, match=message):
        calibrate_noise(**{**good, **change})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf])
def test_bad_noise_is_refused(noise: float) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        ReleaseEvent("poisson", 0.1, noise)


def test_bad_paper_constants_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.c2 = 0"):
        paper_noise_multiplier(0.5, 1e-4, 10, 6000, c2=0)
    with pytest.raises(ConfigError, match="num_examples = 0"):
        paper_noise_multiplier(0.5, 1e-4, 10, 0)


def test_relations_are_named() -> None:
    assert (
        neighbouring_relation("poisson") == "add or remove one example, declared number unchanged"
    )
    assert neighbouring_relation("uniform") == "replace one example"


def test_eps_in_words() -> None:
    assert describe_epsilon(math.inf) == "infinite (no privacy)"
    assert describe_epsilon(51.2) == "51 (no meaningful privacy: above 50)"
    assert describe_epsilon(1.5155) == "1.52"
