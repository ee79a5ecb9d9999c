"""No communication: every node alone (`local`), or all data in one place (`dp-sgd`).

In comparisons `local` is the lower line and `dp-sgd` the upper one.

`x <- x - eta g`; with clipped, noised gradients this is DP-SGD (Abadi et al., CCS 2016).

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpcsgp.algorithms.base import Network
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.algorithms.plain import Plain, PlainState
from dpcsgp.randomness import PublicRandomness


@final
@dataclass(frozen=True)
class Local(Plain):
    """SGD on each node by itself."""

    def gossip(self, state: PlainState, network: Network, random: PublicRandomness) -> PlainState:
        """Return the state unchanged: nothing is sent."""
        # Rounds are counted all the same, so that schedules and records look alike.
        return state._replace(round=state.round + 1)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count nothing."""
        return 0

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count nothing."""
        return 0


def build(settings: MethodSettings) -> Local:
    """Return `local` and, with all data in one place, `dp-sgd`."""
    return Local(settings.learning_rate)
