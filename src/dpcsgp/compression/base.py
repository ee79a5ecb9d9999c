"""What every compressor promises, and the checks they share.

A compressor turns vectors into the bytes that really travel and back. Decoding is a function of the
bytes, the sender and the round alone, so every receiver adds the same numbers, bit for bit.
Encoding a row never looks at the other rows, so a process that hosts one node and a simulator that
hosts all of them write the same bytes.

A *round* is one exchange of messages. With `algorithm.gossip_every` above 1 there are fewer rounds
than gradient steps; `naming_gradient_step` adds the step to an error that knows only the round.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    The error is spread over the coordinates and independent between nodes and rounds.

    Attributes:
        gain: share of the vector that arrives on average (no unit).
        noise: variance of the rest, in units of |v|^2.
    """

    gain: float
    noise: float


class Compressor(Protocol):
    """Turn float32 vectors into bytes and back.

    `random` holds the public streams of the senders: row k belongs to node `random.nodes[k]`.
    `round_` counts the exchanges of the run from 0 and picks the randomness of this message.
    """

    @property
    def spec(self) -> str:
        """Return the canonical spelling: `parse_compressor(c.spec) == c`."""
        ...

    def num_bytes(self, dim: int) -> int:
        """Return the exact size in bytes of one encoded vector of `dim` float32 numbers."""
        ...

    def paper_bits(self, dim: int) -> int:
        """Return the bits that the method's formula books: values, symbols, scales; no padding."""
        ...

    def omega_squared(self, dim: int) -> float:
        """Return the bound omega^2 in E|Q(v) - v|^2 <= omega^2 |v|^2, for the worst vector."""
        ...

    def moments(self, dim: int) -> Moments | None:
        """Return gain and noise, or None where the error depends on the shape of the vector."""
        ...

    def encode(self, x_ND: Tensor, random: PublicRandomness, round_: int) -> Tensor:
        """Encode one vector per hosted node.

        Args:
            x_ND: float32 (N, D), one row per node in `random.nodes`.
            random: public streams of the hosted nodes.
            round_: number of exchanges before this one.

        Returns:
            uint8 (N, num_bytes(D)).

        Raises:
            ConfigError: shape, type or number of rows is wrong.
            DivergenceError: a value is not finite; names node and round.
        """
        ...

    def decode(self, wire_SB: Tensor, dim: int, random: PublicRandomness, round_: int) -> Tensor:
        """Decode one vector per sender.

        Args:
            wire_SB: uint8 (S, num_bytes(dim)), one row per node in `random.nodes`.
            dim: coordinates of a vector.
            random: public streams of the senders.
            round_: the round in which the senders encoded.

        Returns:
            float32 (S, dim).

        Raises:
            WireError: the bytes are not what `encode` writes; names senders and round.
            DivergenceError: a value is not finite; names sender and round.
        """
        ...


@contextmanager
def naming_gradient_step(step: int) -> Iterator[None]:
    """Add the gradient step to errors of an exchange, which know only their round."""
    try:
        yield
    except (WireError, DivergenceError) as error:
        error.args = (f"gradient step {step}, {error}",)
        raise


def input_rows(x_ND: Tensor, random: PublicRandomness) -> np.ndarray:
    """Check the vectors to encode and return float32 rows, each contiguous in memory."""
    if x_ND.ndim != 2 or x_ND.dtype != torch.float32 or x_ND.shape[1] < 1:
        raise ConfigError(
            f"encode: x of shape {tuple(x_ND.shape)} and {x_ND.dtype}: expected float32 (N, D) "
            "with D >= 1; flatten the model with ParameterLayout first"
        )
    if x_ND.shape[0] != len(random.nodes):
        raise ConfigError(
            f"encode: {x_ND.shape[0]} rows but random.nodes = {random.nodes}: expected one node "
            "per row"
        )
    x_ND = x_ND.detach().cpu()
    return (x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()).numpy()


def wire_rows(wire_SB: Tensor, num_bytes: int, random: PublicRandomness, round_: int) -> np.ndarray:
    """Check the bytes to decode and return uint8 rows, each contiguous in memory."""
    expected = (len(random.nodes), num_bytes)
    if tuple(wire_SB.shape) != expected or wire_SB.dtype != torch.uint8:
        raise WireError(
            f"payload of senders {random.nodes} in round {round_}: got {wire_SB.dtype} "
            f"{tuple(wire_SB.shape)}, expected uint8 {expected}; "
            "all nodes must use one compression.spec"
        )
    wire_SB = wire_SB.cpu()
    return (wire_SB if num_bytes < 2 or wire_SB.stride(1) == 1 else wire_SB.contiguous()).numpy()


def require_finite(values: np.ndarray, node: int, round_: int) -> np.ndarray:
    """Return `values`; raise DivergenceError with node and round if one is not finite."""
    # Two reductions instead of a mask of D flags: min and max hand on a NaN.
    if values.size and not (np.isfinite(np.min(values)) and np.isfinite(np.max(values))):
        raise DivergenceError(
            f"node {node}, round {round_}: the message holds a value that is not finite; "
            "lower algorithm.mixing_rate or algorithm.learning_rate, "
            "or ask `dpcsgp doctor` for a stable rate"
        )
    return values


def read_floats(wire_B: np.ndarray, node: int, round_: int) -> np.ndarray:
    """Return the little-endian float32 numbers in `wire_B`; all must be finite."""
    return require_finite(wire_B.view("<f4").astype(np.float32), node, round_)


def write_floats(wire_B: np.ndarray, values: np.ndarray) -> None:
    """Store `values` into `wire_B` as little-endian float32."""
    wire_B[:] = np.ascontiguousarray(values, dtype="<f4").view(np.uint8)


def to_float32(values: np.ndarray) -> np.ndarray:
    """Round non-negative float64 scales to float32."""
    # A scale beyond float32 saturates: receivers refuse a message with an infinity.
    return np.minimum(values, FLOAT32_MAX).astype(np.float32)
