"""Rotate by random signs and Hadamard transforms, then quantise: one error law for every vector.

A vector is laid out as a matrix of n rows and m columns, and every column is rotated on its own by
turns of random signs and a Walsh-Hadamard transform of L rows, a power of two. One turn makes a
dense vector Gaussian but a one-hot vector flat; after a second turn all are Gaussian. Any d is
served with little waste: either the columns are padded to n = L, or n is up to a third larger than
L and the turns alternate between the first L and the last L rows (three or four turns, so that all
rows mix). Rotated coordinates are close to Gaussian whatever the vector was, so the best scalar
quantiser of a Gaussian and its error apply: Q(v) = gain v + noise, with noise of energy
gain (1 - gain) |v|^2.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes, R rows handled together, W padded
width n m, M columns. Reference: A. T. Suresh et al., Distributed mean estimation with limited
communication, ICML 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.compression.base import (
    FLOAT32_MAX,
    Moments,
    input_rows,
    read_floats,
    require_finite,
    to_float32,
    wire_rows,
    write_floats,
)
from dpcsgp.compression.error_laws import lloyd_max
from dpcsgp.compression.packing import SIGNS_OF_BYTE, pack, packed_bytes, unpack
from dpcsgp.errors import ConfigError
from dpcsgp.kernels.hadamard import flip, hadamard
from dpcsgp.randomness import PublicRandomness

# Longer vectors are cut into panels of at most this many coordinates, which stay in a core's cache.
_PANEL = 2**17
# Short vectors are rotated together up to about this many coordinates, which saves calls.
_BATCH = 2**17
# Window lengths to choose from; shorter columns are too far from Gaussian.
_LENGTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32)
# The first of two turns spreads a coordinate over this many rows only: sums of so many signs are
# Gaussian enough for the cells of the quantiser.
_FIRST_SPREAD = {1: 128, 2: 128, 3: 1024, 4: 1024}


@final
@dataclass(frozen=True)
class RotationPlan:
    """Say how d coordinates are laid out (`rows` x `columns`) and rotated.

    `spreads` has one entry per turn of signs and transform, which acts on a window of `length`
    rows: over how many rows it spreads a coordinate.
    """

    rows: int
    columns: int
    length: int
    spreads: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the number of rotated coordinates, padding included."""
        return self.rows * self.columns

    def windows(self) -> list[tuple[slice, int]]:
        """Return (flat range of coordinates, spread) of each turn: first rows and last rows.

        A spread below the length makes only the outer butterflies: each coordinate reaches `spread`
        evenly spaced rows.
        """
        # The matrix lies row after row, so a window of rows is one range of coordinates.
        size, last = self.length * self.columns, (self.rows - self.length) * self.columns
        starts = [last if index % 2 else 0 for index in range(len(self.spreads))]
        return [
            (slice(start, start + size), spread)
            for start, spread in zip(starts, self.spreads, strict=True)
        ]


@cache
def plan_rotation(dim: int, bits: int) -> RotationPlan:
    """Choose the layout with the fewest bits; every turn beyond two weighs like one per cent.

    >>> plan_rotation(1000, bits=1)
    RotationPlan(rows=1024, columns=1, length=1024, spreads=(128, 1024))
    >>> plan_rotation(650, bits=1)
    RotationPlan(rows=650, columns=1, length=512, spreads=(512, 512, 512, 512))
    """

    # Bits on the wire: one float32 scale per column, b bits per coordinate, padding included.
    def price(plan: RotationPlan) -> float:
        return (32 * plan.columns + bits * plan.width) * (1 + 0.01 * (len(plan.spreads) - 2))

    return min(_candidate_plans(dim, bits), key=price)


def _candidate_plans(dim: int, bits: int) -> Iterator[RotationPlan]:
    for length in _LENGTHS:
        # Pad the columns to one window; two turns.
        spreads = (min(_FIRST_SPREAD[bits], length), length)
        yield RotationPlan(length, -(-dim // length), length, spreads)
        # Or fewer columns that are up to a third longer than the window, which hardly need padding.
        # Two overlapping windows take turns: with a small excess three turns mix all rows.
        columns = dim // length
        if columns and 3 * (excess := -(-dim // columns) - length) <= length:
            num_turns = 3 if 32 * excess <= length else 4
            yield RotationPlan(length + excess, columns, length, (length,) * num_turns)


def rotate(
    x_RW: np.ndarray, plan: RotationPlan, random: PublicRandomness, round_: int, start: int = 0
) -> None:
    """Rotate in place, window by window: x <- H (signs * x) / sqrt(spread).

    `start` is the first coordinate of the panel: each panel has streams of its own.
    """
    for row, x_W in enumerate(x_RW):
        for index, (window, spread) in enumerate(plan.windows()):
            flip(x_W[window], _signs(plan, random, round_, row, start, index), spread)
            hadamard(x_W[window], plan.columns, plan.length // spread)


def rotate_back(
    x_RW: np.ndarray, plan: RotationPlan, random: PublicRandomness, round_: int, start: int = 0
) -> None:
    """Undo `rotate` in place: windows in reverse order, x <- signs * (H x) / sqrt(spread)."""
    # H / sqrt(spread) is symmetric and orthogonal, so it is its own inverse; so are the signs.
    for row, x_W in enumerate(x_RW):
        for index, (window, spread) in reversed(list(enumerate(plan.windows()))):
            hadamard(x_W[window], plan.columns, plan.length // spread)
            flip(x_W[window], _signs(plan, random, round_, row, start, index), spread)


def _signs(
    plan: RotationPlan, random: PublicRandomness, round_: int, row: int, start: int, index: int
) -> np.ndarray:
    """Return one public random bit per coordinate of a window, in words of 64."""
    num_words = -(-plan.length * plan.columns // 64)
    purpose = f"compression/rotation/{start}/{index}"
    return random.row_bytes(purpose, round_, row, 8 * num_words).view("<u8")


@final
@dataclass(frozen=True)
class RotatedQuantizer:
    """Rotate, quantise to the 2^b best levels for a Gaussian, rotate back.

    Each column has one least-squares scale. gain = 1 - D(b) with D(b) the smallest mean squared
    error of b bits for N(0, 1): 2 / pi for one bit (signs and mean magnitudes). The scale projects
    the vector onto its levels, so |Q(v)|^2 = <Q(v), v> before padding is dropped: noise =
    gain (1 - gain) at most, omega^2 = 1 - gain, and |Q(v) - v| <= |v| holds for every single
    message.

    A fresh rotation is drawn for each sender and round. The law is that of long columns; vectors
    below about a hundred coordinates (five hundred for b > 2) are off by some per cent.
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 4:
            raise ConfigError(
                f"compression.spec = '{self.spec}': bits must be from 1 to 4; try 'rot:1'"
            )

    @property
    def spec(self) -> str:
        return f"rot:{self.bits}"

    def num_bytes(self, dim: int) -> int:
        return sum(self._panel_bytes(stop - start) for start, stop in panels_of(dim))

    def paper_bits(self, dim: int) -> int:
        plans = [plan_rotation(stop - start, self.bits) for start, stop in panels_of(dim)]
        return sum(32 * plan.columns + self.bits * plan.width for plan in plans)

    def omega_squared(self, dim: int) -> float:
        return 1.0 - lloyd_max(self.bits).gain

    def moments(self, dim: int) -> Moments:
        """Return the law for every vector; noise on padding is dropped, so it does not count."""
        gain = lloyd_max(self.bits).gain
        width = sum(plan_rotation(stop - start, self.bits).width for start, stop in panels_of(dim))
        return Moments(gain=gain, noise=gain * (1.0 - gain) * dim / width)

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        rows_ND = input_rows(x_ND, random)
        num_nodes, dim = rows_ND.shape
        wire_NB = np.empty((num_nodes, self.num_bytes(dim)), dtype=np.uint8)
        for rows in _row_groups(num_nodes, dim):
            streams, offset = random.of(random.nodes[rows]), 0
            for start, stop in panels_of(dim):
                size = self._panel_bytes(stop - start)
                wire_RB = wire_NB[rows, offset : offset + size]
                self._encode_panel(rows_ND[rows, start:stop], streams, round_, start, wire_RB)
                offset += size
        return torch.from_numpy(wire_NB)

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        rows_SB = wire_rows(wire_SB, self.num_bytes(dim), random, round_)
        x_SD = np.empty((rows_SB.shape[0], dim), dtype=np.float32)
        for rows in _row_groups(rows_SB.shape[0], dim):
            streams, offset = random.of(random.nodes[rows]), 0
            for start, stop in panels_of(dim):
                size = self._panel_bytes(stop - start)
                wire_RB = rows_SB[rows, offset : offset + size]
                self._decode_panel(wire_RB, streams, round_, start, x_SD[rows, start:stop])
                offset += size
        return torch.from_numpy(x_SD)

    def _panel_bytes(self, dim: int) -> int:
        plan = plan_rotation(dim, self.bits)
        return 4 * plan.columns + packed_bytes(plan.width, self.bits)

    def _encode_panel(
        self,
        x_RD: np.ndarray,
        random: PublicRandomness,
        round_: int,
        start: int,
        wire_RB: np.ndarray,
    ) -> None:
        plan = plan_rotation(x_RD.shape[1], self.bits)
        # Pad with zeros, and scale to order one by an exact power of two: sums cannot overflow.
        rotated_RW = np.zeros((x_RD.shape[0], plan.width), dtype=np.float32)
        exponents = [
            _exponent(row_D, node, round_) for row_D, node in zip(x_RD, random.nodes, strict=True)
        ]
        for row_D, out_W, exponent in zip(x_RD, rotated_RW, exponents, strict=True):
            np.multiply(row_D, np.float32(2.0**-exponent), out=out_W[: row_D.size])
        # Rotate, then quantise column by column.
        rotate(rotated_RW, plan, random, round_, start)
        rotated_RnM = rotated_RW.reshape(len(exponents), plan.rows, plan.columns)
        symbols_RW, scales_RM = self._quantize(rotated_RnM)
        # The wire: scales with the power of two put back, then the packed symbols.
        for row, exponent in enumerate(exponents):
            scales_M = to_float32(scales_RM[row].astype(np.float64) * 2.0**exponent)
            write_floats(wire_RB[row, : 4 * plan.columns], scales_M)
            wire_RB[row, 4 * plan.columns :] = pack(symbols_RW[row], self.bits)

    def _quantize(self, z_RnM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return symbols (R, W), sign in the highest bit, and least-squares scales (R, M).

        The scale of a column is <levels, z> / |levels|^2.
        """
        negative_RnM = z_RnM < 0
        num_rows, rows, _ = z_RnM.shape
        magnitude_RnM = np.abs(z_RnM, out=z_RnM)
        # One bit: the levels are signs, so the scale is the mean magnitude.
        if self.bits == 1:
            return negative_RnM.reshape(num_rows, -1), _sum_rows(magnitude_RnM) / np.float32(rows)
        # The thresholds are those of N(0, 1): measure them in standard deviations of the column.
        quantiser = lloyd_max(self.bits)
        deviation_RM = np.sqrt(_sum_rows(np.square(magnitude_RnM)) / np.float32(rows))
        # Symbol = sign in the highest bit + number of thresholds below the magnitude.
        sign_bit = 2 ** (self.bits - 1)
        cells_RnM = negative_RnM.view(np.uint8) * np.uint8(sign_bit)
        for threshold in quantiser.thresholds:
            cells_RnM += magnitude_RnM > (deviation_RM * np.float32(threshold))[:, None]
        # Least squares on magnitudes: both sides have the same signs.
        levels_RnM = np.take(_signed_levels(self.bits), cells_RnM & np.uint8(sign_bit - 1))
        magnitude_RnM *= levels_RnM
        energy_RM = _sum_rows(np.square(levels_RnM, out=levels_RnM))
        return cells_RnM.reshape(num_rows, -1), _sum_rows(magnitude_RnM) / energy_RM

    def _decode_panel(
        self,
        wire_RB: np.ndarray,
        random: PublicRandomness,
        round_: int,
        start: int,
        x_RD: np.ndarray,
    ) -> None:
        plan = plan_rotation(x_RD.shape[1], self.bits)
        rotated_RW = np.empty((x_RD.shape[0], plan.width), dtype=np.float32)
        for wire_B, out_W in zip(wire_RB, rotated_RW, strict=True):
            out_W[:] = self._levels(wire_B[4 * plan.columns :], plan.width)
        rotate_back(rotated_RW, plan, random, round_, start)
        for node, wire_B, rotated_W, row_D in zip(
            random.nodes, wire_RB, rotated_RW, x_RD, strict=True
        ):
            scales_M = read_floats(wire_B[: 4 * plan.columns], node, round_)
            # Scaled last: rotated levels are of order one, so no sum of huge numbers can overflow.
            # Columns are rotated on their own, so their scales commute with the rotation.
            rotated_nM = rotated_W.reshape(plan.rows, plan.columns)
            with np.errstate(over="ignore"):
                rotated_nM *= scales_M
            row_D[:] = rotated_W[: row_D.size]
            # A product beyond float32 saturates, as the scale of the sender did.
            if np.max(scales_M) > 2.0**100:
                np.clip(row_D, -FLOAT32_MAX, FLOAT32_MAX, out=row_D)

    def _levels(self, wire_B: np.ndarray, width: int) -> np.ndarray:
        if self.bits == 1:
            return np.take(SIGNS_OF_BYTE, wire_B, axis=0).reshape(-1)[:width]
        return np.take(_signed_levels(self.bits), unpack(wire_B, width, self.bits))


@cache
def _signed_levels(bits: int) -> np.ndarray:
    """Return float32 (2^bits,): the level of each symbol, negative where its highest bit is set."""
    levels = np.array(lloyd_max(bits).levels, dtype=np.float32)
    return np.concatenate([levels, -levels])


def _sum_rows(x_RnM: np.ndarray) -> np.ndarray:
    """Return (R, M) sums over n; destroys `x_RnM`."""
    # Pairwise: the upper half is folded onto the lower. The order is the same on every machine, and
    # the rounding error grows with log n only.
    size = x_RnM.shape[1]
    while size > 1:
        half = (size + 1) // 2
        x_RnM[:, : size - half] += x_RnM[:, half:size]
        size = half
    return x_RnM[:, 0].copy()


def _exponent(row_D: np.ndarray, node: int, round_: int) -> int:
    """Return e with |row| < 2^e, kept within the exponents that float32 factors have."""
    # min and max hand on NaN and infinity, so one number stands for the whole row.
    largest = float(max(-np.min(row_D), np.max(row_D))) if row_D.size else 0.0
    require_finite(np.array([largest]), node, round_)
    return min(max(math.frexp(largest)[1], -125), 126)


def panels_of(dim: int) -> list[tuple[int, int]]:
    """Return (start, stop) of contiguous parts of at most _PANEL coordinates."""
    # Equal parts, rounded up to a multiple of the longest window: only the last needs padding.
    size = -(-dim // -(-dim // _PANEL) // _LENGTHS[0]) * _LENGTHS[0]
    return [(start, min(start + size, dim)) for start in range(0, dim, size)]


def _row_groups(num_rows: int, dim: int) -> list[slice]:
    """Return slices of rows that are rotated together, which saves calls when vectors are short."""
    size = max(1, _BATCH // dim)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]
