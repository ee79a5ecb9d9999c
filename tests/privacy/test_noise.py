"""The noise is Gaussian to the tails, independent, on the grid, and as large as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpcsgp.kernels.box_muller import add_pairs
from dpcsgp.privacy.noise import SENSITIVITY_SLACK, add_noise_, add_rounded_, grid_size
from dpcsgp.privacy.passes import SUM_SLACK
from dpcsgp.randomness import PrivateRandomness

SCALE = 2.0**20


def rounded_gauss(
    dim: int, scale: float, random: PrivateRandomness, step: int, row: int
) -> torch.Tensor:
    """Return the noise alone, in units of the grid."""
    noise_D = np.zeros(dim)
    add_rounded_(noise_D, scale, 1.0, random, step, row)
    return torch.from_numpy(noise_D)


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
        add_noise_(sums, 2.0, 1.0, PrivateRandomness.fresh([0]), 0, 0)
        released = sums.double() / grid
        assert torch.equal(released, released.round())


def test_rounding_is_paid_for() -> None:
    dim, clip = 101_770, 1.5
    grid = grid_size(clip, dim)
    assert math.sqrt(dim) * grid <= (SENSITIVITY_SLACK - SUM_SLACK) * clip
    released = torch.zeros(dim)
    add_noise_(released, 3.0, clip, PrivateRandomness.fresh([0]), 0, 0)
    assert float(released.std()) >= 3.0 * clip * (1 - 5 / math.sqrt(2 * dim))
    assert float(released.std()) == pytest.approx(3.0 * clip * (1 + SENSITIVITY_SLACK), rel=0.01)


def test_a_noise_half_a_percent_short_is_seen() -> None:
    released = torch.zeros(2_000_001)
    add_noise_(released, 1.25, 0.75, PrivateRandomness.fresh([0]), 0, 0)
    stated = 1.25 * 0.75 * (1 + SENSITIVITY_SLACK)
    assert (
        abs(float(released.double().std()) / stated - 1) < 5 / math.sqrt(2 * len(released)) < 0.005
    )


@pytest.mark.parametrize("dim", [1, 2, 1000, 101_770, 10**7])
@pytest.mark.parametrize("clip", [0.3, 1.0, 1.9])
def test_the_noise_covers_the_longest_difference_of_two_sums(dim: int, clip: float) -> None:
    """A row moves a sum by the clip norm and what rounding adds.

    The grid moves every coordinate by one point more.
    """
    longest = clip * (1 + SUM_SLACK) + math.sqrt(dim) * grid_size(clip, dim)
    assert longest <= clip * (1 + SENSITIVITY_SLACK)


def test_odd_and_tiny_sizes() -> None:
    for size in (1, 2, 3, 17):
        assert draw(size).shape == (size,)


def test_pairs_are_not_confined_to_few_rays() -> None:
    """The two values of a pair share an angle.

    With angles of 24 bits, most pairs of grid points could never come out.

    At a huge scale the pair gives its angle away to 1e-12. Angles that came from a coarse grid
    would all lie on it; fine ones lie that near to a 32-bit or float32 grid in fewer than one case
    in a hundred.
    """
    dim = 100_000
    values = rounded_gauss(dim, 1e14, PrivateRandomness.fresh([0]), 0, 0).numpy()
    angles = np.arctan2(values[dim // 2 :], values[: dim // 2])
    turns = angles / (2 * np.pi) * 2.0**32
    assert np.mean(np.abs(turns - np.rint(turns)) < 1e-3) < 0.01
    wide = angles[np.abs(angles) > 1]
    assert np.mean(np.abs(wide - wide.astype(np.float32)) < 1e-10) < 0.01


@pytest.mark.slow
def test_the_lattice_of_possible_pairs_does_not_give_the_sum_away() -> None:
    """An attacker tries both sums and learns nothing.

    He counts pairs whose angle is no float32: equally many under both.
    """
    dim, sigma, grid = 60_000, 11.2, grid_size(1.0, 60_000)
    shift = np.rint(1 / np.sqrt(dim) / grid)
    counts = []
    for truth in (0.0, shift):
        for trial in range(3):
            released = (
                truth
                + rounded_gauss(dim, sigma / grid, PrivateRandomness.fresh([0]), trial, 0).numpy()
            )
            counts.append([_off_the_float32_rays(released - guess) for guess in (0.0, shift)])
    assert all(abs(one - other) < 5 * math.sqrt(one + other) for one, other in counts), counts


def _off_the_float32_rays(pairs: np.ndarray) -> int:
    """Count the pairs that no float32 angle can reach, rounding of the pair allowed for."""
    half = len(pairs) // 2
    cosines, sines = pairs[:half], pairs[half:]
    angles, radii = np.arctan2(sines, cosines), np.hypot(cosines, sines)
    return int(np.sum(np.abs(angles - angles.astype(np.float32)) > 1.0 / radii))


def test_noise_does_not_depend_on_the_number_of_threads() -> None:
    """Simulator and real processes have different ones, and must agree bit for bit."""
    random, before = PrivateRandomness.seeded(1, [0]), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(rounded_gauss(250_001, 1e9, random, 0, 0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def box_muller(radius_words: np.ndarray, angle_words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the transform by numpy's functions, in extended precision."""
    u = (
        (radius_words & (2**53 - 1)).astype(np.float64) + 0.5
    ) / 2.0**53  # rounded to a double, as stated
    radius = np.sqrt(-2 * np.log(u.astype(np.longdouble)))
    angle = angle_words.astype(np.longdouble) * (
        np.longdouble(2) * np.arccos(np.longdouble(0)) / np.longdouble(2) ** 63
    )
    return radius * np.cos(angle), radius * np.sin(angle)


def test_compiled_logarithm_and_waves_are_accurate() -> None:
    """To two last places of the radius, also at the ends of ranges and of quarter turns."""
    ends = np.array(
        [0, 1, 2**52, 2**53 - 2, 2**53 - 1, -1, 2**53, 6369051672525772], dtype=np.int64
    )
    quarters = np.array(
        [k * 2**61 + off for k in range(-4, 4) for off in (-1, 0, 1) if k > -4 or off >= 0],
        dtype=np.int64,
    )
    random = np.random.default_rng(3)
    words = random.integers(-(2**63), 2**63 - 1, (2, 200_000))
    radii = np.concatenate([np.repeat(ends, len(quarters)), words[0]])
    angles = np.concatenate([np.tile(quarters, len(ends)), words[1]])
    scale = 2.0**51  # rounding to whole numbers then takes nothing away
    found = np.zeros((2, len(radii)))
    add_pairs(radii, angles, scale, 1.0, *found)
    exact = box_muller(radii, angles)
    allowed = 0.5 + 2 * 2.0**-52 * scale * np.hypot(*exact)
    for values, truth in zip(found, exact, strict=True):
        assert (np.abs(values - scale * truth) <= allowed).all()


@pytest.mark.parametrize("dim", [1, 2, 17, 1000])
def test_every_coordinate_gets_its_own_words_of_the_secret_stream(dim: int) -> None:
    """Sum, scale and grid as stated, on one row among others.

    The noise is that of numpy's functions on the same bytes.
    """
    step, row, clip, multiplier = 4, 1, 1.5, 0.7
    random, sums = PrivateRandomness.seeded(1, [3, 8]), torch.randn(5, dim)
    before, half, grid = sums.clone(), (dim + 1) // 2, grid_size(clip, dim)
    add_noise_(sums[2], multiplier, clip, random, step, row)
    words = random.row_bytes("noise", step, row, 16 * half).view(np.int64)
    gauss = np.concatenate(box_muller(words[:half], words[half:]))[:dim]
    slack = 2.0**-11 + 0.0222
    noise = np.rint((multiplier * clip * (1 + slack) / grid * gauss).astype(np.float64))
    expected = grid * (np.rint(before[2].numpy().astype(np.float64) / grid) + noise)
    assert np.array_equal(sums[2].numpy(), expected.astype(np.float32))
    assert torch.equal(sums[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_sums_in_pieces_are_noised_as_well() -> None:
    sums = torch.randn(100, 2)
    whole = sums[:, 1].clone()
    for each in (sums[:, 1], whole):
        add_noise_(each, 1.0, 1.0, PrivateRandomness.seeded(1, [0]), 4, 0)
    assert torch.equal(sums[:, 1], whole)


def test_no_release_is_a_negative_zero() -> None:
    """A sum just below zero could make one, zero could not: it would tell them apart."""
    sums = torch.full((200_000,), -1e-12)
    add_noise_(sums, 1e-6, 1.0, PrivateRandomness.fresh([0]), 0, 0)
    assert (sums == 0).any()
    assert not torch.signbit(sums[sums == 0]).any()
