"""Gaussian noise from a cryptographic stream, on a grid that defeats floating-point attacks.

Floating-point noise has gaps: the low bits of `sum + noise` can tell which sums are possible at all
(Mironov, CCS 2012). Here the clipped sum and the noise are both rounded to multiples of one public
power of two before they are added, so the set of values that can be released does not depend on the
data:

    released = grid * (round(sum / grid) + round(scale * gauss / grid))

Rounding moves a sum of D coordinates by at most `sqrt(D) * grid` in all, as seen by two
neighbouring data sets; the grid is chosen so small that this is at most 2^-11 of the clip norm.
`passes.SUM_SLACK` bounds what rounding does to the clipped sum itself, whatever the data and
however many were drawn. `scale` is raised by both, so the stated noise multiplier holds for the
rounded mechanism.

The Gaussian values come from the Box-Muller transform of 53-bit radii (values reach 8.6 standard
deviations; the mass beyond is below 1e-17 per coordinate) and 64-bit angles in double precision.
Both matter: the two values of a pair share radius and angle, so with angles of 24 or 32 bits they
would lie on so few rays that most pairs of grid points could not come out, and an attacker who
tries out sums would see which one leaves only possible pairs. Angles here are 2^-53 of a turn apart
or nearer, below one grid point for radii up to 10^15; that every grid point is reached was not
proved.

Legend: D coordinates.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from torch import Tensor

from dpcsgp.kernels.box_muller import add_pairs
from dpcsgp.privacy.passes import SUM_SLACK
from dpcsgp.randomness import PrivateRandomness

_GRID_SLACK: Final = 2.0**-11
# by what share rounding may lengthen the difference of two sums
SENSITIVITY_SLACK: Final = _GRID_SLACK + SUM_SLACK


def grid_size(clip_norm: float, dim: int) -> float:
    """Return the largest power of two with `sqrt(dim) * grid <= 2^-11 * clip_norm`."""
    return 2.0 ** math.floor(math.log2(clip_norm * _GRID_SLACK / math.sqrt(max(dim, 1))))


def add_noise_(
    sum_D: Tensor,
    noise_multiplier: float,
    clip_norm: float,
    random: PrivateRandomness,
    step: int,
    row: int,
) -> None:
    """Make `sum + noise_multiplier * clip_norm * gauss` on the grid, in place.

    `row` picks the node's secret key, `step` its stream.
    """
    grid = grid_size(clip_norm, sum_D.numel())
    # Rounding may lengthen the difference of two sums by this share: the noise grows with it.
    scale = noise_multiplier * clip_norm * (1 + SENSITIVITY_SLACK)
    here_D = sum_D.detach().cpu().contiguous()
    add_rounded_(here_D.numpy(), scale / grid, grid, random, step, row)
    if here_D.data_ptr() != sum_D.data_ptr():  # it was on another device, or in pieces
        sum_D.copy_(here_D)


def add_rounded_(
    sums_D: np.ndarray, scale: float, grid: float, random: PrivateRandomness, step: int, row: int
) -> None:
    """Make `grid * (round(sum / grid) + round(scale * gauss))` in place; scale in grid units."""
    # Box-Muller pairs: the first half of the sums gets the cosines, the second the sines. Not
    # neighbours, so that both halves are contiguous.
    half = (sums_D.size + 1) // 2
    words = random.row_bytes("noise", step, row, 16 * half).view(np.int64)
    radii, angles, first, second = words[:half], words[half:], sums_D[:half], sums_D[half:]
    add_pairs(radii, angles, scale, grid, first, second)
    if len(second) < half:  # an odd one out: its sine goes to nobody
        add_pairs(radii[-1:], angles[-1:], scale, grid, first[-1:], np.zeros_like(first[-1:]))
