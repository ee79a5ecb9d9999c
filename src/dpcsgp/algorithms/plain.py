"""What methods without a push-sum weight share: one vector per node, a local step, and the plain
mean.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpcsgp.algorithms.base import Schedule, displacement, rate_at


class PlainState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@dataclass(frozen=True)
class Plain:
    """SGD on each node; whoever inherits adds the exchange."""

    learning_rate: Schedule

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> PlainState:
        """Start with `x = x_ND - anchor`."""
        return PlainState(*displacement(x_ND, anchor_D))

    def model(self, state: PlainState) -> Tensor:
        """Return `x0 + x`."""
        return state.anchor_D + state.x_ND

    def average(self, state: PlainState) -> Tensor:
        """Return the mean over nodes (without communication nobody computes it; shown for
        comparison)."""
        return state.anchor_D + state.x_ND.mean(0)

    def descend(self, state: PlainState, grad_ND: Tensor) -> PlainState:
        """Return the state after `x - eta g`."""
        rate = rate_at(self.learning_rate, state.step)
        return state._replace(x_ND=torch.sub(state.x_ND, grad_ND, alpha=rate), step=state.step + 1)
