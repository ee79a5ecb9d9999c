"""Block gossip against error feedback at equal bytes: one exact block per round, or random coordinates with x_hat."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dpcsgp.algorithms import DPBlock
from dpcsgp.graphs import random_digraph
from dpcsgp.report import write_csv
from dpcsgp.reproduction.desk import Desk, cell
from dpcsgp.reproduction.gossip import disagreements
from dpcsgp.reproduction.outcome import markdown, table, write_outcome

GRAPHS = ("directed_exponential", "directed_ring", "random_digraph")
SHARES = {0.1: 10, 0.25: 4, 0.5: 2}  # share of the coordinates per round -> number of blocks
BASE = (
    "algorithm.steps=40", "algorithm.learning_rate=4", "privacy.expected_batch_size=1500", "algorithm.polish_rounds=0",
    "run.evaluate_every=10", "graph.edge_probability=0.2",
)  # fmt: skip


def block(desk: Desk) -> list[Path]:
    """Compare accuracy and disagreement of block gossip and rand with error feedback, at equal bytes, on three graphs."""
    cells = []
    for graph in GRAPHS if not desk.quick else GRAPHS[:1]:
        for share, number in SHARES.items():
            methods = {
                "rand": (f"compression.spec=rand:{share}",),
                "block": ("algorithm.name=dp-block", f"algorithm.num_blocks={number}"),
            }
            cells += [
                cell(*BASE, f"graph.name={graph}", *settings, graph=graph, share=share, method=f"{name} {share:g}")
                for name, settings in methods.items()
            ]
    runs = desk.run(cells)
    digraphs = _many_digraphs(desk)
    rows = table(runs)
    columns = (
        "graph", "method", "accuracy_node_mean", "accuracy_node_min", "bytes_per_edge", "disagreement", "epsilon_verified",
        "repeats",
    )  # fmt: skip
    worst = max(row["largest_over_start"] for row in digraphs)
    page = desk.write_page(
        "Block gossip against error feedback, at equal bytes",
        "MNIST, 784-128-10, 10 nodes, verified eps 0.5, 40 steps, no polish rounds; rand at its advised mixing rate.",
        markdown(rows, columns),
        f"Noise-free gossip with 10 blocks on {len(digraphs)} random strongly connected digraphs, 400 rounds each: "
        f"{sum(row['diverged'] for row in digraphs)} diverged; the disagreement never rose above {worst:.2f} times its start "
        f"(`digraphs.csv`).",
        "![accuracy against bits](figure.png)",
    )
    files = write_outcome(desk.out, runs, "graph", "method")
    return [*files, write_csv(desk.out / "digraphs.csv", digraphs), page]


def _many_digraphs(desk: Desk) -> list[dict[str, Any]]:
    number = 10 if desk.quick else 100
    rows = []
    for seed in range(number):
        topology = random_digraph(5 + seed % 16, 0.05 + 0.3 * (seed % 7) / 6, seed)
        path = disagreements(DPBlock(1.0, 10), topology, 200, 400, noise=0.0, seed=seed)
        rows.append(
            {
                "seed": seed, "nodes": topology.num_nodes, "edges": len(topology.edges), "start": path[0], "end": path[-1],
                "largest_over_start": max(path) / path[0], "diverged": math.isinf(path[-1]),
            }
        )  # fmt: skip
    return rows
