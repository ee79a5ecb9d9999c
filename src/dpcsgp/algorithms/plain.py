"""What methods without a push-sum weight share.

One vector per node, a local step, and the plain mean.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Schedule, displacement


class PlainState(NamedTuple):
    """One row per hosted node; x is a displacement from the public anchor."""

    x_ND: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@dataclass(frozen=True)
class Plain(GossipSGD[PlainState]):
    """SGD on each node; whoever inherits adds the exchange."""

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND",)

    learning_rate: Schedule

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> PlainState:
        """Start with `x = x_ND - anchor`."""
        return PlainState(*displacement(x_ND, anchor_D))

    def model(self, state: PlainState) -> Tensor:
        """Return `x0 + x`."""
        return state.anchor_D + state.x_ND

    def average(self, state: PlainState) -> Tensor:
        """Return the mean over nodes.

        Without communication nobody computes it; it is shown for comparison.
        """
        return state.anchor_D + state.x_ND.mean(0)

    def residual_ratio(self, state: PlainState) -> None:
        """Return None: nothing is fed back."""
