"""Bits to bytes: pack b-bit symbols densely for every b from 1 to 16.

The coordinates are cut into a head whose length is a multiple of eight and a tail of at most seven.
In the head a symbol falls into pieces of 8, 4, 2 and 1 bits (the binary digits of b; 13 = 8 + 4 +
1), and each kind of piece fills its own plane. A plane of w-bit pieces is cut into 8 / w equal runs
that lie on top of each other, so packing is a few shifts of whole contiguous runs. The tail is a
plain string of bits. Together that is exactly ceil(D b / 8) bytes.

Legend: D coordinates, B bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_MAX_BITS = 16

# Row k holds the factors +1 (bit 0) and -1 (bit 1) for the eight bits of the byte k, lowest first.
SIGNS_OF_BYTE = 1 - 2 * np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(np.float32)


def packed_bytes(dim: int, bits: int) -> int:
    """Return ceil(dim * bits / 8).

    >>> packed_bytes(10, 3)
    4
    """
    return (dim * bits + 7) // 8


def symbol_dtype(bits: int) -> type[np.uint8] | type[np.uint16]:
    """Return the smallest unsigned type that holds a symbol."""
    return np.uint8 if bits <= 8 else np.uint16


def pack(symbols_D: np.ndarray, bits: int) -> np.ndarray:
    """Pack the low `bits` bits of each symbol into uint8 (packed_bytes(D, bits),).

    The symbols are integers, signed or not; for one bit also booleans.

    >>> pack(np.array([1, 0, 3], dtype=np.uint8), bits=2).tolist()
    [49]
    """
    if bits == 1:
        return np.packbits(
            symbols_D & 1 if symbols_D.dtype != np.bool_ else symbols_D, bitorder="little"
        )
    symbols_D = symbols_D.view(symbol_dtype(bits))
    # The head: a multiple of eight symbols, so that every plane ends at a byte.
    head = symbols_D.size - symbols_D.size % 8
    wire_B = np.empty(packed_bytes(symbols_D.size, bits), dtype=np.uint8)
    for plane, width, shift in _planes(head, bits):
        _stack_runs(_piece(symbols_D[:head], shift, width), width, wire_B[plane])
    # The tail: at most seven symbols, bit by bit.
    wire_B[head * bits // 8 :] = _pack_tail(symbols_D[head:], bits)
    return wire_B


def unpack(wire_B: np.ndarray, dim: int, bits: int) -> np.ndarray:
    """Return the `dim` symbols as uint8 (bits <= 8) or uint16.

    >>> unpack(np.array([49], dtype=np.uint8), dim=3, bits=2).tolist()
    [1, 0, 3]
    """
    if bits == 1:
        return np.unpackbits(wire_B, count=dim, bitorder="little")
    head = dim - dim % 8
    symbols_D = np.zeros(dim, dtype=symbol_dtype(bits))
    for plane, width, shift in _planes(head, bits):
        _spread_runs(wire_B[plane], width, shift, symbols_D[:head])
    symbols_D[head:] = _unpack_tail(wire_B[head * bits // 8 :], dim - head, bits)
    return symbols_D


def _planes(head: int, bits: int) -> Iterator[tuple[slice, int, int]]:
    """Yield (bytes of the plane, width of its pieces, position of the piece in the symbol)."""
    start = shift = 0
    # The binary digits of `bits`; 16 has no digit below 16 and takes two whole bytes.
    widths = [8, 8] if bits == _MAX_BITS else [width for width in (8, 4, 2, 1) if bits & width]
    for width in widths:
        stop = start + head * width // 8
        yield slice(start, stop), width, shift
        start, shift = stop, shift + width


def _piece(symbols_D: np.ndarray, shift: int, width: int) -> np.ndarray:
    """Return bits shift .. shift + width of every symbol as uint8."""
    shifted_D = symbols_D >> shift if shift else symbols_D
    if shifted_D.dtype != np.uint8:
        shifted_D = shifted_D.astype(np.uint8)  # keeps the low byte
    return shifted_D & (2**width - 1) if width < 8 else shifted_D


def _stack_runs(pieces_D: np.ndarray, width: int, plane_B: np.ndarray) -> None:
    """Lay 8 / width runs of pieces over each other: byte k holds piece k of every run."""
    runs = pieces_D.reshape(8 // width, -1)
    plane_B[:] = runs[0]
    for position in range(1, runs.shape[0]):
        # A product by a power of two is a shift, and numpy has a vector instruction for it.
        np.bitwise_or(plane_B, runs[position] * np.uint8(1 << (position * width)), out=plane_B)


def _spread_runs(plane_B: np.ndarray, width: int, shift: int, symbols_D: np.ndarray) -> None:
    """Undo `_stack_runs`: or the pieces of a plane into the symbols at bit `shift`."""
    runs = symbols_D.reshape(8 // width, -1)
    for position in range(runs.shape[0]):
        piece_B = plane_B >> (position * width) if position else plane_B
        if width < 8:
            piece_B = piece_B & (2**width - 1)
        if shift:
            # Widen first: a piece of the upper byte would be shifted out of uint8.
            piece_B = piece_B.astype(symbols_D.dtype) << shift
        np.bitwise_or(runs[position], piece_B, out=runs[position])


def _pack_tail(symbols_D: np.ndarray, bits: int) -> np.ndarray:
    bits_Db = (symbols_D[:, None] >> np.arange(bits, dtype=symbols_D.dtype)) & 1
    return np.packbits(bits_Db.astype(np.uint8).reshape(-1), bitorder="little")


def _unpack_tail(wire_B: np.ndarray, dim: int, bits: int) -> np.ndarray:
    bits_Db = np.unpackbits(wire_B, count=dim * bits, bitorder="little").reshape(dim, bits)
    return (bits_Db.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(axis=1)
