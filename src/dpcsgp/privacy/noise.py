"""Gaussian noise from a cryptographic stream, on a grid that defeats floating-point attacks.

Floating-point noise has gaps: the low bits of `sum + noise` can tell which sums are possible at all (Mironov, CCS 2012).
Here the clipped sum and the noise are both rounded to multiples of one public power of two before they are added, so the
set of values that can be released does not depend on the data:

    released = grid * (round(sum / grid) + round(scale * gauss / grid))

Rounding moves a sum of D coordinates by at most `sqrt(D) * grid` in all, as seen by two neighbouring data sets; the grid is
chosen so small that this is at most 2^-11 of the clip norm. As much again, or 2^-22 per example of the batch if that is
more, is kept for the rounding errors of the float32 sum itself (largest seen: 2^-23 per example), and `scale` is raised by
both, so the stated noise multiplier holds for the rounded mechanism.

The Gaussian values come from the Box-Muller transform of 53-bit radii (values reach 8.6 standard deviations; the mass
beyond is below 1e-17 per coordinate) and 64-bit angles in double precision. Both matter: the two values of a pair share
radius and angle, so with angles of 24 or 32 bits they would lie on so few rays that most pairs of grid points could not come
out, and an attacker who tries out sums would see which one leaves only possible pairs. Angles here are 2^-53 of a turn
apart or nearer, below one grid point for radii up to 10^15; that every grid point is reached was not proved.

Legend: D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.randomness import PrivateRandomness

_GRID_SLACK: Final = 2.0**-11
_LOW_53_BITS: Final = (1 << 53) - 1
# Pairs per block: long enough to hide the cost of a call.
_CHUNK: Final = 1 << 15


def grid_size(clip_norm: float, dim: int) -> float:
    """Return the largest power of two with `sqrt(dim) * grid <= 2^-11 * clip_norm`."""
    return 2.0 ** math.floor(math.log2(clip_norm * _GRID_SLACK / math.sqrt(max(dim, 1))))


def sensitivity_slack(batch_size: int) -> float:
    """Return by how much, as a share of the clip norm, rounding may lengthen the difference of two neighbouring sums."""
    return _GRID_SLACK + max(2.0**-11, batch_size * 2.0**-22)


def add_noise(
    sum_D: Tensor,
    noise_multiplier: float,
    clip_norm: float,
    random: PrivateRandomness,
    step: int,
    row: int,
    batch_size: int = 1,
) -> Tensor:
    """Return `sum + noise_multiplier * clip_norm * gauss` on the grid, as float32; `row` picks the node's secret key.

    `batch_size` is the expected, public number of examples in the sum.
    """
    dim = sum_D.numel()
    grid = grid_size(clip_norm, dim)
    scale = noise_multiplier * clip_norm * (1 + sensitivity_slack(batch_size))
    sums = sum_D.detach().cpu().numpy()
    released = np.empty(dim, dtype=np.float32)
    exact = 2.0**-100 < grid < 2.0**100  # then dividing by a power of two and rounding are exact in float32 too
    scratch = np.empty(_CHUNK, dtype=np.float32 if exact else np.float64)
    for part, noise in _rounded_parts(dim, scale / grid, random, step, row):
        whole = np.multiply(sums[part], 1 / grid, out=scratch[: len(noise)], dtype=scratch.dtype)
        noise += np.rint(whole, out=whole)
        np.multiply(noise, grid, out=released[part], casting="same_kind")
    return torch.from_numpy(released).to(sum_D.device)


def rounded_gauss(dim: int, scale: float, random: PrivateRandomness, step: int, row: int) -> Tensor:
    """Return `round(scale * gauss)` as whole numbers in float64 (D,), one per coordinate."""
    out = np.empty(dim, dtype=np.float64)
    for part, noise in _rounded_parts(dim, scale, random, step, row):
        out[part] = noise
    return torch.from_numpy(out)


def _rounded_parts(
    dim: int, scale: float, random: PrivateRandomness, step: int, row: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield `round(scale * gauss)` part by part: which coordinates, and their values (until the next part is asked for).

    A pair of values is `radius * cos` and `radius * sin`; the second half of the coordinates gets the sines.
    """
    half = (dim + 1) // 2
    raw = random.row_bytes("noise", step, row, 16 * half)
    radius_bits, angle_bits = raw[: 8 * half].view(np.int64), raw[8 * half :].view(np.int64)
    bits, radii, values = np.empty(_CHUNK, dtype=np.int64), np.empty(_CHUNK), np.empty(_CHUNK)
    angles, waves = np.empty(_CHUNK), np.empty(_CHUNK)
    for start in range(0, half, _CHUNK):
        size = min(_CHUNK, half - start)
        radius = _radii(radius_bits[start : start + size], scale, bits[:size], radii[:size])
        angle = torch.from_numpy(np.multiply(angle_bits[start : start + size], math.pi * 2.0**-63, out=angles[:size]))
        for wave, first, last in ((torch.cos, start, half), (torch.sin, half + start, dim)):
            wave(angle, out=torch.from_numpy(waves[:size]))  # faster than numpy's
            value = np.multiply(radius, waves[:size], out=values[:size])
            stop = min(first + size, last)
            yield slice(first, stop), np.rint(value, out=value)[: stop - first]


def _radii(words: np.ndarray, scale: float, bits: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return `scale * sqrt(-2 log u)` in `out`, where u = (the word's low 53 bits + 1/2) / 2^53."""
    np.bitwise_and(words, _LOW_53_BITS, out=bits)
    np.add(bits, 0.5, out=out)
    out *= 2.0**-53
    logarithm = torch.from_numpy(out)
    logarithm.log_()  # torch's is one and a half times as fast as numpy's
    out *= -2 * scale * scale
    return np.sqrt(out, out=out)
