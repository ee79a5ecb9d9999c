"""Secure Gaussian noise on a grid against torch's generator.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import torch

from dpcsgp.benchmarking.stopwatch import Ratio, compare, deciding_clock, measure
from dpcsgp.privacy.noise import add_noise_
from dpcsgp.randomness import PrivateRandomness

LIMIT = 3.0


def benchmark_noise(quick: bool = False) -> list[Ratio]:
    """Add noise to the sums of ten nodes; the peer is `torch.randn` of as many numbers."""
    num_nodes, dim = (2, 1001) if quick else (10, 101_770)
    clock = deciding_clock()
    sums_ND, random = torch.randn(num_nodes, dim), PrivateRandomness.fresh(range(num_nodes))
    rows = range(num_nodes)

    def add_noise() -> None:
        for row in rows:
            add_noise_(sums_ND[row], 2.0, 1.0, random, 0, row)

    times = measure(
        {
            "secure noise": add_noise,
            "torch.randn": lambda: [torch.randn(dim) for _ in rows],
            "torch.rand": lambda: [torch.rand(dim) for _ in rows],
            "memory copy": lambda: [sums_ND[row].clone() for row in rows],
        },
        rounds=3 if quick else 25,
    )
    name, note = "secure noise", f"{num_nodes} x {dim:,} added"
    return [
        compare("noise", times, name, "torch.randn", clock=clock, limit=LIMIT, note=note),
        compare("noise", times, name, "torch.rand", clock=clock),
        compare("noise", times, name, "memory copy", clock=clock),
    ]
