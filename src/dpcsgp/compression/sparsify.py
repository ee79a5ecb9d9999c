"""Send everything, a random part, or the largest entries.

`RandK` is the paper's rand_a: floor(a d) coordinates as float32, not rescaled, at positions that
every receiver rebuilds from the sender's public stream. `TopK` (top-k) has to send its positions; a
sorted list of k out of d positions is written in Elias-Fano form (low bits packed, high bits as a
unary bit string) or as a bitmap, whichever is smaller, and both sizes follow from k and d alone.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes, K kept coordinates. Reference: P.
Elias, Efficient storage and retrieval by content and address of static files, J. ACM 21(2), 1974.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.compression.base import (
    TILE,
    Moments,
    input_rows,
    read_floats,
    require_finite,
    wire_rows,
    write_floats,
)
from dpcsgp.compression.packing import pack, packed_bytes, unpack
from dpcsgp.errors import ConfigError, WireError
from dpcsgp.randomness import PublicRandomness


@final
@dataclass(frozen=True)
class Identity:
    """Send every coordinate as float32: Q(v) = v."""

    @property
    def spec(self) -> str:
        return "none"

    def num_bytes(self, dim: int) -> int:
        return 4 * dim

    def paper_bits(self, dim: int) -> int:
        return 32 * dim

    def omega_squared(self, dim: int) -> float:
        return 0.0

    def moments(self, dim: int) -> Moments:
        return Moments(gain=1.0, noise=0.0)

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        wire_NB = np.empty((rows_ND.shape[0], self.num_bytes(rows_ND.shape[1])), dtype=np.uint8)
        for node, row_D, wire_B in zip(random.nodes, rows_ND, wire_NB, strict=True):
            write_floats(wire_B, require_finite(row_D, node, round_))
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        x_SD = np.empty((rows_SB.shape[0], dim), dtype=np.float32)
        for node, wire_B, row_D in zip(random.nodes, rows_SB, x_SD, strict=True):
            row_D[:] = wire_B.view("<f4")
            require_finite(row_D, node, round_)
        return torch.from_numpy(x_SD)


@final
@dataclass(frozen=True)
class RandK:
    """Keep K = floor(a d) random coordinates as they are, zero the rest; omega^2 = 1 - K / d."""

    fraction: float

    def __post_init__(self) -> None:
        _check_fraction("rand", self.fraction)

    @property
    def spec(self) -> str:
        return f"rand:{float(self.fraction)!r}"

    def num_kept(self, dim: int) -> int:
        """Return floor(a d), `a` being the decimal number as written: 0.29 of 100 are 29."""
        return _floor_of(self.fraction, dim)

    def num_bytes(self, dim: int) -> int:
        return 4 * self.num_kept(dim)

    def paper_bits(self, dim: int) -> int:
        return 32 * self.num_kept(dim)

    def omega_squared(self, dim: int) -> float:
        return 1.0 - self.num_kept(dim) / dim

    def moments(self, dim: int) -> Moments:
        kept = self.num_kept(dim) / dim
        # A coordinate survives with probability `kept`: a Bernoulli factor, mean and variance.
        return Moments(gain=kept, noise=kept * (1.0 - kept))

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        num_nodes, dim = rows_ND.shape
        wire_NB = np.empty((num_nodes, self.num_bytes(dim)), dtype=np.uint8)
        for row, node in enumerate(random.nodes):
            require_finite(rows_ND[row], node, round_)
            # Only values travel: the receiver draws the same mask from the sender's public stream.
            mask_D = random_mask(random, round_, row, dim, self.num_kept(dim))
            write_floats(wire_NB[row], np.compress(mask_D, rows_ND[row]))
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        x_SD = np.zeros((rows_SB.shape[0], dim), dtype=np.float32)
        for row, node in enumerate(random.nodes):
            values_K = read_floats(rows_SB[row], node, round_)
            _spread(values_K, random_mask(random, round_, row, dim, self.num_kept(dim)), x_SD[row])
        return torch.from_numpy(x_SD)


@final
@dataclass(frozen=True)
class TopK:
    """Keep the K = max(1, floor(a d)) entries of largest magnitude.

    omega^2 = 1 - K / d, reached by flat vectors. Among equal magnitudes the first ones are kept.
    There is no `moments` law: the error depends on the vector's shape.
    """

    fraction: float

    def __post_init__(self) -> None:
        _check_fraction("top", self.fraction)

    @property
    def spec(self) -> str:
        return f"top:{float(self.fraction)!r}"

    def num_kept(self, dim: int) -> int:
        """Return max(1, floor(a d))."""
        return max(1, _floor_of(self.fraction, dim))

    def num_bytes(self, dim: int) -> int:
        return 4 * self.num_kept(dim) + positions_bytes(dim, self.num_kept(dim))

    def paper_bits(self, dim: int) -> int:
        return 8 * self.num_bytes(dim)

    def omega_squared(self, dim: int) -> float:
        return 1.0 - self.num_kept(dim) / dim

    def moments(self, dim: int) -> None:
        return None

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        num_nodes, dim = rows_ND.shape
        split = 4 * self.num_kept(dim)  # values first, then their positions
        wire_NB = np.empty((num_nodes, self.num_bytes(dim)), dtype=np.uint8)
        for node, row_D, wire_B in zip(random.nodes, rows_ND, wire_NB, strict=True):
            require_finite(row_D, node, round_)
            positions_K = _largest(row_D, self.num_kept(dim))
            write_floats(wire_B[:split], row_D[positions_K])
            wire_B[split:] = write_positions(positions_K, dim)
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        num_kept = self.num_kept(dim)
        x_SD = np.zeros((rows_SB.shape[0], dim), dtype=np.float32)
        for node, wire_B, row_D in zip(random.nodes, rows_SB, x_SD, strict=True):
            values_K = read_floats(wire_B[: 4 * num_kept], node, round_)
            positions_K = read_positions(wire_B[4 * num_kept :], dim, num_kept)
            if positions_K is None:
                raise WireError(
                    f"payload of sender {node} in round {round_}: "
                    f"expected {num_kept} positions below {dim}"
                )
            row_D[positions_K] = values_K
        return torch.from_numpy(x_SD)


def random_mask(
    random: PublicRandomness, round_: int, row: int, dim: int, num_kept: int
) -> np.ndarray:
    """Return a uniform subset, bool (D,) with exactly `num_kept` ones, from one public stream.

    Sixteen random bits per coordinate decide independently; then random members of the larger side
    are moved over until the count is right. Both stages treat all coordinates alike, so every
    subset of that size is equally likely. The stream is that of node `nodes[row]`.
    """
    # Independent draws with a probability just below num_kept / dim.
    threshold = min(num_kept * 65536 // dim, 65535)
    mask_D = random.row_bytes("compression/mask", round_, row, 2 * dim).view("<u2") < threshold
    # Repair the count. Draws repeat themselves, so one attempt may move too few.
    surplus = int(np.count_nonzero(mask_D)) - num_kept
    attempt = 0
    while surplus:
        moved = _draw_members(mask_D, surplus > 0, abs(surplus), random, round_, row, attempt)
        mask_D[moved] = surplus < 0
        surplus += -moved.size if surplus > 0 else moved.size
        attempt += 1
    return mask_D


def _draw_members(
    mask_D: np.ndarray,
    side: bool,
    count: int,
    random: PublicRandomness,
    round_: int,
    row: int,
    attempt: int,
) -> np.ndarray:
    """Draw up to `count` distinct positions uniformly among those where the mask equals `side`."""
    dim = mask_D.size
    num_members = int(np.count_nonzero(mask_D)) if side else dim - int(np.count_nonzero(mask_D))
    # Rare members are listed, because blind positions would mostly miss them; for frequent ones
    # rejection is cheaper than a list. A few draws more than needed make up for repetitions.
    if 8 * num_members < dim:
        members, num_draws = np.flatnonzero(mask_D == side), count + count // 8 + 16
    else:
        members, num_draws = None, count * dim // num_members + count // 8 + 64
    stream = random.row_bytes(f"compression/mask/repair/{attempt}", round_, row, 8 * num_draws)
    words = stream.view("<u8")
    # 64 random bits modulo d: the bias is below d / 2^64.
    if members is None:
        drawn = (words % np.uint64(dim)).astype(np.int64)
        drawn = drawn[mask_D[drawn] == side]
    else:
        drawn = members[(words % np.uint64(members.size)).astype(np.int64)]
    # Distinct positions in the order of their first draw, so that the cut favours no position.
    _, first_seen = np.unique(drawn, return_index=True)
    return drawn[np.sort(first_seen)[:count]]


def _spread(values_K: np.ndarray, mask_D: np.ndarray, row_D: np.ndarray) -> None:
    """Write the values where the mask is set."""
    start = 0  # tile by tile: a short list of positions stays in the cache
    for first in range(0, mask_D.size, TILE):
        positions = np.flatnonzero(mask_D[first : first + TILE])
        row_D[first : first + TILE][positions] = values_K[start : start + positions.size]
        start += positions.size


def _largest(row_D: np.ndarray, num_kept: int) -> np.ndarray:
    """Return the sorted positions of the `num_kept` largest magnitudes, the first among equals."""
    # Without the sign bit, floats sort like their bits read as integers.
    magnitude_D = row_D.view(np.int32) & np.int32(0x7FFFFFFF)
    rank = row_D.size - num_kept
    smallest_kept = np.partition(magnitude_D, rank)[rank]
    kept_D = magnitude_D > smallest_kept
    # Ties at the threshold fill up the rest in rising order: every machine keeps the same ones.
    equal = np.flatnonzero(magnitude_D == smallest_kept)
    kept_D[equal[: num_kept - np.count_nonzero(kept_D)]] = True
    return np.flatnonzero(kept_D)


def positions_bytes(dim: int, count: int) -> int:
    """Return the bytes of `count` sorted positions below `dim`, bitmap or Elias-Fano form.

    The smaller of the two sizes decides the form, so it follows from count and dim alone.

    >>> positions_bytes(1_000_000, 10_000)  # 8.6 bits each, where a plain index takes 20
    10704
    """
    return min(packed_bytes(dim, 1), _elias_fano_bytes(dim, count, _low_bits(dim, count)))


def write_positions(positions_K: np.ndarray, dim: int) -> np.ndarray:
    """Encode sorted distinct positions into uint8 (positions_bytes(dim, K),)."""
    low_bits = _low_bits(dim, positions_K.size)
    if positions_bytes(dim, positions_K.size) == packed_bytes(dim, 1):
        return _bitmap(positions_K, dim)
    # High parts in unary: entry k sets bit high_k + k, and the zeros before it count high_k.
    high_K = (positions_K >> low_bits) + np.arange(positions_K.size)
    high = _bitmap(high_K, _high_length(dim, positions_K.size, low_bits))
    # Low parts as they are, `low_bits` bits each.
    low_K = (positions_K & (2**low_bits - 1)).astype(np.uint16 if low_bits > 8 else np.uint8)
    low = pack(low_K, low_bits)
    return np.concatenate([high, low])


def read_positions(wire_B: np.ndarray, dim: int, count: int) -> np.ndarray | None:
    """Decode what `write_positions` wrote; None unless it is `count` rising positions below `dim`.

    The bytes come from the network: whatever they are, no other position is ever returned.
    """
    low_bits = _low_bits(dim, count)
    if positions_bytes(dim, count) == packed_bytes(dim, 1):
        positions_K = np.flatnonzero(np.unpackbits(wire_B, count=dim, bitorder="little"))
        return positions_K if positions_K.size == count else None
    high_length = _high_length(dim, count, low_bits)
    high_B, low_B = np.split(wire_B, [packed_bytes(high_length, 1)])
    high_K = np.flatnonzero(np.unpackbits(high_B, count=high_length, bitorder="little"))
    if high_K.size != count:
        return None
    positions_K = ((high_K - np.arange(count)) << low_bits) | unpack(low_B, count, low_bits)
    rising = bool((np.diff(positions_K) > 0).all()) and int(positions_K[-1]) < dim
    return positions_K if rising else None


def _bitmap(positions_K: np.ndarray, length: int) -> np.ndarray:
    flags = np.zeros(length, dtype=np.uint8)
    flags[positions_K] = 1
    return np.packbits(flags, bitorder="little")


@cache
def _low_bits(dim: int, count: int) -> int:
    """Return how many low bits of a position make the Elias-Fano form smallest."""
    return min(range(1, 17), key=lambda low_bits: _elias_fano_bytes(dim, count, low_bits))


def _high_length(dim: int, count: int, low_bits: int) -> int:
    return count + ((dim - 1) >> low_bits) + 1


def _elias_fano_bytes(dim: int, count: int, low_bits: int) -> int:
    return packed_bytes(_high_length(dim, count, low_bits), 1) + packed_bytes(count, low_bits)


def _floor_of(fraction: float, dim: int) -> int:
    # As a decimal fraction: in binary 0.29 * 100 is 28.999999999999996.
    return math.floor(Fraction(repr(float(fraction))) * dim)


def _check_fraction(name: str, fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(
            f"compression.spec = '{name}:{fraction!r}': the kept fraction must be above 0 and at "
            f"most 1; try '{name}:{'0.5' if name == 'rand' else '0.01'}'"
        )
