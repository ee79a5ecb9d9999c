"""CHOCO-SGD: error-feedback compression on undirected graphs (Koloskova et al., ICML 2019).

`x <- x - eta g`, then `q = Q(x - x_hat)`, `x_hat <- x_hat + q`, `x <- x + gamma sum_j w_ij (x_hat_j
- x_hat_i)` with doubly stochastic weights: DP-CSGP without the push-sum weight.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Network, Schedule, displacement
from dpcsgp.algorithms.dp_csgp import check_mixing_rate
from dpcsgp.algorithms.error_feedback import (
    PublicCopies,
    add_rows,
    exchange_differences,
    residual_ratio,
)
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.compression import Compressor, frames
from dpcsgp.randomness import PublicRandomness


class ChocoState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    x_hat_ND: Tensor
    pull_ND: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@final
@dataclass(frozen=True)
class ChocoSGD(GossipSGD[ChocoState]):
    """Compressed averaging on an undirected graph.

    The network's weights must be doubly stochastic (`graphs.metropolis_weights`).
    """

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND",)

    compressor: Compressor
    learning_rate: Schedule
    mixing_rate: float = 1.0

    def __post_init__(self) -> None:
        check_mixing_rate(self.mixing_rate)

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> ChocoState:
        """Start with `x = x_ND - anchor` and `x_hat = 0`."""
        x_ND, anchor_D = displacement(x_ND, anchor_D)
        return ChocoState(x_ND, *PublicCopies.zeros_like(x_ND), anchor_D)

    def model(self, state: ChocoState) -> Tensor:
        """Return `x0 + x`."""
        return state.anchor_D + state.x_ND

    def average(self, state: ChocoState) -> Tensor:
        """Return the mean over nodes: gossip does not change it."""
        return state.anchor_D + state.x_ND.mean(0)

    def gossip(self, state: ChocoState, network: Network, random: PublicRandomness) -> ChocoState:
        """Return the state after one compressed averaging."""
        # Frames have a place for a push-sum weight; here it is 1 and nobody reads it.
        ones_N1 = torch.ones(state.x_ND.shape[0], 1, dtype=torch.float64)
        copies = PublicCopies(state.x_hat_ND, state.pull_ND)
        # q = Q(x - x_hat), x_hat <- x_hat + q.
        copies, _ = exchange_differences(
            self.compressor, state.x_ND, copies, ones_N1, network, random, state.round
        )
        # x <- x + gamma sum_j w_ij (x_hat_j - x_hat_i).
        x_ND = add_rows(state.x_ND.clone(), copies.pull_ND, self.mixing_rate)
        return state._replace(
            x_ND=x_ND, x_hat_ND=copies.x_hat_ND, pull_ND=copies.pull_ND, round=state.round + 1
        )

    def residual_ratio(self, state: ChocoState) -> float:
        """Return the mean over nodes of `|x - x_hat| / |x|`."""
        return residual_ratio(state.x_ND, state.x_hat_ND)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames of compressed differences."""
        return rounds * frames.frame_bytes(self.compressor.num_bytes(dim))

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count compressed differences by their formula."""
        return rounds * self.compressor.paper_bits(dim)


def build(settings: MethodSettings) -> ChocoSGD:
    """Return `choco-sgd`."""
    return ChocoSGD(settings.compressor, settings.learning_rate, settings.mixing_rate)
