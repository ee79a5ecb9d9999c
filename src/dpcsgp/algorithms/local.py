"""No communication: every node alone (`local`, the lower line), or all data in one place (`dp-sgd`, the upper line).

`x <- x - eta g`; with clipped, noised gradients this is DP-SGD (Abadi et al., CCS 2016).

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import Network, Schedule, displacement, rate_at
from dpcsgp.randomness import PublicRandomness


class LocalState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@final
@dataclass(frozen=True)
class Local:
    """SGD on each node by itself."""

    learning_rate: Schedule

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> LocalState:
        """Start with `x = x_ND - anchor`."""
        return LocalState(*displacement(x_ND, anchor_D))

    def model(self, state: LocalState) -> Tensor:
        """Return `x0 + x`."""
        return state.anchor_D + state.x_ND

    def average(self, state: LocalState) -> Tensor:
        """Return the mean over nodes (which nobody computes without communication; shown for comparison)."""
        return state.anchor_D + state.x_ND.mean(0)

    def descend(self, state: LocalState, grad_ND: Tensor) -> LocalState:
        """Return the state after `x - eta g`."""
        rate = rate_at(self.learning_rate, state.step)
        return state._replace(x_ND=torch.sub(state.x_ND, grad_ND, alpha=rate), step=state.step + 1)

    def gossip(self, state: LocalState, network: Network, random: PublicRandomness) -> LocalState:
        """Return the state unchanged: nothing is sent."""
        return state._replace(round=state.round + 1)

    def step(self, state: LocalState, grad_ND: Tensor, network: Network, random: PublicRandomness) -> LocalState:
        """Return the state after one iteration."""
        return self.gossip(self.descend(state, grad_ND), network, random)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count nothing."""
        return 0

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count nothing."""
        return 0
