"""The predicted variance of dithered rounding agrees with simulation, saturation included."""

from __future__ import annotations

import numpy as np
import pytest

from dpcsgp.compression.error_laws import dither_moments


@pytest.mark.parametrize(
    ("bits", "bucket"), [(2, 1), (2, 2), (2, 8), (3, 3), (4, 64), (8, 512), (2, 4000), (16, 5)]
)
def test_dither_moments_agree_with_simulation(bits: int, bucket: int) -> None:
    rng, steps, num_draws = (
        np.random.default_rng(bits * 1000 + bucket),
        2 ** (bits - 1),
        2_000_000 // max(bucket, 40),
    )
    x = rng.standard_normal((num_draws, bucket))
    ratio = x / np.linalg.norm(x, axis=1, keepdims=True)
    symbols = np.sign(ratio) * np.floor(steps * np.abs(ratio) + rng.random(ratio.shape))
    rounded = np.minimum(symbols, steps - 1) / steps
    for predicted, samples in zip(
        dither_moments(bits, bucket),
        ((rounded * ratio).sum(axis=1), (rounded**2).sum(axis=1)),
        strict=True,
    ):
        assert abs(samples.mean() - predicted) <= 4.5 * samples.std() / np.sqrt(num_draws) + 1e-12


def test_fine_rounding_has_the_textbook_variance() -> None:
    """Far from saturation the mean of f (1 - f) is one sixth of a squared step."""
    gain, square = dither_moments(16, 1000)
    assert gain == pytest.approx(1, abs=1e-12)
    assert square - gain**2 == pytest.approx(1000 / 6 / 4**15, rel=1e-3)
