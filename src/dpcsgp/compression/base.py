"""What every compressor promises, and the checks they share.

A compressor turns vectors into the bytes that really travel and back. Decoding is a function of the
bytes, the sender and the step alone, so every receiver adds the same numbers, bit for bit. Encoding
a row never looks at the other rows, so a process that hosts one node and a simulator that hosts all
of them write the same bytes.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpcsgp.errors import ConfigError, DivergenceError, WireError
from dpcsgp.randomness import PublicRandomness

# Kernels walk long vectors in tiles of this many coordinates: the scratch of a tile stays in the
# second-level cache.
TILE = 32768

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Moments:
    """State the law of a compressor: E Q(v) = gain v and E|Q(v) - gain v|^2 = noise |v|^2.

    The error is spread over the coordinates and independent between nodes and steps.
    """

    gain: float
    noise: float


class Compressor(Protocol):
    """Turn float32 vectors into bytes and back; `random.nodes` are the senders of the rows."""

    @property
    def spec(self) -> str:
        """Return the canonical spelling: `parse_compressor(c.spec) == c`."""
        ...

    def num_bytes(self, dim: int) -> int:
        """Return the exact size of one encoded vector, whatever its values."""
        ...

    def paper_bits(self, dim: int) -> int:
        """Return the bits that the method's formula books: values, symbols and scales, without
        padding."""
        ...

    def omega_squared(self, dim: int) -> float:
        """Return the bound in E|Q(v) - v|^2 <= omega^2 |v|^2."""
        ...

    def moments(self, dim: int) -> Moments | None:
        """Return gain and noise, or None where the error depends on the shape of the vector."""
        ...

    def encode(self, x_ND: Tensor, random: PublicRandomness, step: int) -> Tensor:
        """Return uint8 (N, num_bytes(D))."""
        ...

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, step: int) -> Tensor:
        """Return float32 (S, dim)."""
        ...


def input_rows(x_ND: Tensor, random: PublicRandomness) -> np.ndarray:
    """Check the vectors to encode and return them as float32 rows that are contiguous one by
    one."""
    if x_ND.ndim != 2 or x_ND.dtype != torch.float32 or x_ND.shape[1] < 1:
        raise ConfigError(
            f"encode: x of shape {tuple(x_ND.shape)} and {x_ND.dtype}: expected float32 (N, D) "
            "with D >= 1; "
            "flatten the model with ParameterLayout first"
        )
    if x_ND.shape[0] != len(random.nodes):
        raise ConfigError(
            f"encode: {x_ND.shape[0]} rows but random.nodes = {random.nodes}: expected one node "
            "per row"
        )
    x_ND = x_ND.detach().cpu()
    return (x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()).numpy()


def wire_rows(wire_SB: Tensor, num_bytes: int, random: PublicRandomness, step: int) -> np.ndarray:
    """Check the bytes to decode and return them as uint8 rows that are contiguous one by one."""
    expected = (len(random.nodes), num_bytes)
    if tuple(wire_SB.shape) != expected or wire_SB.dtype != torch.uint8:
        raise WireError(
            f"payload of senders {random.nodes} at step {step}: got {wire_SB.dtype} "
            f"{tuple(wire_SB.shape)}, expected "
            f"uint8 {expected}; all nodes must use one compression.spec"
        )
    wire_SB = wire_SB.cpu()
    return (wire_SB if num_bytes < 2 or wire_SB.stride(1) == 1 else wire_SB.contiguous()).numpy()


def require_finite(values: np.ndarray, node: int, step: int) -> np.ndarray:
    """Return `values`, or raise DivergenceError with node and step if one of them is not finite."""
    if values.size and not (
        np.isfinite(np.min(values)) and np.isfinite(np.max(values))
    ):  # min and max pass NaN on
        raise DivergenceError(
            f"node {node}, step {step}: the message holds a value that is not finite; "
            "lower algorithm.mixing_rate or algorithm.learning_rate, or ask `dpcsgp doctor` for "
            "a stable rate"
        )
    return values


def read_floats(wire_B: np.ndarray, node: int, step: int) -> np.ndarray:
    """Return the little-endian float32 numbers in `wire_B` after checking that all are finite."""
    return require_finite(wire_B.view("<f4").astype(np.float32), node, step)


def write_floats(wire_B: np.ndarray, values: np.ndarray) -> None:
    """Store `values` into `wire_B` as little-endian float32."""
    wire_B[:] = np.ascontiguousarray(values, dtype="<f4").view(np.uint8)


def to_float32(values: np.ndarray) -> np.ndarray:
    """Round non-negative float64 scales to float32; what overflows becomes the largest finite
    number."""
    return np.minimum(values, FLOAT32_MAX).astype(np.float32)
