"""Gaussian noise from a cryptographic stream, on a grid that defeats floating-point attacks.

Floating-point noise has gaps: the low bits of `sum + noise` can tell which sums are possible at all (Mironov, CCS 2012).
Here the clipped sum and the noise are both rounded to multiples of one public power of two before they are added, so the
set of values that can be released does not depend on the data:

    released = grid * (round(sum / grid) + round(scale * gauss / grid))

Rounding moves a sum of D coordinates by at most `sqrt(D) * grid` in all, as seen by two neighbouring data sets; the grid is
chosen so small that this is at most 2^-11 of the clip norm, another 2^-11 is kept for the rounding errors of the
float32 sum itself, and `scale` is raised by both, so the stated noise multiplier holds for the rounded mechanism.

The Gaussian values come from the Box-Muller transform of 53-bit radii (values reach 8.6 standard deviations; the mass
beyond is below 1e-17 per coordinate) and 32-bit angles: tens of thousands of bit patterns lead to every grid point in
reach, none to a gap.

Legend: D coordinates.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.randomness import PrivateRandomness

SENSITIVITY_SLACK: Final = 2.0**-10
_LOW_53_BITS: Final = (1 << 53) - 1
_CHUNK: Final = 1 << 14  # pairs per block: all scratch stays in the cache


def grid_size(clip_norm: float, dim: int) -> float:
    """Return the largest power of two with `sqrt(dim) * grid <= 2^-11 * clip_norm`."""
    return 2.0 ** math.floor(math.log2(clip_norm * SENSITIVITY_SLACK / 2 / math.sqrt(max(dim, 1))))


def add_noise(
    sum_D: Tensor, noise_multiplier: float, clip_norm: float, random: PrivateRandomness, step: int, row: int
) -> Tensor:
    """Return `sum + noise_multiplier * clip_norm * gauss` on the grid, as float32; `row` picks the node's secret key."""
    grid = grid_size(clip_norm, sum_D.numel())
    scale = noise_multiplier * clip_norm * (1 + SENSITIVITY_SLACK)
    noise_D = rounded_gauss(sum_D.numel(), scale / grid, random, step, row).to(sum_D.device)
    return sum_D.to(torch.float64).div_(grid).round_().add_(noise_D).mul_(grid).to(torch.float32)


def rounded_gauss(dim: int, scale: float, random: PrivateRandomness, step: int, row: int) -> Tensor:
    """Return `round(scale * gauss)` as whole numbers in float64 (D,), one per coordinate."""
    half = (dim + 1) // 2
    raw = random.row_bytes("noise", step, row, 12 * half)
    radius_bits = torch.from_numpy(raw[: 8 * half].view(np.int64))
    angle_bits = torch.from_numpy(raw[8 * half :].view(np.int32))
    out = torch.empty(2 * half, dtype=torch.float64)
    for start in range(0, half, _CHUNK):
        stop = min(start + _CHUNK, half)
        uniform = (radius_bits[start:stop] & _LOW_53_BITS).to(torch.float64).add_(0.5).mul_(2.0**-53)
        radius = uniform.log_().mul_(-2 * scale * scale).sqrt_()
        angle = angle_bits[start:stop].to(torch.float32).mul_(math.pi * 2.0**-31)
        torch.mul(radius, torch.cos(angle), out=out[start:stop])
        torch.mul(radius, angle.sin_(), out=out[half + start : half + stop])
    return out.round_()[:dim]
