"""Block gossip: exact push-sum on one block of coordinates per round.

It needs no error feedback and is stable on every digraph.

The coordinates are cut into K public random blocks. Round t exchanges block `t mod K` (or a
publicly drawn one), and each block has its own push-sum weight, so every block sees an exact
push-sum, only K times more seldom. A node keeps one model-sized vector. With a compressor, what was
not sent stays with the sender: `x_i <- x_i - q_i + sum_j a_ij q_j`.

Legend: N hosted nodes, S senders heard, D coordinates, K blocks, M coordinates of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Network, Schedule, displacement, exchange_frames
from dpcsgp.algorithms.exact import EXACT
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.compression import Compressor, frames
from dpcsgp.errors import ConfigError
from dpcsgp.randomness import PublicRandomness, numpy_generator


class BlockState(NamedTuple):
    """One row per hosted node; `y_NK` has one push-sum weight per block."""

    x_ND: Tensor
    y_NK: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


@lru_cache(maxsize=8)
def block_indices(dim: int, num_blocks: int) -> tuple[Tensor, ...]:
    """Return the coordinates of each block: a public random cut into K parts.

    The sizes of the parts differ by at most one.
    """
    # Always the same seed: the cut is public and follows from dim and K alone.
    order = numpy_generator(0, f"blocks {dim}").permutation(dim)
    return tuple(torch.from_numpy(np.sort(part)) for part in np.array_split(order, num_blocks))


@final
@dataclass(frozen=True)
class DPBlock(GossipSGD[BlockState]):
    """Exact push-sum on one block of coordinates per round."""

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND", "y_NK")

    learning_rate: Schedule
    num_blocks: int
    order: Literal["round-robin", "random"] = "round-robin"
    compressor: Compressor = EXACT

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ConfigError(f"algorithm.num_blocks = {self.num_blocks}: expected 1 or more")

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> BlockState:
        """Start with `x = x_ND - anchor` and `y = 1` for every block."""
        if self.num_blocks > x_ND.shape[1]:
            raise ConfigError(
                f"algorithm.num_blocks = {self.num_blocks}: the model has only {x_ND.shape[1]} "
                "coordinates; use fewer"
            )
        x_ND, anchor_D = displacement(x_ND, anchor_D)
        y_NK = torch.ones(x_ND.shape[0], self.num_blocks, dtype=torch.float64, device=x_ND.device)
        return BlockState(x_ND, y_NK, anchor_D)

    def model(self, state: BlockState) -> Tensor:
        """Return `z = x0 + x / y`, each coordinate with the weight of its block."""
        z_ND = state.x_ND.clone()
        for block, index_M in enumerate(block_indices(state.x_ND.shape[1], self.num_blocks)):
            z_ND[:, index_M] /= state.y_NK[:, block : block + 1].to(z_ND.dtype)
        return z_ND.add_(state.anchor_D)

    def average(self, state: BlockState) -> Tensor:
        """Return `x0 + sum_i x_i / n`: the weights of a block sum to n."""
        return state.anchor_D + state.x_ND.mean(0)

    def gossip(self, state: BlockState, network: Network, random: PublicRandomness) -> BlockState:
        """Return the state after one exact exchange of one block."""
        # The block of this round, the same for everybody.
        block = self.block_of_round(state.round, random)
        index_M = block_indices(state.x_ND.shape[1], self.num_blocks)[block]
        part_NM = state.x_ND[:, index_M]
        # Send the block and its own push-sum weight.
        wire_NB = self.compressor.encode(part_NM, random, state.round)
        y_S1, wire_SB = exchange_frames(
            network, state.round, state.y_NK[:, block : block + 1], wire_NB
        )
        q_SM = self.compressor.decode(
            wire_SB, len(index_M), random.of(network.senders), state.round
        )
        # What the compressor left out stays with the sender, so that no mass is lost.
        kept_NM = part_NM - q_SM[list(network.own_rows)]
        # x <- x - q + sum_j a_ij q_j and y <- sum_j a_ij y_j, on this block only.
        x_ND, y_NK = state.x_ND.clone(), state.y_NK.clone()
        x_ND[:, index_M] = network.mix(q_SM, kept_NM)
        y_NK[:, block : block + 1] = network.mix(y_S1)
        return state._replace(x_ND=x_ND, y_NK=y_NK, round=state.round + 1)

    def residual_ratio(self, state: BlockState) -> None:
        """Return None: nothing is fed back."""

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count the frames of the blocks that went round.

        For a random order, the largest block is counted each time.
        """
        return sum(
            frames.frame_bytes(self.compressor.num_bytes(size)) for size in self._sizes(dim, rounds)
        )

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count the compressed blocks, 32 bits per coordinate if they are exact."""
        return sum(self.compressor.paper_bits(size) for size in self._sizes(dim, rounds))

    def _sizes(self, dim: int, rounds: int) -> list[int]:
        sizes = [len(index_M) for index_M in block_indices(dim, self.num_blocks)]
        # The first block is one of the largest: an upper bound, whatever will be drawn.
        if self.order == "random":
            return [sizes[0]] * rounds
        return [sizes[round_ % self.num_blocks] for round_ in range(rounds)]

    def block_of_round(self, round_: int, random: PublicRandomness) -> int:
        """Return the block that a round exchanges; everybody knows it."""
        if self.order == "round-robin":
            return round_ % self.num_blocks
        # A draw that all nodes repeat from the public seed.
        return int(
            random.common_bytes("block order", round_, 8).view(np.uint64)[0] % self.num_blocks
        )


def build(settings: MethodSettings) -> DPBlock:
    """Return `dp-block`."""
    return DPBlock(
        settings.learning_rate, settings.num_blocks, settings.block_order, settings.compressor
    )
