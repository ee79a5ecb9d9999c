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
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.privacy.box_muller import add_pairs
from dpcsgp.randomness import PrivateRandomness

_GRID_SLACK: Final = 2.0**-11


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
    grid = grid_size(clip_norm, sum_D.numel())
    scale = noise_multiplier * clip_norm * (1 + sensitivity_slack(batch_size))
    released = _noised(sum_D.detach().cpu().numpy(), scale / grid, grid, random, step, row, np.dtype(np.float32))
    return torch.from_numpy(released).to(sum_D.device)


def rounded_gauss(dim: int, scale: float, random: PrivateRandomness, step: int, row: int) -> Tensor:
    """Return `round(scale * gauss)` as whole numbers in float64 (D,): the noise that is added, before the grid."""
    zeros = np.zeros(dim, dtype=np.float32)
    return torch.from_numpy(_noised(zeros, scale, 1.0, random, step, row, np.dtype(np.float64)))


def _noised(
    sums_D: np.ndarray, scale: float, grid: float, random: PrivateRandomness, step: int, row: int, dtype: np.dtype[Any]
) -> np.ndarray:
    """Return `grid * (round(sum / grid) + round(scale * gauss))`; the second half of the coordinates gets the sines."""
    dim = sums_D.size
    half = (dim + 1) // 2
    words = random.row_bytes("noise", step, row, 16 * half).view(np.int64)
    sums = sums_D if dim == 2 * half else np.append(sums_D, np.float32(0))  # an odd one out has a partner all the same
    out = np.empty(2 * half, dtype=dtype)
    add_pairs(words[:half], words[half:], scale, sums[:half], sums[half:], grid, out[:half], out[half:])
    return out[:dim]
