"""Compressed gossip with error feedback: what DP-CSGP and CHOCO-SGD share.

| symbol | meaning | DP-CSGP, Algorithm 1 |
|---|---|---|
| `x_hat_ND` | what receivers believe x is | lines 2 and 5 |
| `q` | compressed difference `Q(x - x_hat)`; travels, in one frame with y | line 2 |
| `pull_ND` | `sum_j a_ij x_hat_j - x_hat_i`: where gossip pulls node i, `(A - I) x_hat` | line 6 |

Because the weights are constant, a node needs no copy per sender: `pull` is updated by `sum_j a_ij
q_j - q_i`. It is kept in float64: each of its rounding errors would act on x in every later step,
and in float32 mass is visibly lost after some ten thousand steps. The error of `x_hat` does not
matter: the next difference `x - x_hat` carries it.

Legend: N hosted nodes, S senders heard, D coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dpcsgp.algorithms.base import Network, exchange_frames
from dpcsgp.compression import Compressor
from dpcsgp.randomness import PublicRandomness


class PublicCopies(NamedTuple):
    """What the network knows of the hosted nodes, and where it pulls them."""

    x_hat_ND: Tensor
    pull_ND: Tensor

    @classmethod
    def zeros_like(cls, x_ND: Tensor) -> PublicCopies:
        """Start with `x_hat = 0` everywhere."""
        return cls(torch.zeros_like(x_ND), torch.zeros_like(x_ND, dtype=torch.float64))

    @classmethod
    def heard(cls, x_SD: Tensor, network: Network) -> PublicCopies:
        """Start with copies that everybody was told in full: `x_hat_j = x_j` for all senders."""
        own_ND = x_SD[list(network.own_rows)]
        zeros_ND = torch.zeros_like(own_ND, dtype=torch.float64)
        return cls(own_ND, network.mix(x_SD, add_rows(zeros_ND, own_ND, -1.0)))


def exchange_differences(
    compressor: Compressor,
    x_ND: Tensor,
    copies: PublicCopies,
    weights_N1: Tensor,
    network: Network,
    random: PublicRandomness,
    round_: int,
) -> tuple[PublicCopies, Tensor]:
    """Send `Q(x - x_hat)` with the push-sum weights.

    Return the new copies and the senders' weights (S, 1).
    """
    # Line 2: what receivers do not know yet, compressed.
    q_NB = compressor.encode(x_ND - copies.x_hat_ND, random, round_)
    # Lines 3 and 4: send to the out-neighbours, hear the in-neighbours.
    weights_S1, q_SB = exchange_frames(network, round_, weights_N1, q_NB)
    # A receiver rebuilds the sender's public randomness to decode its message.
    q_SD = compressor.decode(q_SB, x_ND.shape[1], random.of(network.senders), round_)
    # no copy in a simulator
    own_ND = q_SD if network.senders == network.nodes else q_SD[list(network.own_rows)]
    # Line 5 for the own copy; pull <- pull - q_i + sum_j a_ij q_j for all others at once.
    pull_ND = network.mix(q_SD, add_rows(copies.pull_ND.clone(), own_ND, -1.0))
    return PublicCopies(copies.x_hat_ND + own_ND, pull_ND), weights_S1


def add_rows(onto_ND: Tensor, values_ND: Tensor, factor: float) -> Tensor:
    """Add in place, row by row, and return `onto`.

    Of two matrices of different types torch would first convert a full copy.
    """
    for onto_D, values_D in zip(onto_ND, values_ND, strict=True):
        onto_D.add_(values_D, alpha=factor)
    return onto_ND


def residual_ratio(x_ND: Tensor, x_hat_ND: Tensor) -> float:
    """Return the mean over nodes of |x - x_hat| / |x|.

    It says how far what others believe lags behind.
    """
    # At the start x is zero: the bound keeps 0 / 0 away.
    ratios_N = (x_ND - x_hat_ND).norm(dim=1) / x_ND.norm(dim=1).clamp_min(1e-30)
    return float(ratios_N.mean())
