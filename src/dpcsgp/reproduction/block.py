"""Block gossip against error feedback at equal bytes: exact blocks, or random coordinates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dpcsgp.algorithms import DPCSGP, Algorithm, DPBlock
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import best_mixing_rate, directed_exponential, directed_ring, random_digraph
from dpcsgp.report import write_csv
from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.gossip import disagreements
from dpcsgp.reproduction.outcome import SCORES, markdown, table, write_outcome

GRAPHS = ("directed_exponential", "directed_ring", "random_digraph")
STEADY_STEPS = 3000
SHARES = {0.1: 10, 0.25: 4, 0.5: 2}  # share of the coordinates per round -> number of exact blocks
QUANTISED = "gsgd:8/64"
# the same -> number of quantised blocks: no more bytes than exact ones
QUANTISED_BLOCKS = {0.1: 3, 0.25: 2, 0.5: 1}
BASE = (
    "algorithm.steps=150",
    "algorithm.learning_rate=1",
    "privacy.expected_batch_size=512",
    "algorithm.polish_rounds=0",
    "run.evaluate_every=30",
    "run.checkpoint_every=50",
    "graph.edge_probability=0.2",
)


def block(experiment: Experiment) -> list[Path]:
    """Compare block gossip with rand and error feedback at equal bytes, on three graphs."""
    cells = []
    for graph in GRAPHS if not experiment.quick else GRAPHS[:1]:
        for share, number in SHARES.items():
            methods = {
                "rand": (f"compression.spec=rand:{share}",),
                "block": ("algorithm.name=dp-block", f"algorithm.num_blocks={number}"),
                "block, 8 bits": (
                    "algorithm.name=dp-block",
                    f"algorithm.num_blocks={QUANTISED_BLOCKS[share]}",
                    f"compression.spec={QUANTISED}",
                ),
            }
            for name, settings in methods.items():
                tags = {"graph": graph, "share": share, "method": f"{name} {share:g}"}
                cells.append(cell(*BASE, f"graph.name={graph}", *settings, **tags))
    runs = experiment.run(cells)
    # beside training: gossip without noise on many graphs, and with noise but without learning
    digraphs, steady = _many_digraphs(experiment), _steady_state(experiment)
    rows = table(runs)
    costs = ("bytes_per_edge", "disagreement", "epsilon_verified", "repeats")
    worst = max(row["largest_over_start"] for row in digraphs)
    ratios = _ratios(rows)
    page = experiment.write_page(
        "Block gossip against error feedback, at equal bytes",
        "MNIST, 784-128-10, 10 nodes, verified eps 0.5, 150 steps, no polish rounds; rand at its "
        "advised mixing rate.",
        markdown(rows, ("graph", "method", *SCORES, *costs)),
        "Block gossip beside rand with as many bytes or more: how many times smaller the "
        "disagreement is, and by how many points accuracy (node mean) is higher:",
        markdown(ratios, list(ratios[0])),
        "On slow graphs 150 steps are too few for a steady state. Without learning, under unit "
        "noise per step, at equal bytes (512 coordinates, mean over the last third of "
        f"{STEADY_STEPS} rounds; `steady.csv`):",
        markdown(
            steady,
            ["graph", "share", "rand", "block", "block_ratio", "quantised", "quantised_ratio"],
        ),
        f"Noise-free gossip with 10 blocks, exact and with 8 bits (`{QUANTISED}`), on "
        f"{len(digraphs) // 2} random strongly connected digraphs, 400 rounds each: "
        f"{sum(row['diverged'] for row in digraphs)} of {len(digraphs)} diverged; the disagreement "
        f"never rose above {worst:.2f} times its start (`digraphs.csv`).",
        "![accuracy against bits](figure.png)",
    )
    files = write_outcome(experiment.out, runs, "graph", "method")
    tables = {"digraphs.csv": digraphs, "steady.csv": steady, "ratios.csv": ratios}
    return [
        *files,
        *(write_csv(experiment.out / name, rows) for name, rows in tables.items()),
        page,
    ]


def _steady_state(experiment: Experiment) -> list[dict[str, Any]]:
    """Measure the disagreement under unit noise per step, long after the start, at equal bytes."""
    topologies = {
        "directed_exponential": directed_exponential(10),
        "directed_ring": directed_ring(10),
        "random_digraph": random_digraph(10, 0.2, 0),
    }
    rows = []
    for graph, topology in topologies.items():
        for share, number in SHARES.items():
            experiment.show(f"steady state, {graph}, {share}", len(rows), 9)
            rand = parse_compressor(f"rand:{share}")
            methods: dict[str, Algorithm[Any]] = {
                "rand": DPCSGP(rand, 1.0, best_mixing_rate(topology, rand, 512)),
                "block": DPBlock(1.0, number),
                "quantised": DPBlock(
                    1.0, QUANTISED_BLOCKS[share], compressor=parse_compressor(QUANTISED)
                ),
            }
            row: dict[str, Any] = {"graph": graph, "share": share}
            for name, algorithm in methods.items():
                path = disagreements(algorithm, topology, 512, STEADY_STEPS, noise=1.0, seed=1)
                row[name] = sum(path[-STEADY_STEPS // 3 :]) / (STEADY_STEPS // 3)
            rows.append(
                row | {f"{name}_ratio": row["rand"] / row[name] for name in ("block", "quantised")}
            )
    return rows


def _many_digraphs(experiment: Experiment) -> list[dict[str, Any]]:
    """Gossip without noise on random digraphs of 5 to 20 nodes, sparse to dense."""
    rows = []
    for seed in range(10 if experiment.quick else 100):
        topology = random_digraph(5 + seed % 16, 0.05 + 0.3 * (seed % 7) / 6, seed)
        for spec in ("none", QUANTISED):
            algorithm = DPBlock(1.0, 10, compressor=parse_compressor(spec))
            path = disagreements(algorithm, topology, 200, 400, noise=0.0, seed=seed)
            rows.append(
                {
                    "seed": seed,
                    "nodes": topology.num_nodes,
                    "edges": len(topology.edges),
                    "compressor": spec,
                    "start": path[0],
                    "end": path[-1],
                    "largest_over_start": max(path) / path[0],
                    "diverged": math.isinf(path[-1]),
                }
            )
    return rows


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare every way of block gossip with rand on the same graph, at the same share of bytes."""
    found = []
    for row in rows:
        method, share = row["method"].rsplit(" ", 1)
        if method == "rand":
            continue
        rand = next(
            other
            for other in rows
            if other["graph"] == row["graph"] and other["method"] == f"rand {share}"
        )
        found.append(
            {
                "graph": row["graph"],
                "share": share,
                "method": method,
                "disagreement_times_smaller": rand["disagreement"] / row["disagreement"],
                "points_more": 100 * (row["accuracy_node_mean"] - rand["accuracy_node_mean"]),
                "bytes_of_rand": row["bytes_per_edge"] / rand["bytes_per_edge"],
            }
        )
    return found
