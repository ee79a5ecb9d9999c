"""Few bits per coordinate: dithered rounding (the paper's gsgd_b) and signs.

A vector is cut into buckets with one float32 scale each (`bucket = None`: one scale for the whole
vector; the last bucket may be shorter). The wire holds all scales, then all symbols, bit-packed.

Scales are summed in float64 tile by tile, in an order that depends on D alone, so no number of
threads or of hosted nodes changes a byte; squares of float32 numbers neither overflow nor vanish
there.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes, M buckets. Reference: D. Alistarh
et al., QSGD: Communication-efficient SGD via gradient quantization and encoding, NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
    to_float32,
    wire_rows,
    write_floats,
)
from dpcsgp.compression.error_laws import dither_moments
from dpcsgp.compression.packing import SIGNS_OF_BYTE, pack, packed_bytes, symbol_dtype, unpack
from dpcsgp.errors import ConfigError
from dpcsgp.randomness import PublicRandomness

_SIGN_BIT = np.int32(-(2**31))


@final
@dataclass(frozen=True)
class StochasticQuantizer:
    """Round to b bits with dither u, uniform on [0, 1).

    Q(v)_k = |v| sign(v_k) 2^-(b-1) floor(2^(b-1) |v_k| / |v| + u), where |v| is the norm of the
    coordinate's bucket. Symbols run from -2^(b-1) to 2^(b-1) - 1; the one that does not fit,
    +2^(b-1), saturates.

    omega^2 = min(m / 4^(b-1), sqrt(m) / 2^(b-1)) for buckets of m coordinates holds with saturation
    too: its error is at most one step of the grid, and at most the coordinate's share in the second
    bound. u has 16 random bits, at midpoints: rounding probabilities are exact to 2^-17, so apart
    from saturation |E Q(v) - v| <= 2^-17 sqrt(m) 2^-(b-1) |v|, at most 2^-17 |v| wherever
    omega^2 <= 1.
    """

    bits: int
    bucket: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ConfigError(
                f"compression.spec = '{self.spec}': bits must be from 2 to 16; try 'gsgd:4/64'"
            )
        _check_bucket(self.spec, self.bucket, "gsgd:4/64")

    @property
    def spec(self) -> str:
        return f"gsgd:{self.bits}" if self.bucket is None else f"gsgd:{self.bits}/{self.bucket}"

    def num_bytes(self, dim: int) -> int:
        return 4 * _num_buckets(dim, self.bucket) + packed_bytes(dim, self.bits)

    def paper_bits(self, dim: int) -> int:
        return 32 * _num_buckets(dim, self.bucket) + self.bits * dim

    def omega_squared(self, dim: int) -> float:
        width, steps = min(self.bucket or dim, dim), 2.0 ** (self.bits - 1)
        return min(width / steps**2, math.sqrt(width) / steps)

    def moments(self, dim: int) -> Moments:
        """Return the law for a Gaussian-shaped vector, saturation included.

        Other shapes have another variance.
        """
        width = min(self.bucket or dim, dim)
        gain, square = dither_moments(self.bits, width)
        # A last, shorter bucket has a law of its own; it holds a share tail / dim of |v|^2.
        if tail := dim % width:
            share = tail / dim
            tail_gain, tail_square = dither_moments(self.bits, tail)
            gain, square = (
                gain + share * (tail_gain - gain),
                square + share * (tail_square - square),
            )
        return Moments(gain=gain, noise=square - gain**2)

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        num_nodes, dim = rows_ND.shape
        split = 4 * _num_buckets(dim, self.bucket)
        wire_NB = np.empty((num_nodes, self.num_bytes(dim)), dtype=np.uint8)
        for row, node in enumerate(random.nodes):
            # One NaN or infinity makes its sum of squares so: checking M sums checks D values.
            squares_M = _bucket_sums(rows_ND[row], self.bucket, np.square)
            norms_M = to_float32(np.sqrt(require_finite(squares_M, node, round_)))
            dither_D = random.row_bytes("compression/dither", round_, row, 2 * dim).view("<u2")
            write_floats(wire_NB[row, :split], norms_M)
            wire_NB[row, split:] = pack(self._symbols(rows_ND[row], norms_M, dither_D), self.bits)
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        split = 4 * _num_buckets(dim, self.bucket)
        x_SD = np.empty((rows_SB.shape[0], dim), dtype=np.float32)
        for node, wire_B, row_D in zip(random.nodes, rows_SB, x_SD, strict=True):
            norms_M = read_floats(wire_B[:split], node, round_)
            symbols_D = _sign_extended(unpack(wire_B[split:], dim, self.bits), self.bits)
            for coordinates, buckets, width in _tiles(dim, self.bucket):
                # The level is exact and at most one: the only rounding is the product with |v|.
                symbols = symbols_D[coordinates].astype(np.float32)
                levels = symbols * np.float32(2.0 ** (1 - self.bits))
                np.multiply(
                    levels.reshape(-1, width),
                    norms_M[buckets, None],
                    out=row_D[coordinates].reshape(-1, width),
                )
        return torch.from_numpy(x_SD)

    def _symbols(self, row_D: np.ndarray, norms_M: np.ndarray, dither_D: np.ndarray) -> np.ndarray:
        """Return the rounded multiples of norm / 2^(b-1) as int8 or int16 (D,)."""
        steps = 2 ** (self.bits - 1)
        divisors_M = np.where(norms_M > 0, norms_M, np.float32(1))
        symbols_D = np.empty(row_D.size, dtype=np.int8 if self.bits <= 8 else np.int16)
        for coordinates, buckets, width in _tiles(row_D.size, self.bucket):
            # A division, not a product with the inverse: the inverse of a denormal norm overflows.
            values = row_D[coordinates].reshape(-1, width)
            ratio = np.divide(values, divisors_M[buckets, None]).reshape(-1)
            ratio *= np.float32(steps)
            # Sixteen random bits at the midpoints (k + 1/2) / 2^16: symmetric, never 0 or 1.
            u = dither_D[coordinates].astype(np.float32)
            u += np.float32(0.5)
            u *= np.float32(2.0**-16)
            # Give u the sign of the coordinate: then truncation is sign(v) floor(|v| + u).
            u.view(np.int32)[:] |= ratio.view(np.int32) & _SIGN_BIT
            ratio += u
            # Two's complement is not symmetric: -steps fits, +steps saturates at steps - 1.
            np.clip(ratio, np.float32(-steps), np.float32(steps - 0.5), out=ratio)
            symbols_D[coordinates] = ratio.astype(symbols_D.dtype)
        return symbols_D


@final
@dataclass(frozen=True)
class Sign:
    """Send one bit per coordinate and the bucket's mean magnitude: Q(v)_k = sign(v_k) |v|_1 / m.

    |Q(v) - v|^2 = |v|^2 - |v|_1^2 / m, so omega^2 = 1 - 1 / m for buckets of m coordinates, reached
    by one-hot vectors. There is no `moments` law: the error depends on the vector's shape (`rot:1`
    rotates first and has one).
    """

    bucket: int | None = None

    def __post_init__(self) -> None:
        _check_bucket(self.spec, self.bucket, "sign:512")

    @property
    def spec(self) -> str:
        return "sign" if self.bucket is None else f"sign:{self.bucket}"

    def num_bytes(self, dim: int) -> int:
        return 4 * _num_buckets(dim, self.bucket) + packed_bytes(dim, 1)

    def paper_bits(self, dim: int) -> int:
        return 32 * _num_buckets(dim, self.bucket) + dim

    def omega_squared(self, dim: int) -> float:
        return 1.0 - 1.0 / min(self.bucket or dim, dim)

    def moments(self, dim: int) -> None:
        return None

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        num_nodes, dim = rows_ND.shape
        split = 4 * _num_buckets(dim, self.bucket)
        wire_NB = np.empty((num_nodes, self.num_bytes(dim)), dtype=np.uint8)
        # Coordinates per bucket; the last one takes what is left.
        sizes_M = np.full(split // 4, self.bucket or dim)
        sizes_M[-1] = dim - (sizes_M.size - 1) * sizes_M[0]
        for node, row_D, wire_B in zip(random.nodes, rows_ND, wire_NB, strict=True):
            sums_M = require_finite(_bucket_sums(row_D, self.bucket, np.abs), node, round_)
            write_floats(wire_B[:split], to_float32(sums_M / sizes_M))
            wire_B[split:] = pack(row_D < 0, bits=1)
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        split = 4 * _num_buckets(dim, self.bucket)
        x_SD = np.empty((rows_SB.shape[0], dim), dtype=np.float32)
        for node, wire_B, row_D in zip(random.nodes, rows_SB, x_SD, strict=True):
            scales_M = read_floats(wire_B[:split], node, round_)
            signs_D = np.take(SIGNS_OF_BYTE, wire_B[split:], axis=0).reshape(-1)
            for coordinates, buckets, width in _tiles(dim, self.bucket):
                signs = signs_D[coordinates].reshape(-1, width)
                out = row_D[coordinates].reshape(-1, width)
                np.multiply(signs, scales_M[buckets, None], out=out)
        return torch.from_numpy(x_SD)


def _num_buckets(dim: int, bucket: int | None) -> int:
    return 1 if bucket is None else -(-dim // bucket)


def _tiles(dim: int, bucket: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Cut D coordinates into cache-sized pieces: several full buckets, or part of one bucket.

    Yields (coordinates, buckets, width): the piece reshaped to (-1, width) has one row per bucket
    in `buckets`.
    """
    bucket = min(bucket or dim, dim)
    # Long buckets: several pieces each.
    if bucket > TILE:
        for start in range(0, dim, bucket):
            stop, index = min(start + bucket, dim), start // bucket
            for first in range(start, stop, TILE):
                last = min(first + TILE, stop)
                yield slice(first, last), slice(index, index + 1), last - first
        return
    # Short buckets: as many in a piece as fit, then the last bucket if it is shorter.
    full, span = dim - dim % bucket, TILE // bucket * bucket
    for first in range(0, full, span):
        last = min(first + span, full)
        yield slice(first, last), slice(first // bucket, last // bucket), bucket
    if full < dim:
        yield slice(full, dim), slice(full // bucket, full // bucket + 1), dim - full


def _bucket_sums(row_D: np.ndarray, bucket: int | None, function: np.ufunc) -> np.ndarray:
    """Return float64 (M,): the sum of function(v_k) over each bucket."""
    sums_M = np.zeros(_num_buckets(row_D.size, bucket))
    for coordinates, buckets, width in _tiles(row_D.size, bucket):
        # float64: squares of float32 numbers neither overflow nor vanish in it.
        values = row_D[coordinates].astype(np.float64)
        function(values, out=values)
        sums_M[buckets] += np.add.reduce(values.reshape(-1, width), axis=1)
    return sums_M


def _sign_extended(symbols_D: np.ndarray, bits: int) -> np.ndarray:
    """Read b-bit two's complement symbols as int8 or int16."""
    half = symbol_dtype(bits)(2 ** (bits - 1))
    # (s xor half) - half copies the sign bit upwards, modulo the width of the type.
    if bits not in (8, 16):
        symbols_D = (symbols_D ^ half) - half
    return symbols_D.view(np.int8 if bits <= 8 else np.int16)


def _check_bucket(spec: str, bucket: int | None, example: str) -> None:
    if bucket is not None and bucket < 1:
        raise ConfigError(
            f"compression.spec = '{spec}': a bucket needs at least 1 coordinate; try '{example}'"
        )
