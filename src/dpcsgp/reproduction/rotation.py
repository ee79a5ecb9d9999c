"""The rotated sign against the plain one: 5,000 rounds at the doctor's rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import best_mixing_rate, directed_exponential, directed_ring, mixing_radius
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.reproduction.experiment import Experiment
from dpcsgp.reproduction.gossip import disagreements
from dpcsgp.reproduction.outcome import markdown

GRAPHS = {"directed exponential": directed_exponential(10), "directed ring": directed_ring(10)}
DIM = 4096


def rotation(experiment: Experiment) -> list[Path]:
    """Run both one-bit compressors for 5,000 rounds at the rate the doctor advises."""
    steps = 500 if experiment.quick else 5000
    rows: list[dict[str, Any]] = []
    panels: dict[str, list[Curve]] = {}
    for graph, topology in GRAPHS.items():
        rate = best_mixing_rate(topology, parse_compressor("rot:1"), DIM)
        for noise in (0.0, 1.0):
            curves = panels.setdefault(f"{graph}, {'noise' if noise else 'no noise'}", [])
            for spec in ("rot:1", "sign:512"):
                experiment.show(f"{graph}, {spec}", len(rows), 8)
                compressor = parse_compressor(spec)
                path = disagreements(
                    DPCSGP(compressor, 1.0, rate), topology, DIM, steps, noise=noise, seed=1
                )
                radius = mixing_radius(topology, compressor, rate, DIM) if spec == "rot:1" else None
                rows.append(
                    {
                        "graph": graph,
                        "noise_per_step": noise,
                        "compressor": spec,
                        "rate": rate,
                        "radius": radius,
                        "steps": len(path),
                        "disagreement": path[-1],
                        "largest": max(path),
                    }
                )
                curves.append(_curve(spec, path))
    experiment.show("done", 8, 8)
    figure = accuracy_panels(panels, "round", "log10 of the disagreement", log_x=True)
    files = [
        write_csv(experiment.out / "table.csv", rows),
        *save_figure(figure, experiment.out / "figure"),
    ]
    page = experiment.write_page(
        "Rotated sign against plain sign",
        f"10 nodes, {DIM} coordinates, one bit per coordinate, the doctor's rate for `rot:1`; "
        f"disagreement per coordinate after {steps} rounds (fewer: it left all bounds).",
        markdown(rows, list(rows[0])),
        "![disagreement against rounds](figure.png)",
    )
    return [*files, page]


def _curve(label: str, path: list[float]) -> Curve:
    # sixty rounds at equal distances on the logarithmic axis, and values that can be drawn
    chosen = np.unique(np.geomspace(1, len(path), 60).astype(int)) - 1
    values = [math.log10(min(max(path[index], 1e-12), 1e15)) for index in chosen]
    return Curve(label, chosen + 1.0, [values])
