"""Rounded normal numbers, round(scale z), by looking random words up in a table: no arithmetic.

Noise that pairs of nodes share is drawn for every pair, so it has to be cheap, and both ends must
get the same numbers on whatever machines, so it has to be whole numbers alone.

    |value| = how many k >= 1 have v < 2^63 P(|round(scale z)| >= k),   v a random 63-bit number

A sixteen-bit word gives the sign and the upper 15 bits of v. For about 99 of 100 words these decide
the value, and a table holds it; the others take their lower 48 bits from further words, in order.
Probabilities are right to a share of 2^-52 (a double holds them); values stop at nine standard
deviations, where no 63-bit number reaches: that is less than 2^-62 of the mass.

Legend: D values, R further words, K values with a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from dpcsgp.errors import ConfigError
from dpcsgp.kernels.numba_loops import compiled

_BITS: Final = 63
_INDEX_BITS: Final = 15
_LOW_BITS: Final = _BITS - _INDEX_BITS
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
LARGEST_SCALE: Final = 2000.0  # the values of a table fit into 16 bits, and few words are undecided

# (first byte, number of bytes) -> words of a stream
Words = Callable[[str, int], np.ndarray]


class Table(NamedTuple):
    """What a scale needs: values by index (undecided: -1 - the least value), and thresholds."""

    values: np.ndarray  # int16 (2^15,)
    thresholds_K: np.ndarray  # int64, falling; entry k - 1 belongs to the value k
    undecided: float  # share of the words that need further ones


@lru_cache(maxsize=16)
def table_of(scale: float) -> Table:
    """Return the table of round(scale z)."""
    if not 0 < scale <= LARGEST_SCALE:
        raise ConfigError(f"scale = {scale}: expected a number above 0, up to {LARGEST_SCALE:g}")
    thresholds = []
    # P(|round(scale z)| >= k) = erfc((k - 1/2) / (scale sqrt 2)): precise in the tail too
    for k in range(1, 10 * math.ceil(scale) + 10):
        threshold = int(math.erfc((k - 0.5) / (scale * math.sqrt(2))) * 2.0**_BITS)
        if threshold == 0:
            break
        thresholds.append(min(threshold, 2**_BITS - 1))
    thresholds_K = np.array(thresholds, dtype=np.int64)
    # An index stands for all v from its first to its last: the ends decide, where they agree.
    first = np.arange(2**_INDEX_BITS, dtype=np.int64) << _LOW_BITS
    rising = thresholds_K[::-1]
    most, least = (
        len(rising) - np.searchsorted(rising, v, side="right") for v in (first, first | _LOW_MASK)
    )
    values = np.where(most == least, most, -1 - least).astype(np.int16)
    return Table(values, thresholds_K, float((most != least).mean()))


@compiled("void(uint16[::1], uint64[::1], int16[::1], int64[::1], int32[::1], int64[::1])")
def look_up(
    words_D: np.ndarray,
    further_R: np.ndarray,
    values: np.ndarray,
    thresholds_K: np.ndarray,
    out_D: np.ndarray,
    used: np.ndarray,
) -> None:
    """Write the values of the words; `used[0]` is how many further words it took, -1: too few."""
    taken = 0
    for i in range(words_D.size):
        index = words_D[i] & _INDEX_MASK
        value = np.int32(values[index])
        if value < 0:
            if taken == further_R.size:
                used[0] = -1
                return
            v = (np.int64(index) << _LOW_BITS) | np.int64(further_R[taken] & np.uint64(_LOW_MASK))
            taken += 1
            value = np.int32(-1 - value)
            while value < thresholds_K.size and v < thresholds_K[value]:
                value += 1
        out_D[i] = -value if (words_D[i] >> _INDEX_BITS) != 0 else value
    used[0] = taken


def rounded_normals(scale: float, dim: int, stream: Words, out_D: np.ndarray) -> None:
    """Write `dim` independent values of round(scale z) to `out_D` (int32).

    Args:
        scale: standard deviation before rounding.
        dim: how many values.
        stream: returns so many random bytes under a name, always the same ones from the first on.
        out_D: where they go.
    """
    table = table_of(scale)
    words_D = stream("words", 2 * dim).view(np.uint16)
    expected = table.undecided * dim
    # Twelve standard deviations of room; in the unlikely case, more of the same stream.
    room, used = math.ceil(expected + 12 * math.sqrt(expected) + 64), np.zeros(1, dtype=np.int64)
    while True:
        further_R = stream("further words", 8 * room).view(np.uint64)
        look_up(words_D, further_R, table.values, table.thresholds_K, out_D, used)
        if used[0] >= 0:
            return
        room *= 2
