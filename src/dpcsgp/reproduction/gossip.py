"""Gossip without learning: how nodes drift apart under noise, or come together without any.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dpcsgp.algorithms import Algorithm
from dpcsgp.errors import DivergenceError
from dpcsgp.graphs import Topology
from dpcsgp.network import Simulator
from dpcsgp.randomness import PublicRandomness, torch_seed

TOO_FAR = 1e15


def disagreements(
    algorithm: Algorithm[Any], topology: Topology, dim: int, steps: int, *, noise: float, seed: int
) -> list[float]:
    """Return the disagreement after every step; each adds `noise` times a unit Gaussian.

    Ends early, with infinity, once it is beyond all bounds.
    """
    network, random = Simulator(topology), PublicRandomness(seed, range(topology.num_nodes))
    found: list[float] = []
    with torch_seed(seed, "gossip only"):
        state = algorithm.init(torch.randn(topology.num_nodes, dim))
        still_ND = torch.zeros(topology.num_nodes, dim)
        for _ in range(steps):
            grad_ND = noise * torch.randn(topology.num_nodes, dim) if noise else still_ND
            try:
                state = algorithm.gossip(algorithm.descend(state, grad_ND), network, random)
            except DivergenceError:
                return [*found, math.inf]
            models_ND = algorithm.model(state)
            found.append(float((models_ND - models_ND.mean(0)).pow(2).mean().sqrt()))
            if not found[-1] < TOO_FAR:
                return [*found, math.inf]
    return found


def growth_per_step(values: list[float]) -> float:
    """Return the factor per step over the second half of the path; infinity-proof."""
    kept = [value for value in values if 1e-12 < value < TOO_FAR]
    half = kept[len(kept) // 2 :]
    # values near zero are rounding errors, beyond the bound they are cut off
    return (half[-1] / half[0]) ** (1 / max(len(half) - 1, 1)) if len(half) > 1 else math.nan
