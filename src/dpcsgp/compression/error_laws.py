"""Exact error laws of scalar quantisers on Gaussian-shaped vectors, by closed forms and quadrature.

Reference: S. Lloyd, Least squares quantization in PCM, IEEE Trans. Inf. Theory 28(2), 1982; J. Max,
Quantizing for minimum distortion, IRE Trans. Inf. Theory 6(1), 1960.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import gammaln, ndtr


@dataclass(frozen=True)
class ScalarLevels:
    """Hold a symmetric quantiser of N(0, 1).

    A magnitude |z| in cell k, between two thresholds, becomes levels[k];
    gain = E[z q(z)] = E[q(z)^2] = 1 - E[(q(z) - z)^2].
    """

    thresholds: tuple[float, ...]
    levels: tuple[float, ...]
    gain: float


@cache
def lloyd_max(bits: int) -> ScalarLevels:
    """Find the 2^bits levels with the smallest mean squared error for a standard normal number.

    At the optimum each threshold is midway between two levels (nearest neighbour) and each level is
    the mean of its cell (centroid); Lloyd's iteration alternates the two.

    >>> round(lloyd_max(1).levels[0] ** 2, 6), round(lloyd_max(1).gain, 6)  # 2 / pi
    (0.63662, 0.63662)
    >>> [round(1 - lloyd_max(bits).gain, 6) for bits in (1, 2, 3, 4)]
    [0.36338, 0.117482, 0.034548, 0.009501]
    """
    levels = np.linspace(0.1, 3.0, 2 ** (bits - 1))
    edges = np.empty(levels.size + 1)
    while True:
        # Nearest neighbour: cells end midway between levels.
        edges[:] = [0.0, *(levels[1:] + levels[:-1]) / 2, np.inf]
        # Centroid of a cell [a, b] of the normal density f: (f(a) - f(b)) / P(a < z < b).
        mass = np.diff(ndtr(edges))
        centroids = -np.diff(np.exp(-(edges**2) / 2)) / np.sqrt(2 * np.pi) / mass
        if np.max(np.abs(centroids - levels)) < 1e-14:
            # Both signs: E q(z)^2 = 2 sum over cells of mass level^2.
            gain = float(2 * np.sum(mass * centroids**2))
            return ScalarLevels(tuple(edges[1:-1].tolist()), tuple(centroids.tolist()), gain)
        levels = centroids


@cache
def dither_moments(bits: int, bucket: int) -> tuple[float, float]:
    """Return (E<Q(v), v> / |v|^2, E|Q(v)|^2 / |v|^2) of rounding with dither.

    Q rounds to multiples of |v| / 2^(bits - 1). v is Gaussian-shaped (a uniform direction in
    `bucket` dimensions), so one coordinate is |v| sin(t) with a density proportional to
    cos(t)^(bucket - 2). Rounding up to +2^(bits - 1) saturates at 2^(bits - 1) - 1 and is included.
    """
    steps = 2 ** (bits - 1)
    ratio, weight = _sphere_quadrature(steps, bucket)
    # A ratio r = (cell + excess) / steps becomes cell + 1 with probability excess: mean r, variance
    # excess (1 - excess) / steps^2.
    cell = np.minimum(np.floor(ratio * steps), steps - 1)
    excess = ratio * steps - cell
    # The last cell: negative coordinates (half of them) still fit, a positive one always becomes
    # steps - 1.
    mean = np.where(cell == steps - 1, ratio - 0.5 * excess / steps, ratio)
    square = ratio**2 + excess * (1 - excess) / steps**2
    square = np.where(cell == steps - 1, 0.5 * square + 0.5 * (1 - 1 / steps) ** 2, square)
    return float(bucket * np.sum(weight * ratio * mean)), float(bucket * np.sum(weight * square))


def _sphere_quadrature(steps: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes r = |v_k| / |v| and weights for a uniform direction, by Gauss-Legendre panels.

    Panels end at multiples of 1 / steps, where the rounding law has kinks.
    """
    if bucket == 1:
        return np.ones(1), np.ones(1)
    reach = min(1.0, 12.0 / np.sqrt(bucket))  # the density beyond is below exp(-70)
    cells = np.arange(0, int(np.ceil(reach * steps)) + 1) / steps
    edges = np.union1d(np.arcsin(np.minimum(cells, 1.0)), np.linspace(0.0, np.arcsin(reach), 65))
    nodes, weights = np.polynomial.legendre.leggauss(8)
    half = np.diff(edges)[:, None] / 2
    angle = (edges[:-1, None] + half + half * nodes).ravel()
    # Density of |sin t| on the sphere: 2 Gamma(m/2) / (sqrt(pi) Gamma((m-1)/2)) cos(t)^(m-2); in
    # logarithms, because the Gamma functions overflow above m = 343.
    log_norm = np.log(2) + gammaln(bucket / 2) - gammaln((bucket - 1) / 2) - np.log(np.pi) / 2
    density = np.exp(log_norm + (bucket - 2) * np.log(np.cos(angle)))
    return np.sin(angle), (half * weights).ravel() * density
