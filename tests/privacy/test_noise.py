"""The noise is Gaussian to the tails, independent, on the grid, and as large as the mechanism states."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpcsgp.privacy.noise import SENSITIVITY_SLACK, add_noise, grid_size, rounded_gauss
from dpcsgp.randomness import PrivateRandomness

SCALE = 2.0**20


def draw(size: int, step: int = 0, node: int = 0, seed: int = 11) -> np.ndarray:
    random = PrivateRandomness.seeded(seed, [node])
    return rounded_gauss(size, SCALE, random, step, 0).numpy() / SCALE


def test_moments_and_kolmogorov_smirnov() -> None:
    values = draw(2_000_000)
    assert abs(values.mean()) < 4 / math.sqrt(len(values))
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / len(values))
    assert abs(stats.skew(values)) < 4 * math.sqrt(6 / len(values))
    assert abs(stats.kurtosis(values)) < 4 * math.sqrt(24 / len(values))
    assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.slow
def test_tails_to_five_sigma() -> None:
    counts = dict.fromkeys((3.0, 4.0, 4.5, 5.0), 0)
    total = 0
    for step in range(40):
        values = np.abs(draw(1_000_000, step))
        total += len(values)
        for bound in counts:
            counts[bound] += int((values > bound).sum())
    for bound, count in counts.items():
        expected = total * 2 * stats.norm.sf(bound)
        assert abs(count - expected) < 5 * math.sqrt(expected), (bound, count, expected)


def test_no_correlation_between_steps_nodes_and_coordinates() -> None:
    size = 200_000
    base = draw(size)
    others = [draw(size, step=1), draw(size, node=1), np.roll(base, 1), np.roll(base, size // 2)]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(size)
        assert abs(np.corrcoef(base**2, other**2)[0, 1]) < 5 / math.sqrt(size)


def test_the_released_values_lie_on_the_grid_whatever_the_sum() -> None:
    grid = grid_size(1.0, 1000)
    for scale in (1e-6, 1.0, 77.7):
        sums = scale * torch.randn(1000)
        released = add_noise(sums, 2.0, 1.0, PrivateRandomness.fresh([0]), 0, 0).double() / grid
        assert torch.equal(released, released.round())


def test_rounding_is_paid_for() -> None:
    dim, clip = 101_770, 1.5
    grid = grid_size(clip, dim)
    assert math.sqrt(dim) * grid <= SENSITIVITY_SLACK / 2 * clip
    released = add_noise(torch.zeros(dim), 3.0, clip, PrivateRandomness.fresh([0]), 0, 0)
    assert float(released.std()) >= 3.0 * clip * (1 - 5 / math.sqrt(2 * dim))
    assert float(released.std()) == pytest.approx(3.0 * clip * (1 + SENSITIVITY_SLACK), rel=0.01)


def test_odd_and_tiny_sizes() -> None:
    for size in (1, 2, 3, 17):
        assert draw(size).shape == (size,)
