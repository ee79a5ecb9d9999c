"""D-PSGD: decentralized parallel SGD with exact averaging (Lian et al., NeurIPS 2017); with noise,
DP2SGD.

`x_i <- sum_j w_ij (x_j - eta g_j)` with symmetric, doubly stochastic weights on an undirected
graph, so no push-sum weight is needed. DP2SGD (Yu et al., 2021) is the same with clipped, noised
gradients: the baseline of the DP-CSGP paper.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import Network, swap
from dpcsgp.algorithms.plain import Plain, PlainState
from dpcsgp.algorithms.sgp import EXACT
from dpcsgp.compression import frames
from dpcsgp.randomness import PublicRandomness


@final
@dataclass(frozen=True)
class DecentralizedSGD(Plain):
    """Exact averaging; the network's weights must be doubly stochastic
    (`graphs.metropolis_weights`)."""

    def gossip(self, state: PlainState, network: Network, random: PublicRandomness) -> PlainState:
        """Return the state after one exact averaging."""
        ones_N1 = torch.ones(state.x_ND.shape[0], 1, dtype=torch.float64)
        _, wire_SB = swap(
            network, state.round, ones_N1, EXACT.encode(state.x_ND, random, state.round)
        )
        x_SD = EXACT.decode(wire_SB, state.x_ND.shape[1], random.of(network.senders), state.round)
        return state._replace(
            x_ND=network.mix(x_SD, torch.zeros_like(state.x_ND)), round=state.round + 1
        )

    def step(
        self, state: PlainState, grad_ND: Tensor, network: Network, random: PublicRandomness
    ) -> PlainState:
        """Return the state after one iteration."""
        return self.gossip(self.descend(state, grad_ND), network, random)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames of whole models."""
        return rounds * frames.frame_bytes(EXACT.num_bytes(dim))

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count 32 bits per coordinate."""
        return rounds * EXACT.paper_bits(dim)
