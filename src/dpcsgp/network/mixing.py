"""Weighted sums over senders, always in ascending sender order.

A matrix product may add in any order and differ in the last bits between a simulator and real
processes; a quantiser then amplifies the difference. Adding sender after sender makes the sum
bit-identical wherever it is computed, and costs O(edges x D).

Legend: N hosted nodes, S senders heard, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpcsgp.graphs import Topology


class Mixer:
    """Computes `sum_j weights[i, j] * values_j` for every hosted node i.

    Args:
        topology: the graph with its weights.
        nodes: the hosted nodes, in the order of the rows.
    """

    def __init__(self, topology: Topology, nodes: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        self.senders = tuple(
            sorted({sender for node in nodes for sender in topology.senders_to(node)})
        )
        row_of = {sender: row for row, sender in enumerate(self.senders)}
        self.own_rows = tuple(row_of[node] for node in nodes)
        # For each hosted node its (row of the sender, weight), senders ascending.
        self._terms = [
            [
                (row_of[sender], float(topology.weights[node, sender]))
                for sender in topology.senders_to(node)
            ]
            for node in nodes
        ]

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Add the weighted sums to `onto_ND` in place and return it.

        Args:
            values_SD: one row per sender heard.
            onto_ND: one row per hosted node; None: float64 zeros.
        """
        if onto_ND is None:
            onto_ND = torch.zeros(
                len(self.nodes), values_SD.shape[1], dtype=torch.float64, device=values_SD.device
            )
        for row_D, terms in zip(onto_ND, self._terms, strict=True):
            for sender_row, weight in terms:
                row_D.add_(values_SD[sender_row], alpha=weight)
        return onto_ND
