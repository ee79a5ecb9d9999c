"""D-PSGD: decentralized parallel SGD with exact averaging; with noise, DP2SGD.

D-PSGD is due to Lian et al. (NeurIPS 2017).

`x_i <- sum_j w_ij (x_j - eta g_j)` with symmetric, doubly stochastic weights on an undirected
graph, so no push-sum weight is needed. DP2SGD (Yu et al., 2021) is the same with clipped, noised
gradients: the baseline of the DP-CSGP paper.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from dpcsgp.algorithms.base import Network
from dpcsgp.algorithms.exact import EXACT, exact_bytes, exchange_vectors
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.algorithms.plain import Plain, PlainState
from dpcsgp.randomness import PublicRandomness


@final
@dataclass(frozen=True)
class DecentralizedSGD(Plain):
    """Exact averaging on an undirected graph.

    The network's weights must be doubly stochastic (`graphs.metropolis_weights`).
    """

    def gossip(self, state: PlainState, network: Network, random: PublicRandomness) -> PlainState:
        """Return the state after one exact averaging."""
        # Frames have a place for a push-sum weight; here it is 1 and nobody reads it.
        ones_N1 = torch.ones(state.x_ND.shape[0], 1, dtype=torch.float64)
        x_SD, _ = exchange_vectors(state.x_ND, ones_N1, network, random, state.round)
        # x_i <- sum_j w_ij x_j, the own share included.
        return state._replace(
            x_ND=network.mix(x_SD, torch.zeros_like(state.x_ND)), round=state.round + 1
        )

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames of whole models."""
        return rounds * exact_bytes(dim)

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count 32 bits per coordinate."""
        return rounds * EXACT.paper_bits(dim)


def build(settings: MethodSettings) -> DecentralizedSGD:
    """Return `d-psgd` and, with noise, `dp2sgd`."""
    return DecentralizedSGD(settings.learning_rate)
