"""DP-CSGP: private stochastic gradient push with compressed communication (arXiv 2512.13583).

| symbol | meaning | Algorithm 1 |
|---|---|---|
| `x_ND` | push-sum numerator minus the public anchor; between steps the paper's w | lines 6, 12 |
| `x_hat_ND`, `pull_ND` | see `error_feedback` | lines 2, 5, 6 |
| `y_N1` | push-sum weight | line 7 |
| `z = x0 + x / y` | de-biased model: trained, evaluated, published | line 8 |

The loop is entered at line 9 with y = 1: at the paper's first lines x is still zero and only y
would move. The mixing rate gamma (1 = the paper) damps both x and y, so that the pair stays an
exact push-sum under `I + gamma (A - I)`.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Network, Schedule, displacement
from dpcsgp.algorithms.error_feedback import (
    PublicCopies,
    add_rows,
    exchange_differences,
    residual_ratio,
)
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.algorithms.methods import MethodSettings
from dpcsgp.compression import Compressor, frames
from dpcsgp.errors import ConfigError
from dpcsgp.randomness import PublicRandomness


class DPCSGPState(NamedTuple):
    """One row per hosted node, but one `anchor_D` for all.

    `step` counts gradients, `round` counts exchanges.
    """

    x_ND: Tensor
    x_hat_ND: Tensor
    pull_ND: Tensor
    y_N1: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0

    @property
    def mixed_ND(self) -> Tensor:
        """Return `sum_j a_ij x_hat_j`, the average of the public copies that node i hears."""
        return self.pull_ND + self.x_hat_ND


@final
@dataclass(frozen=True)
class DPCSGP(GossipSGD[DPCSGPState]):
    """Push-sum gossip on a digraph, with error-feedback compression.

    Privacy comes with the gradients it is given. `descend` is line 12.
    """

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND", "y_N1")

    compressor: Compressor
    learning_rate: Schedule
    mixing_rate: float = 1.0

    def __post_init__(self) -> None:
        check_mixing_rate(self.mixing_rate)

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> DPCSGPState:
        """Start with `x = x_ND - anchor`, `x_hat = 0` and `y = 1`."""
        x_ND, anchor_D = displacement(x_ND, anchor_D)
        y_N1 = torch.ones(x_ND.shape[0], 1, dtype=torch.float64, device=x_ND.device)
        return DPCSGPState(x_ND, *PublicCopies.zeros_like(x_ND), y_N1, anchor_D)

    def model(self, state: DPCSGPState) -> Tensor:
        """Return `z = x0 + x / y` (line 8)."""
        return state.anchor_D + state.x_ND / state.y_N1.to(state.x_ND.dtype)

    def average(self, state: DPCSGPState) -> Tensor:
        """Return `x0 + sum_i x_i / sum_i y_i`: gossip does not change it."""
        # In float64: the sums over many nodes are what gossip preserves.
        return state.anchor_D + (state.x_ND.sum(0, dtype=torch.float64) / state.y_N1.sum()).to(
            state.x_ND.dtype
        )

    def gossip(self, state: DPCSGPState, network: Network, random: PublicRandomness) -> DPCSGPState:
        """Return the state after lines 2 to 7."""
        # Lines 2 to 5: send q = Q(x - x_hat); everybody adds q to the public copies.
        copies = PublicCopies(state.x_hat_ND, state.pull_ND)
        copies, y_S1 = exchange_differences(
            self.compressor, state.x_ND, copies, state.y_N1, network, random, state.round
        )
        # Line 6: w = x + gamma (sum_j a_ij x_hat_j - x_hat_i).
        w_ND = add_rows(state.x_ND.clone(), copies.pull_ND, self.mixing_rate)
        # Line 7, damped by the same gamma: y <- y + gamma (sum_j a_ij y_j - y).
        y_N1 = state.y_N1 + self.mixing_rate * (network.mix(y_S1) - state.y_N1)
        return state._replace(
            x_ND=w_ND,
            x_hat_ND=copies.x_hat_ND,
            pull_ND=copies.pull_ND,
            y_N1=y_N1,
            round=state.round + 1,
        )

    def residual_ratio(self, state: DPCSGPState) -> float:
        """Return the mean over nodes of `|x - x_hat| / |x|`."""
        return residual_ratio(state.x_ND, state.x_hat_ND)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames: compressed difference, one weight, header and tag."""
        return rounds * frames.frame_bytes(self.compressor.num_bytes(dim))

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count compressed differences by the paper's formula."""
        return rounds * self.compressor.paper_bits(dim)


def build(settings: MethodSettings) -> DPCSGP | LaggedDPCSGP:
    """Build the method behind both names, `dp-csgp` and `local-then-average`."""
    if settings.max_lag:
        check_mixing_rate(settings.mixing_rate)
        rates = settings.learning_rate, settings.mixing_rate
        return LaggedDPCSGP(settings.compressor, *rates, settings.max_lag, settings.skips)
    return DPCSGP(settings.compressor, settings.learning_rate, settings.mixing_rate)


def check_mixing_rate(mixing_rate: float) -> None:
    """Refuse rates outside (0, 1]: above 1, weights `I + gamma (A - I)` could turn negative."""
    if not 0 < mixing_rate <= 1:
        raise ConfigError(
            f'algorithm.mixing_rate = {mixing_rate}: expected "auto" or a number in (0, 1]'
        )
