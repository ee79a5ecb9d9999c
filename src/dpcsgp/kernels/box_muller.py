"""Pairs of rounded normal numbers from random words (Box-Muller): the inner loop of the noise.

    u      = (low 53 bits of the first word + 1/2) / 2^53, a double
    radius = scale sqrt(-2 log u)
    angle  = (second word, signed) pi / 2^63
    values = round(radius cos(angle)), round(radius sin(angle))

The loop has no branch and calls no function, so that the compiler turns it into vector
instructions. Logarithm, cosine and sine are written out below; each is within a few units of
rounding of the true value (`tests/privacy/test_noise.py` compares them with numpy's). All
arithmetic is in double precision and in the order written, whatever the machine.

Legend: P pairs of values. Reference: G. Box and M. Muller, A note on the generation of random
normal deviates, Ann. Math. Stat. 29(2), 1958.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dpcsgp.kernels.numba_loops import compiled, inlined

_LOW_53_BITS: Final = (1 << 53) - 1
_ULP: Final = 2.0**-53
_SQRT_HALF_BITS: Final = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
_LOG_2: Final = math.log(2.0)
_EIGHTH_TURN: Final = 1 << 61
_RADIANS: Final = math.pi * 2.0**-63

_SIGNATURES: Final = [
    f"void(int64[::1], int64[::1], float64, float64, {kind}[::1], {kind}[::1])"
    for kind in ("float32", "float64")
]


@inlined
def _log(u: float) -> float:
    """Return the natural logarithm of a positive number."""
    # u = 2^exponent m with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) before the
    # shift puts the cut there, so that m is near 1 and nothing cancels for u near 1.
    bits = np.float64(u).view(np.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    m = np.int64(bits - (exponent << 52)).view(np.float64)
    # log m = 2 artanh(f) = 2 (f + f^3 / 3 + f^5 / 5 + ...), f = (m - 1) / (m + 1), |f| < 0.172: the
    # terms up to f^19 suffice. The large part 2 f is added last.
    f = (m - 1.0) / (m + 1.0)
    g = f * f
    series = 2 / 13 + g * (2 / 15 + g * (2 / 17 + g * (2 / 19)))
    series = 2 / 3 + g * (2 / 5 + g * (2 / 7 + g * (2 / 9 + g * (2 / 11 + g * series))))
    return float(exponent) * _LOG_2 + (f * (g * series) + 2.0 * f)


@inlined
def _sine(t: float, z: float) -> float:
    """Return sin t for |t| <= pi / 4, z = t^2."""
    # Taylor series up to t^15; t itself is added last.
    series = -1 / 5040 + z * (
        1 / 362880 + z * (-1 / 39916800 + z * (1 / 6227020800 + z * (-1 / 1307674368000)))
    )
    return t + t * z * (-1 / 6 + z * (1 / 120 + z * series))


@inlined
def _cosine(z: float) -> float:
    """Return cos t for |t| <= pi / 4, z = t^2."""
    # Taylor series up to t^16.
    series = -1 / 3628800 + z * (1 / 479001600 + z * (-1 / 87178291200 + z * (1 / 20922789888000)))
    return 1.0 - z * (1 / 2 - z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * series))))


@compiled(*_SIGNATURES)
def add_pairs(
    radius_words_P: np.ndarray,
    angle_words_P: np.ndarray,
    scale: float,
    grid: float,
    first_P: np.ndarray,
    second_P: np.ndarray,
) -> None:
    """Make sums `grid * (round(sum / grid) + round(scale * gauss))` in place.

    The first sums get the cosines, the second ones the sines; as many pairs as there are second
    sums.
    """
    inverse = 1.0 / grid
    for i in range(second_P.size):
        # At the midpoints of 2^53 cells u is never 0, so the logarithm is finite.
        u = (float(radius_words_P[i] & _LOW_53_BITS) + 0.5) * _ULP
        radius = scale * math.sqrt(-2.0 * _log(u))
        # The nearest multiple of a quarter turn is taken off in integers: exact, and |t| <= pi / 4.
        word = angle_words_P[i]
        quarters = (word + _EIGHTH_TURN) >> 62
        t = float(word - (quarters << 62)) * _RADIANS
        z = t * t
        sine, cosine = _sine(t, z), _cosine(z)
        # Turn back by that many quarters: odd ones swap sine and cosine, then the signs.
        swapped = (quarters & 1) != 0
        x = sine if swapped else cosine
        y = cosine if swapped else sine
        x = -x if ((quarters + 1) & 2) != 0 else x
        y = -y if (quarters & 2) != 0 else y
        # Plus zero: two negative zeros add up to a third, which a positive zero in the sum never
        # gives, and that would reveal its sign.
        first_P[i] = grid * (np.rint(float(first_P[i]) * inverse) + np.rint(radius * x) + 0.0)
        second_P[i] = grid * (np.rint(float(second_P[i]) * inverse) + np.rint(radius * y) + 0.0)
