"""Exact messages: whole vectors in float32, what SGP and D-PSGD share.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from torch import Tensor

from dpcsgp.algorithms.base import Network, exchange_frames
from dpcsgp.compression import frames, parse_compressor
from dpcsgp.randomness import PublicRandomness

EXACT = parse_compressor("none")


def exchange_vectors(
    x_ND: Tensor, weights_N1: Tensor, network: Network, random: PublicRandomness, round_: int
) -> tuple[Tensor, Tensor]:
    """Send `x` with the push-sum weights; return the senders' vectors (S, D) and weights (S, 1)."""
    # Exact messages take the same way as compressed ones: encode, frame, exchange, decode.
    wire_NB = EXACT.encode(x_ND, random, round_)
    weights_S1, wire_SB = exchange_frames(network, round_, weights_N1, wire_NB)
    x_SD = EXACT.decode(wire_SB, x_ND.shape[1], random.of(network.senders), round_)
    return x_SD, weights_S1


def exact_bytes(dim: int) -> int:
    """Return the bytes of one frame: a whole vector, one weight, header and tag."""
    return frames.frame_bytes(EXACT.num_bytes(dim))
