"""The rotation is orthogonal and makes every vector Gaussian, so all have the same error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from dpcsgp.compression import RotatedQuantizer
from dpcsgp.compression.error_laws import lloyd_max
from dpcsgp.compression.rotate import plan_rotation, rotate, rotate_back
from dpcsgp.kernels.hadamard import flip, hadamard
from dpcsgp.randomness import PublicRandomness

DIMS = [1, 31, 33, 128, 650, 3850, 5000, 33_000, 101_770, 1_100_000]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [1, 4])
def test_plans_cover_all_coordinates_with_little_waste(dim: int, bits: int) -> None:
    plan = plan_rotation(dim, bits)
    assert plan.width >= dim
    assert plan.length <= plan.rows <= plan.length * 4 / 3
    assert RotatedQuantizer(bits).num_bytes(dim) <= 1.09 * bits * dim / 8 + 4 + 4 * bits


def plain_butterflies(x: np.ndarray, half: int) -> np.ndarray:
    """Return the transform of the rows of (L, M), stage after stage: the protocol's arithmetic."""
    x = x.copy()
    while half < len(x):
        pairs = x.reshape(-1, 2, half, x.shape[1])
        upper = pairs[:, 0] + pairs[:, 1]
        pairs[:, 1] = upper - np.float32(2) * pairs[:, 1]
        pairs[:, 0] = upper
        half *= 2
    return x


@pytest.mark.parametrize("columns", [1, 3, 16, 25])
@pytest.mark.parametrize(
    ("length", "half"), [(32, 1), (64, 1), (64, 8), (4096, 32), (2, 1), (32, 32)]
)
def test_butterflies_agree_bit_for_bit_with_plain_ones(
    length: int, half: int, columns: int
) -> None:
    x = np.random.default_rng(0).standard_normal((length, columns)).astype(np.float32)
    found = x.copy()
    hadamard(found.reshape(-1), columns, half)
    assert np.array_equal(found, plain_butterflies(x, half))
    if half == 1:
        signs = np.array(
            [[(-1.0) ** (i & j).bit_count() for i in range(length)] for j in range(length)]
        )
        assert np.allclose(found, signs @ x, atol=1e-4 * length)


@pytest.mark.parametrize("dim", [1, 63, 64, 65, 1000])
def test_signs_are_the_bits_of_the_words(dim: int) -> None:
    words = np.random.default_rng(1).integers(0, 2**64, -(-dim // 64), dtype=np.uint64)
    x = np.arange(1, dim + 1, dtype=np.float32)
    found = x.copy()
    flip(found, words, 4)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:dim]
    assert np.array_equal(found, np.where(bits == 1, -x, x) / np.float32(2))


@pytest.mark.parametrize("dim", DIMS[:-1])
def test_rotation_preserves_norms_and_is_undone(dim: int) -> None:
    plan, random = plan_rotation(dim, 1), PublicRandomness(1, [2, 5])
    x = np.random.default_rng(0).standard_normal((2, plan.width)).astype(np.float32)
    rotated = x.copy()
    rotate(rotated, plan, random, round_=3)
    assert np.linalg.norm(rotated, axis=1) == pytest.approx(np.linalg.norm(x, axis=1), rel=1e-5)
    assert np.abs(rotated - x).max() > 0.1
    rotate_back(rotated, plan, random, round_=3)
    assert np.abs(rotated - x).max() < 1e-4


@pytest.mark.parametrize("dim", [256, 650, 3850])
def test_rotation_makes_sparse_vectors_gaussian(dim: int) -> None:
    plan, random = plan_rotation(dim, 1), PublicRandomness(1, range(64))
    x = np.zeros((64, plan.width), dtype=np.float32)
    x[:, [0, dim - 1]] = 1
    rotate(x, plan, random, round_=0)
    column = x.reshape(64, plan.rows, plan.columns)[:, :, 0].ravel()
    kurtosis = np.mean(column**4) / np.mean(column**2) ** 2
    assert kurtosis == pytest.approx(3, abs=0.35)  # one round alone gives 2 here


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [650, 1000, 4097])
def test_error_is_the_same_for_every_vector(bits: int, dim: int) -> None:
    compressor, num_draws = RotatedQuantizer(bits), 100
    random, moments = PublicRandomness(1, range(num_draws)), compressor.moments(dim)
    one_hots = [torch.eye(dim)[k] for k in (0, dim // 2, dim - 1)]
    for vector in [
        *one_hots,
        torch.ones(dim),
        torch.randn(dim),
        torch.randn(dim) ** 5,
        torch.arange(dim) * 1.0,
    ]:
        result = compressor.decode(
            compressor.encode(vector.expand(num_draws, dim), random, 0), dim, random, 0
        )
        ratios = (result - vector).square().sum(1) / vector.square().sum()
        expected = (1 - moments.gain) ** 2 + moments.noise
        assert (
            abs(ratios.mean().item() - expected)
            <= 4 * ratios.std().item() / num_draws**0.5 + 0.02 * expected
        )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 40, 650])
def test_no_message_is_longer_than_its_vector_allows(bits: int, dim: int) -> None:
    """|Q(v)|^2 = <Q(v), v>, hence |Q(v) - v| <= |v|, in every draw."""
    x, random, compressor = (
        torch.randn(50, dim),
        PublicRandomness(1, range(50)),
        RotatedQuantizer(bits),
    )
    result = compressor.decode(compressor.encode(x, random, 0), dim, random, 0)
    assert ((result - x).norm(dim=1) <= x.norm(dim=1) * (1 + 1e-5)).all()
    if compressor.num_bytes(dim) and plan_rotation(dim, bits).width == dim:
        assert torch.allclose(result.square().sum(1), (result * x).sum(1), rtol=1e-4)


def test_mean_is_a_multiple_of_the_vector() -> None:
    compressor, dim, num_draws = RotatedQuantizer(1), 96, 5000
    vector = torch.linspace(-1, 2, dim)
    random = PublicRandomness(1, range(num_draws))
    result = compressor.decode(
        compressor.encode(vector.expand(num_draws, dim), random, 0), dim, random, 0
    )
    mean, scatter = result.mean(0), result.std(0) / num_draws**0.5
    gain = float(mean @ vector / vector.square().sum())
    assert gain == pytest.approx(2 / math.pi, rel=0.02)
    assert ((mean - gain * vector).abs() <= 5 * scatter).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_lloyd_max_is_a_fixed_point_with_the_stated_gain(bits: int) -> None:
    quantiser = lloyd_max(bits)
    edges = [0.0, *quantiser.thresholds, np.inf]
    gain = 0.0
    for low, high, level in zip(edges[:-1], edges[1:], quantiser.levels, strict=True):
        mass = norm.cdf(high) - norm.cdf(low)
        assert quad(lambda z: z * norm.pdf(z), low, high)[0] == pytest.approx(
            level * mass, abs=1e-9
        )
        gain += 2 * mass * level**2
    assert gain == pytest.approx(quantiser.gain, abs=1e-12)
    middles = [
        (a + b) / 2 for a, b in zip(quantiser.levels[:-1], quantiser.levels[1:], strict=True)
    ]
    assert quantiser.thresholds == pytest.approx(middles, abs=1e-12)


def test_long_vectors_are_cut_into_panels() -> None:
    dim = 1_100_000
    x, random, compressor = torch.randn(1, dim), PublicRandomness(1, [3]), RotatedQuantizer(1)
    result = compressor.decode(compressor.encode(x, random, 0), dim, random, 0)
    assert float((result - x).square().sum() / x.square().sum()) == pytest.approx(
        1 - 2 / math.pi, rel=0.01
    )
