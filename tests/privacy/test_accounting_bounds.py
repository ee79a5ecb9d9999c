"""Every answer of the accountant is an upper bound: against closed forms and a second accountant.

Closed forms have 40 digits, so a shortfall of a millionth of delta is seen. Where there are none
(small sampling rates, many releases) `reference_accounting.bracket` encloses the exact eps from
both sides.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from reference_accounting import Direction, bracket, exact_delta

from dpcsgp.privacy import pld, rare_losses
from dpcsgp.privacy.accounting import composed_epsilon, epsilon
from dpcsgp.privacy.events import NeighbouringRelation, ReleaseEvent
from dpcsgp.privacy.pld import (
    GridBound,
    LossGrid,
    LossPair,
    _poisson_grids,
    _replace_grid,
    compose,
    loss_distribution_epsilon,
    window_of,
)
from dpcsgp.privacy.rare_losses import Split, rare_grid, regrid, small_grid, split_epsilon

MILLIONTH = 1e-6


def grid_delta(grid: LossGrid, eps: float) -> float:
    """Return the delta that a distribution of losses promises at this eps."""
    losses = grid.interval * (grid.first + np.arange(len(grid.masses)))
    return grid.infinite + float(np.sum(grid.masses * np.maximum(-np.expm1(eps - losses), 0.0)))


def random_releases(seed: int, cases: int) -> list[tuple[float, float, float]]:
    """Return (noise, rate, delta) spread over the orders of magnitude that people ask for."""
    random = np.random.default_rng(seed)
    powers = random.uniform([-0.6, -6.0, -11.0], [3.0, 0.0, -2.0], (cases, 3))
    return [(float(noise), float(rate), float(delta)) for noise, rate, delta in 10.0**powers]


# Closed forms


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_one_release_never_costs_more_than_stated(sampling: str) -> None:
    directions: tuple[Direction, ...] = ("remove", "add") if sampling == "poisson" else ("replace",)
    used = []
    for noise, rate, delta in random_releases(0, 150):
        value = epsilon(
            noise_multiplier=noise, sampling_rate=rate, steps=1, delta=delta, sampling=sampling
        )
        effective = noise if sampling == "poisson" else noise / 2
        exact = max(exact_delta(effective, rate, value, direction) for direction in directions)
        assert exact <= delta, (noise, rate, delta)
        if value > 0:
            used.append(float(exact / delta))
    assert len(used) > 40
    assert min(used) > 0.98  # and hardly less


@pytest.mark.parametrize("count", [1, 2, 7, 100, 3000, 10**5, 10**6])
@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_releases_without_subsampling_never_cost_more_than_stated(
    count: int, sampling: str
) -> None:
    random = np.random.default_rng(count)
    for power, delta in zip(
        random.uniform(-0.5, 2.0, 8), 10.0 ** random.uniform(-8, -2, 8), strict=True
    ):
        # the noise of one release that says as much as all of them together
        single = float(10**power)
        noise = single * math.sqrt(count) * (1 if sampling == "poisson" else 2)
        value = epsilon(
            noise_multiplier=noise, sampling_rate=1.0, steps=count, delta=delta, sampling=sampling
        )
        exact = exact_delta(single, 1.0, value, "remove")
        assert exact <= delta, (noise, delta)
        assert value == 0 or exact > 0.98 * delta


# The parts: what does not fit onto a grid or into a window is booked, whatever its size


@pytest.mark.parametrize("tail", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize(
    ("noise", "rate"), [(0.4, 0.3), (1.0, 1.0), (1.0, 1e-3), (5.0, 0.1), (0.7, 1e-6)]
)
def test_a_grid_dominates_its_release_also_beyond_its_ends(
    noise: float, rate: float, tail: float
) -> None:
    pair = LossPair(noise, rate)
    interval = float(pair.loss(np.array(-1 - 6 * noise))) / 300
    remove, add = _poisson_grids(pair, interval, tail)
    (replace,) = _replace_grid(pair, interval, tail)
    named: list[tuple[Direction, LossGrid]] = [
        ("remove", remove),
        ("add", add),
        ("replace", replace),
    ]
    for direction, grid in named:
        assert grid.masses.sum() + grid.infinite == pytest.approx(1, abs=1e-12)
        top = (grid.first + len(grid.masses)) * interval
        for eps in np.linspace(0, max(2 * top, interval), 41):
            exact = float(exact_delta(noise, rate, eps, direction))
            assert grid_delta(grid, eps) >= (1 - MILLIONTH) * exact - 1e-15, (direction, eps)


@pytest.mark.parametrize("tail", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize(("noise", "count"), [(3.0, 9), (20.0, 400), (30.0, 2000)])
def test_awindow_of_dominates_the_sum_also_beyond_its_ends(
    noise: float, count: int, tail: float
) -> None:
    pair = LossPair(noise, 1.0)
    grids = _poisson_grids(pair, 1 / 64 / noise, 1e-14)
    for grid in (*grids, *_replace_grid(pair, 1 / 64 / noise, 1e-14)):
        window = window_of([grid], [count], tail / 2)
        composed = compose([grid], [count], window, tail)
        beyond = 0
        for eps in np.linspace(0, 1.5 * window[1] * grid.interval, 41):
            exact = float(exact_delta(noise / math.sqrt(count), 1.0, eps, "remove"))
            assert grid_delta(composed, eps) >= (1 - MILLIONTH) * exact - 1e-13, eps
            beyond += eps > window[1] * grid.interval and exact > 1e-3 * tail
        assert beyond  # the window does leave something out


@pytest.mark.parametrize("tail", [1e-2, 1e-6])
@pytest.mark.parametrize("cut", [3, 10, 40])
@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.05), (1.0, 0.1), (2.0, 1e-3), (0.7, 1e-6)])
def test_small_and_rare_losses_together_dominate_the_release(
    noise: float, rate: float, cut: int, tail: float
) -> None:
    pair = LossPair(noise, rate)
    # the cut lies within two deviations
    interval = float(pair.loss(np.array(-0.5 - 2 * noise))) / 40
    split = Split(pair, interval, cut)
    for direction in ("remove", "add", "replace"):
        rare = rare_grid(split, interval / 4, tail, direction)
        small = small_grid(split, direction)
        for part in (rare, small):
            assert part.masses.min() >= 0
            assert part.masses.sum() + part.infinite == pytest.approx(1, abs=1e-12)
        parts = [rare, regrid(small, interval / 4)]
        composed = compose(parts, [1, 1], window_of(parts, [1, 1], 1e-13), 2e-13)
        for eps in np.linspace(0, 2 * interval * len(rare.masses) / 4, 60):
            exact = float(exact_delta(noise, rate, eps, direction))
            assert grid_delta(composed, eps) >= (1 - MILLIONTH) * exact - 1e-14, (direction, eps)


def test_another_grid_dominates_and_keeps_all_mass() -> None:
    (fine,) = _replace_grid(LossPair(1.5, 0.3), 0.01, 1e-9)
    for interval in (0.003, 0.017, 0.4, 5.0):
        coarse = regrid(fine, interval)
        assert coarse.masses.sum() == pytest.approx(fine.masses.sum(), abs=1e-14)
        for eps in np.linspace(0, 3, 50):
            assert grid_delta(coarse, eps) >= grid_delta(fine, eps) - 1e-15


@pytest.mark.parametrize("module", [pld, rare_losses])
def test_what_every_window_leaves_out_is_booked(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides, since what lies below a window comes back on top of it."""
    left_out: list[float] = []

    def watched_window(grids: list[LossGrid], counts: list[int], tail: float) -> tuple[int, int]:
        left_out.append(2 * tail)
        return window_of(grids, counts, tail)

    def watched_sum(
        grids: list[LossGrid], counts: list[int], window: tuple[int, int], tail: float
    ) -> LossGrid:
        assert tail >= left_out[-1] > 0
        booked.append(tail)
        return compose(grids, counts, window, tail)

    booked: list[float] = []
    monkeypatch.setattr(module, "window_of", watched_window)
    monkeypatch.setattr(module, "compose", watched_sum)
    method = split_epsilon if module is rare_losses else loss_distribution_epsilon
    for sampling, relation in (
        ("poisson", NeighbouringRelation.ADD_OR_REMOVE_ONE),
        ("uniform", NeighbouringRelation.REPLACE_ONE),
    ):
        event = ReleaseEvent.of(sampling, 1e-3, 1.5)
        assert math.isfinite(method([(event, 1000)], 1e-6, relation).epsilon)
    assert len(booked) == (6 if module is rare_losses else 3)


# Directions


def test_what_holds_must_hold_in_every_direction() -> None:
    assert GridBound((1.0, 2.0)).epsilon == 2
    assert GridBound((2.0, 1.0)).epsilon == 2


def test_adding_is_accounted_for_and_never_costs_more_than_removing() -> None:
    random = np.random.default_rng(3)
    for case, (noise, rate, delta) in enumerate(random_releases(3, 100)):
        releases = [(ReleaseEvent("poisson", rate, noise), int(10 ** random.uniform(0, 4)))]
        for method in (
            (loss_distribution_epsilon, split_epsilon)
            if case < 10
            else (loss_distribution_epsilon,)
        ):
            bound = method(releases, delta, NeighbouringRelation.ADD_OR_REMOVE_ONE)
            if math.isinf(bound.epsilon):
                continue
            removed, added = bound.directions
            assert added <= 1.002 * removed + 1e-9, (method.__name__, releases, delta)


# Small rates and many releases: between the bounds of the second accountant

SMALL_RATES = [
    (1.0, 1e-3, 10**4, 1e-5),
    (1.0, 1e-3, 10**6, 1e-5),
    (100.0, 1e-3, 10**6, 1e-6),
    (0.3, 1e-3, 10**5, 1e-8),
    (0.4, 1e-4, 10**4, 1e-6),
    (0.5, 1e-4, 10**6, 1e-5),
    (5.0, 1e-4, 10**6, 1e-7),
    (0.8, 1e-5, 10**5, 1e-6),
    (0.5, 1e-5, 10**6, 1e-6),
    (0.3, 1e-5, 10**5, 1e-7),
    (2.0, 1e-5, 10**6, 1e-8),
    (0.7, 1e-6, 10**5, 1e-8),
    (0.5, 1e-6, 10**6, 1e-6),
    (1.0, 1e-6, 10**6, 1e-6),
    (0.1, 1e-6, 10**6, 1e-6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "count", "delta"), SMALL_RATES)
def test_small_rates_lie_above_an_optimistic_and_close_to_a_pessimistic_estimate(
    noise: float, rate: float, count: int, delta: float
) -> None:
    value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=count, delta=delta)
    split = split_epsilon(
        [(ReleaseEvent("poisson", rate, noise), count)],
        delta,
        NeighbouringRelation.ADD_OR_REMOVE_ONE,
    )
    (low, high), (low_add, high_add) = (
        bracket(noise, rate, count, delta, way) for way in ("remove", "add")
    )
    assert max(low, low_add) <= min(value, split.epsilon)
    assert value <= 1.01 * max(high, high_add)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "count", "delta"), SMALL_RATES)
def test_small_uniform_rates_lie_above_an_attack_and_close_to_a_pessimistic_estimate(
    noise: float, rate: float, count: int, delta: float
) -> None:
    value = epsilon(
        noise_multiplier=noise, sampling_rate=rate, steps=count, delta=delta, sampling="uniform"
    )
    # all others equal the example's old value
    attack, _ = bracket(noise / 2, rate, count, delta, "remove")
    low, high = bracket(noise / 2, rate, count, delta, "replace")
    split = split_epsilon(
        [(ReleaseEvent("uniform", rate, noise), count)], delta, NeighbouringRelation.REPLACE_ONE
    )
    assert max(attack, low) <= min(value, split.epsilon)
    assert value <= 1.01 * high


def test_small_rates_of_two_kinds_compose_like_one() -> None:
    kinds = [(ReleaseEvent("poisson", 1e-6, noise), 50_000) for noise in (0.7, 0.7 * (1 + 1e-12))]
    together = split_epsilon(kinds, 1e-8, NeighbouringRelation.ADD_OR_REMOVE_ONE).epsilon
    assert bracket(0.7, 1e-6, 100_000, 1e-8, "remove")[0] <= together
    assert together == pytest.approx(composed_epsilon([(kinds[0][0], 100_000)], 1e-8), rel=5e-3)
