"""SGP: stochastic gradient push, exact push-sum on a digraph; with noise, DP-SGP.

SGP is due to Assran et al. (ICML 2019).

`x <- sum_j a_ij (x_j - eta g_j)`, `y <- sum_j a_ij y_j`, `z = x0 + x / y`. This is DP-CSGP with the
identity as compressor and mixing rate 1, without the two vectors that error feedback needs.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Network, Schedule, displacement
from dpcsgp.algorithms.exact import EXACT, exact_bytes, exchange_vectors
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.randomness import PublicRandomness


class SGPState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    y_N1: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@final
@dataclass(frozen=True)
class SGP(GossipSGD[SGPState]):
    """Exact push-sum gossip: every message is a whole model in float32."""

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND", "y_N1")

    learning_rate: Schedule

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> SGPState:
        """Start with `x = x_ND - anchor` and `y = 1`."""
        x_ND, anchor_D = displacement(x_ND, anchor_D)
        return SGPState(
            x_ND, torch.ones(x_ND.shape[0], 1, dtype=torch.float64, device=x_ND.device), anchor_D
        )

    def model(self, state: SGPState) -> Tensor:
        """Return `z = x0 + x / y`."""
        return state.anchor_D + state.x_ND / state.y_N1.to(state.x_ND.dtype)

    def average(self, state: SGPState) -> Tensor:
        """Return `x0 + sum_i x_i / sum_i y_i`."""
        return state.anchor_D + (state.x_ND.sum(0, dtype=torch.float64) / state.y_N1.sum()).to(
            state.x_ND.dtype
        )

    def gossip(self, state: SGPState, network: Network, random: PublicRandomness) -> SGPState:
        """Return the state after one exact push-sum exchange."""
        # Everybody sends x and y as they are.
        x_SD, y_S1 = exchange_vectors(state.x_ND, state.y_N1, network, random, state.round)
        # x <- sum_j a_ij x_j and y <- sum_j a_ij y_j: the columns of A sum to 1, so no mass is
        # lost.
        x_ND = network.mix(x_SD, torch.zeros_like(state.x_ND))
        return state._replace(x_ND=x_ND, y_N1=network.mix(y_S1), round=state.round + 1)

    def residual_ratio(self, state: SGPState) -> None:
        """Return None: nothing is fed back."""

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames of whole models."""
        return rounds * exact_bytes(dim)

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count 32 bits per coordinate."""
        return rounds * EXACT.paper_bits(dim)


def build(settings: MethodSettings) -> SGP:
    """Return `sgp` and, with noise, `dp-sgp`."""
    return SGP(settings.learning_rate)
