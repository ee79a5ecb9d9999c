"""Dithered rounding follows its formula and is unbiased; signs carry the mean magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpcsgp.compression import Sign, StochasticQuantizer, parse_compressor
from dpcsgp.compression.packing import unpack
from dpcsgp.randomness import PublicRandomness


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("bucket", [None, 33])
def test_decoded_values_are_the_two_nearest_multiples(bits: int, bucket: int | None) -> None:
    dim, steps = 101, 2 ** (bits - 1)
    x = torch.randn(20, dim)
    random, compressor = PublicRandomness(1, range(20)), StochasticQuantizer(bits, bucket)
    decoded = compressor.decode(compressor.encode(x, random, 0), dim, random, 0).double()
    for start in range(0, dim, bucket or dim):
        part, result = (
            x[:, start : start + (bucket or dim)].double(),
            decoded[:, start : start + (bucket or dim)],
        )
        step = part.norm(dim=1, keepdim=True).float().double() / steps
        symbols = result / step
        assert torch.allclose(symbols, symbols.round(), atol=1e-5 * steps)
        saturated = part > (steps - 1) * step
        distance = ((result - part) / step).abs()
        assert (distance[~saturated] <= 1 + 1e-3).all()
        assert torch.allclose(
            symbols.round()[saturated], torch.tensor(steps - 1.0, dtype=torch.float64)
        )
        assert (symbols * part >= -1e-6).all()  # never the other sign


def test_wire_is_norms_then_packed_symbols() -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0, -2.0]])
    wire = StochasticQuantizer(8, 4).encode(x, PublicRandomness(1, [0]), 0).numpy()[0]
    assert wire[:8].view("<f4").tolist() == [5.0, 2.0]
    symbols = unpack(wire[8:], 5, 8).view(np.int8).tolist()
    assert symbols[0] in (76, 77)  # 128 * 3 / 5 = 76.8
    assert symbols[1] in (-102, -103)  # 128 * 4 / 5 = 102.4
    assert symbols[2:] == [0, 0, -128]  # exact multiples are never moved, and -2^(b-1) fits


def test_the_symbol_that_does_not_fit_saturates() -> None:
    x = torch.tensor([[1.0], [-1.0]])
    random, compressor = PublicRandomness(1, [0, 1]), StochasticQuantizer(2)
    assert compressor.decode(compressor.encode(x, random, 0), 1, random, 0).tolist() == [
        [0.5],
        [-1.0],
    ]


@pytest.mark.parametrize("spec", ["gsgd:2/16", "gsgd:4/64", "gsgd:8", "gsgd:16"])
def test_rounding_is_unbiased_coordinate_by_coordinate(spec: str) -> None:
    compressor, dim, num_draws = parse_compressor(spec), 64, 2000
    vector = torch.linspace(-1.0, 0.3, dim)  # no coordinate is large enough to saturate
    random = PublicRandomness(3, range(num_draws))
    result = compressor.decode(
        compressor.encode(vector.expand(num_draws, dim), random, 0), dim, random, 0
    ).double()
    scatter = result.std(dim=0) / math.sqrt(num_draws)
    assert ((result.mean(dim=0) - vector).abs() <= 5 * scatter + 1e-6).all()


def test_probabilities_far_below_one_in_256_are_kept() -> None:
    """A coordinate of 1e-4 steps is rounded up once in ten thousand draws: eight bits miss it."""
    dim, num_draws = 4000, 60
    x = torch.full((num_draws, dim), 1e-4 / 2)
    x[:, 0] = -1.0  # the norm, hence steps of one half
    random = PublicRandomness(3, range(num_draws))
    result = StochasticQuantizer(2).decode(
        StochasticQuantizer(2).encode(x, random, 0), dim, random, 0
    )[:, 1:]
    rounded_up = int((result > 0).sum())
    assert abs(rounded_up - 24) <= 5 * math.sqrt(24)


def test_dither_bound_is_the_papers() -> None:
    assert StochasticQuantizer(8).omega_squared(101_770) == pytest.approx(math.sqrt(101_770) / 128)
    assert StochasticQuantizer(8, 512).omega_squared(101_770) == pytest.approx(512 / 128**2)
    assert StochasticQuantizer(8, 512).omega_squared(10) == pytest.approx(10 / 128**2)
    assert StochasticQuantizer(8, 512).num_bytes(1025) == 1025 + 3 * 4
    assert StochasticQuantizer(3).num_bytes(1025) == math.ceil(3 * 1025 / 8) + 4
    assert StochasticQuantizer(3).paper_bits(1025) == 3 * 1025 + 32


def test_saturation_is_part_of_the_law() -> None:
    """One coordinate: the positive one always loses a step, the negative one never."""
    moments = StochasticQuantizer(2).moments(1)
    assert moments.gain == pytest.approx(0.75)
    assert moments.noise == pytest.approx(0.0625)


@pytest.mark.parametrize(("bits", "bucket"), [(2, 8), (3, 2), (4, 64), (8, 512), (16, 3)])
def test_buckets_long_and_short_share_one_law(bits: int, bucket: int) -> None:
    long, short = (
        StochasticQuantizer(bits, bucket).moments(10 * bucket),
        StochasticQuantizer(bits).moments(bucket),
    )
    assert long.gain == pytest.approx(short.gain)
    assert long.noise == pytest.approx(short.noise)


@pytest.mark.parametrize(
    ("bucket", "dim"), [(None, 100), (32, 100), (100, 100), (1000, 100), (1, 5)]
)
def test_sign_decodes_to_mean_magnitudes(bucket: int | None, dim: int) -> None:
    x = torch.randn(2, dim)
    random, compressor = PublicRandomness(1, [0, 1]), Sign(bucket)
    wire = compressor.encode(x, random, 0)
    decoded = compressor.decode(wire, dim, random, 0)
    width = min(bucket or dim, dim)
    for start in range(0, dim, width):
        part = x[:, start : start + width]
        expected = torch.where(part < 0, -1.0, 1.0) * part.abs().mean(dim=1, keepdim=True)
        assert torch.allclose(decoded[:, start : start + width], expected)
    assert wire.shape[1] == -(-dim // 8) + 4 * -(-dim // width)


def test_long_buckets_are_summed_like_short_ones() -> None:
    x = torch.randn(1, 100_003)
    random = PublicRandomness(1, [0])
    for bucket in (40_000, 32_768, 32_769):
        norms = (
            StochasticQuantizer(8, bucket)
            .encode(x, random, 0)
            .numpy()[0, : 4 * -(-100_003 // bucket)]
            .view("<f4")
        )
        expected = [part.double().norm().item() for part in x[0].split(bucket)]
        assert norms.tolist() == pytest.approx(expected, rel=1e-6)
