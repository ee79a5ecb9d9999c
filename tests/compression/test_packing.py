"""Packing symbols and positions loses nothing and takes exactly the stated bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcsgp.compression.packing import pack, packed_bytes, symbol_dtype, unpack
from dpcsgp.compression.sparsify import positions_bytes, read_positions, write_positions


@settings(max_examples=300, deadline=None)
@given(bits=st.integers(1, 16), dim=st.integers(0, 200), seed=st.integers(0, 2**32 - 1))
def test_packing_round_trip(bits: int, dim: int, seed: int) -> None:
    symbols = np.random.default_rng(seed).integers(0, 2**bits, dim).astype(symbol_dtype(bits))
    wire = pack(symbols, bits)
    assert wire.dtype == np.uint8
    assert wire.size == packed_bytes(dim, bits) == -(-dim * bits // 8)
    assert np.array_equal(unpack(wire, dim, bits), symbols)


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_bit_of_the_wire_carries_a_symbol(bits: int) -> None:
    dim = 24  # a multiple of eight: no padding bits
    wires = [
        pack(
            (np.arange(dim) == k).astype(symbol_dtype(bits)) * symbol_dtype(bits)(2**bits - 1), bits
        )
        for k in range(dim)
    ]
    used = np.unpackbits(np.array(wires), axis=1)
    assert (used.sum(axis=0) == 1).all()
    assert (used.sum(axis=1) == bits).all()


@pytest.mark.parametrize("bits", [2, 3, 7, 8, 9, 16])
def test_negative_symbols_keep_their_low_bits(bits: int) -> None:
    signed = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(
        np.int8 if bits <= 8 else np.int16
    )
    assert np.array_equal(
        unpack(pack(signed, bits), signed.size, bits), signed.astype(np.int64) % 2**bits
    )


@settings(max_examples=300, deadline=None)
@given(dim=st.integers(1, 5000), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_positions_round_trip(dim: int, share: float, seed: int) -> None:
    count = max(1, int(share * dim))
    positions = np.sort(np.random.default_rng(seed).permutation(dim)[:count])
    wire = write_positions(positions, dim)
    assert wire.size == positions_bytes(dim, count) <= packed_bytes(dim, 1)
    decoded = read_positions(wire, dim, count)
    assert decoded is not None
    assert np.array_equal(decoded, positions)


def test_positions_at_the_edges_of_a_large_range() -> None:
    dim = 11_000_000
    for positions in ([0], [dim - 1], [0, dim - 1], list(range(dim - 50, dim))):
        decoded = read_positions(write_positions(np.array(positions), dim), dim, len(positions))
        assert decoded is not None
        assert decoded.tolist() == positions


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), dim=st.sampled_from([10, 1000]), count=st.sampled_from([1, 9])
)
def test_bytes_that_are_no_positions_are_noticed(seed: int, dim: int, count: int) -> None:
    wire = (
        np.random.default_rng(seed).integers(0, 256, positions_bytes(dim, count)).astype(np.uint8)
    )
    decoded = read_positions(wire, dim, count)
    assert decoded is None or (
        decoded.size == count and (np.diff(decoded) > 0).all() and decoded[-1] < dim
    )
