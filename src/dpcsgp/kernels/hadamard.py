"""Random signs and Walsh-Hadamard butterflies on the columns of a matrix, compiled.

Every number is made by the same additions in the same order on every machine, so sender and
receivers agree bit for bit.

Legend: W coordinates of a matrix of L rows, row after row.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dpcsgp.kernels.numba_loops import compiled

_LANES: Final = 64  # signs in a word


@compiled("void(float32[::1], uint64[::1], int64)")
def flip(x_W: np.ndarray, words: np.ndarray, spread: int) -> None:
    """Multiply in place by +-1 / sqrt(spread); bit i of the words is the sign of coordinate i."""
    # The scale of the transform that follows comes along with the signs: one pass over memory less.
    scale = np.float32(1 / math.sqrt(spread))
    for k in range(words.size):
        word, lanes = words[k], x_W[_LANES * k : _LANES * (k + 1)]
        for j in range(lanes.size):
            lanes[j] *= -scale if (word >> np.uint64(j)) & np.uint64(1) else scale


@compiled("void(float32[::1], int64, int64)")
def hadamard(x_W: np.ndarray, columns: int, half: int) -> None:
    """Make (a, b) <- (a + b, a - b) in place of rows `half` apart, then twice as far, and so on.

    The difference is computed as (a + b) - 2 b, which needs no second look at a; its rounding is
    part of the protocol.
    """
    two, distance = np.float32(2), half * columns
    # Two stages at a time (radix 4), which halves the memory traffic: four rows a, b, c, d.
    while 4 * distance <= x_W.size:
        for base in range(0, x_W.size, 4 * distance):
            a = x_W[base : base + distance]
            b = x_W[base + distance : base + 2 * distance]
            c = x_W[base + 2 * distance : base + 3 * distance]
            d = x_W[base + 3 * distance : base + 4 * distance]
            for i in range(distance):
                # First stage: pairs (a, b) and (c, d).
                ab, cd = a[i] + b[i], c[i] + d[i]
                ba, dc = ab - two * b[i], cd - two * d[i]
                # Second stage: the sums with each other, the differences with each other.
                upper, lower = ab + cd, ba + dc
                a[i], b[i], c[i], d[i] = upper, lower, upper - two * cd, lower - two * dc
        distance *= 4
    # An odd number of stages leaves one.
    if 2 * distance <= x_W.size:
        a, b = x_W[:distance], x_W[distance : 2 * distance]
        for i in range(distance):
            upper = a[i] + b[i]
            a[i], b[i] = upper, upper - two * b[i]
