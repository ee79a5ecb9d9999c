"""D-PSGD: decentralized parallel SGD with exact averaging (Lian et al., NeurIPS 2017); with noise, DP2SGD.

`x_i <- sum_j w_ij (x_j - eta g_j)` with symmetric, doubly stochastic weights on an undirected graph, so no push-sum
weight is needed. DP2SGD (Yu et al., 2021) is the same with clipped, noised gradients: the baseline of the DP-CSGP paper.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import Network, Schedule, displacement, rate_at, swap
from dpcsgp.algorithms.sgp import EXACT
from dpcsgp.compression import frames
from dpcsgp.randomness import PublicRandomness


class DPSGDState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@final
@dataclass(frozen=True)
class DPSGD:
    """Exact averaging; the network's weights must be doubly stochastic (`graphs.metropolis_weights`)."""

    learning_rate: Schedule

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> DPSGDState:
        """Start with `x = x_ND - anchor`."""
        return DPSGDState(*displacement(x_ND, anchor_D))

    def model(self, state: DPSGDState) -> Tensor:
        """Return `x0 + x`."""
        return state.anchor_D + state.x_ND

    def average(self, state: DPSGDState) -> Tensor:
        """Return the mean over nodes."""
        return state.anchor_D + state.x_ND.mean(0)

    def descend(self, state: DPSGDState, grad_ND: Tensor) -> DPSGDState:
        """Return the state after `x - eta g`."""
        rate = rate_at(self.learning_rate, state.step)
        return state._replace(x_ND=torch.sub(state.x_ND, grad_ND, alpha=rate), step=state.step + 1)

    def gossip(self, state: DPSGDState, network: Network, random: PublicRandomness) -> DPSGDState:
        """Return the state after one exact averaging."""
        ones_N1 = torch.ones(state.x_ND.shape[0], 1, dtype=torch.float64)
        _, wire_SB = swap(network, state.round, ones_N1, EXACT.encode(state.x_ND, random, state.round))
        x_SD = EXACT.decode(wire_SB, state.x_ND.shape[1], random.of(network.senders), state.round)
        return state._replace(x_ND=network.mix(x_SD, torch.zeros_like(state.x_ND)), round=state.round + 1)

    def step(self, state: DPSGDState, grad_ND: Tensor, network: Network, random: PublicRandomness) -> DPSGDState:
        """Return the state after one iteration."""
        return self.gossip(self.descend(state, grad_ND), network, random)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames of whole models."""
        return rounds * frames.frame_bytes(EXACT.num_bytes(dim))

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count 32 bits per coordinate."""
        return rounds * EXACT.paper_bits(dim)
