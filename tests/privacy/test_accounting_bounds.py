"""Every answer of the accountant is an upper bound: held against closed forms, and against a second accountant.

Closed forms have 40 digits, so a shortfall of a millionth of delta is seen. Where there are none (small sampling rates,
many releases) `reference_accounting.bracket` encloses the exact eps from both sides.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from reference_accounting import Direction, bracket, exact_delta

from dpcsgp.privacy.accounting import epsilon
from dpcsgp.privacy.bounds import (
    LossGrid,
    LossPair,
    compose,
    _poisson_grids,
    _replace_grid,
    window_of,
)

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
        value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=1, delta=delta, sampling=sampling)
        effective = noise if sampling == "poisson" else noise / 2
        exact = max(exact_delta(effective, rate, value, direction) for direction in directions)
        assert exact <= delta, (noise, rate, delta)
        if value > 0:
            used.append(float(exact / delta))
    assert len(used) > 40
    assert min(used) > 0.98  # and hardly less


@pytest.mark.parametrize("count", [1, 2, 7, 100, 3000, 10**5, 10**6])
@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_releases_without_subsampling_never_cost_more_than_stated(count: int, sampling: str) -> None:
    random = np.random.default_rng(count)
    for power, delta in zip(random.uniform(-0.5, 2.0, 8), 10.0 ** random.uniform(-8, -2, 8), strict=True):
        single = float(10**power)  # the noise of one release that says as much as all of them together
        noise = single * math.sqrt(count) * (1 if sampling == "poisson" else 2)
        value = epsilon(noise_multiplier=noise, sampling_rate=1.0, steps=count, delta=delta, sampling=sampling)
        exact = exact_delta(single, 1.0, value, "remove")
        assert exact <= delta, (noise, delta)
        assert value == 0 or exact > 0.98 * delta


# The parts: what does not fit onto a grid or into a window is booked, whatever its size


@pytest.mark.parametrize("tail", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize(("noise", "rate"), [(0.4, 0.3), (1.0, 1.0), (1.0, 1e-3), (5.0, 0.1), (0.7, 1e-6)])
def test_a_grid_dominates_its_release_also_beyond_its_ends(noise: float, rate: float, tail: float) -> None:
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
def test_awindow_of_dominates_the_sum_also_beyond_its_ends(noise: float, count: int, tail: float) -> None:
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


@pytest.mark.parametrize(("noise", "rate", "count", "delta"), SMALL_RATES)
def test_small_rates_lie_above_an_optimistic_and_close_to_a_pessimistic_estimate(
    noise: float, rate: float, count: int, delta: float
) -> None:
    value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=count, delta=delta)
    (low, high), (low_add, high_add) = (bracket(noise, rate, count, delta, way) for way in ("remove", "add"))
    assert max(low, low_add) <= value <= 1.01 * max(high, high_add)


@pytest.mark.parametrize(("noise", "rate", "count", "delta"), SMALL_RATES)
def test_small_uniform_rates_lie_above_an_attack_and_close_to_a_pessimistic_estimate(
    noise: float, rate: float, count: int, delta: float
) -> None:
    value = epsilon(noise_multiplier=noise, sampling_rate=rate, steps=count, delta=delta, sampling="uniform")
    attack, _ = bracket(noise / 2, rate, count, delta, "remove")  # all others equal the example's old value
    low, high = bracket(noise / 2, rate, count, delta, "replace")
    assert max(attack, low) <= value <= 1.01 * high
