"""Weighted sums over senders against a memory copy per edge and a dense matrix product.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import torch

from dpcsgp.benchmarking.stopwatch import Clock, Ratio, compare, deciding_clock, measure
from dpcsgp.graphs import directed_exponential
from dpcsgp.network.mixing import Mixer


def benchmark_mixing(quick: bool = False) -> list[Ratio]:
    """Mix on exponential graphs of growing size: O(edges x D), not O(nodes^2 x D)."""
    clock = deciding_clock()
    sizes = ((4, 1001),) if quick else ((10, 101_770), (100, 101_770))
    return [
        ratio
        for num_nodes, dim in sizes
        for ratio in _at(num_nodes, dim, clock=clock, rounds=3 if quick else 9)
    ]


def _at(num_nodes: int, dim: int, *, clock: Clock, rounds: int) -> list[Ratio]:
    topology = directed_exponential(num_nodes)
    mixer = Mixer(topology, range(num_nodes))
    values_ND = torch.randn(num_nodes, dim)
    onto_ND = torch.zeros(num_nodes, dim, dtype=torch.float64)
    weights_NN, wide_ND = torch.tensor(topology.weights), values_ND.double()
    # the least that any mixing must read: one vector per edge, the own one included
    senders = [sender for node in range(num_nodes) for sender in topology.senders_to(node)]
    row_D = torch.empty(dim)

    def copies() -> None:
        for sender in senders:
            row_D.copy_(values_ND[sender])

    times = measure(
        {
            "mix": lambda: mixer.mix(values_ND, onto_ND),
            "copy of every edge's vector": copies,
            "dense product": lambda: torch.mm(weights_NN, wide_ND, out=onto_ND),
        },
        rounds=rounds,
    )
    note = f"{num_nodes} nodes, {len(senders)} terms, {dim:,} coordinates"
    return [
        compare("mixing", times, "mix", "copy of every edge's vector", clock=clock, note=note),
        compare("mixing", times, "mix", "dense product", clock=clock, note=f"{num_nodes} nodes"),
    ]
