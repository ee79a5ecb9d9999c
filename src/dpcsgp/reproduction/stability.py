"""Which compressors the paper's gossip step can bear: predicted radius and what happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import (
    Topology,
    best_mixing_rate,
    directed_exponential,
    directed_ring,
    mixing_radius,
    random_digraph,
)
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.reproduction.experiment import Experiment
from dpcsgp.reproduction.gossip import disagreements, growth_per_step
from dpcsgp.reproduction.outcome import markdown

GRAPHS: Mapping[str, Topology] = {
    "directed exponential": directed_exponential(10),
    "directed ring": directed_ring(10),
    "random digraph, p = 0.2": random_digraph(10, 0.2, 0),
}
COMPRESSORS = (
    "rand:0.9",
    "rand:0.75",
    "rand:0.5",
    "rand:0.1",
    "gsgd:16",
    "gsgd:8",
    "gsgd:8/512",
    "gsgd:4/64",
    "rot:1",
    "sign:512",
)
DIM, SMALL_DIM = 101_770, 4096


def stability(experiment: Experiment) -> list[Path]:
    """Compare predicted radius with noise-free gossip, at rate 1 and at the advised rate."""
    steps = 100 if experiment.quick else 400
    cases = [(graph, spec) for graph in GRAPHS for spec in COMPRESSORS]
    rows: list[dict[str, Any]] = []
    for done, (graph, spec) in enumerate(cases):
        experiment.show(f"{graph}, {spec}", done, len(cases))
        rows += _rows(graph, spec, steps)
    experiment.show("done", len(cases), len(cases))
    files = [
        write_csv(experiment.out / "table.csv", rows),
        *save_figure(_figure(), experiment.out / "figure"),
    ]
    columns = ("graph", "compressor", "rate", "radius", "observed_growth", "ends")
    page = experiment.write_page(
        "Stability: the paper's gossip step with its own compressors",
        f"10 nodes, random models of {SMALL_DIM} coordinates, no noise, no gradients, {steps} "
        "steps. *radius*: the square root of the spectral radius of the second-moment operator, "
        "per step (`gsgd` with one norm: at that dimension); above 1 the nodes drift apart. "
        "*observed growth*: factor per step over the second half of one path. `sign` has no "
        "radius: its error depends on the shape of the residual.",
        markdown(rows, columns),
        "![radius against mixing rate](figure.png)",
    )
    return [*files, page]


def _rows(graph: str, spec: str, steps: int) -> list[dict[str, Any]]:
    topology, compressor = GRAPHS[graph], parse_compressor(spec)
    rows = []
    for name, rate in {
        "1 (paper)": 1.0,
        "advised": best_mixing_rate(topology, compressor, SMALL_DIM),
    }.items():
        # what the radius predicts, beside the growth over the second half of a path
        path = disagreements(
            DPCSGP(compressor, 1.0, rate), topology, SMALL_DIM, steps, noise=0.0, seed=1
        )
        radius = mixing_radius(topology, compressor, rate, SMALL_DIM)
        rows.append(
            {
                "graph": graph,
                "compressor": spec,
                "rate": f"{rate:.3f}" if name == "advised" else name,
                "radius": radius,
                "observed_growth": growth_per_step(path),
                "ends": "diverged" if math.isinf(path[-1]) else f"{path[-1]:.1e}",
            }
        )
    return rows


def _figure() -> Any:
    # radii far above 1 are cut off: the figure is about which side of 1 they are on
    rates = np.geomspace(0.02, 1, 25)
    panels = {}
    for graph, topology in GRAPHS.items():
        panels[graph] = []
        for spec in ("rand:0.75", "rand:0.5", "rand:0.1", "gsgd:8/512", "rot:1"):
            radii = [
                mixing_radius(topology, parse_compressor(spec), float(rate), DIM) for rate in rates
            ]
            panels[graph].append(
                Curve(spec, rates, np.clip(np.array([radii], dtype=float), 0, 1.3))
            )
    figure = accuracy_panels(panels, "mixing rate", "radius per round", log_x=True)
    for axes in figure.axes:
        axes.axhline(1.0, color="#9c3200", linewidth=1)
    return figure
