"""What the paper's noise rule promises and what it gives: claimed beside verified eps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpcsgp.privacy import calibrate_noise, epsilon, paper_noise_multiplier
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.reproduction.experiment import Experiment
from dpcsgp.reproduction.outcome import markdown

EXAMPLES, DELTA = 6000, 1e-4
STEPS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)


def privacy(experiment: Experiment) -> list[Path]:
    """Verify the rule of Proposition 1 for the paper's MNIST experiment."""
    rows = []
    steps = STEPS[2:5:2] if experiment.quick else STEPS
    total = 3 * len(steps)
    for claimed in (0.5, 0.3, 0.2):
        for count in steps:
            experiment.show(f"eps {claimed}, {count} steps", len(rows), total)
            multiplier = paper_noise_multiplier(claimed, DELTA, count, EXAMPLES)
            needed = calibrate_noise(
                epsilon=claimed, delta=DELTA, sampling_rate=1 / EXAMPLES, steps=count
            )
            verified = epsilon(
                noise_multiplier=multiplier, sampling_rate=1 / EXAMPLES, steps=count, delta=DELTA
            )
            rows.append(
                {
                    "claimed_eps": claimed,
                    "steps": count,
                    "noise_multiplier": multiplier,
                    "verified_eps": verified,
                    "needed_multiplier": needed,
                    "needed_c2": needed / multiplier,
                }
            )
    experiment.show("done", total, total)
    return [
        write_csv(experiment.out / "table.csv", rows),
        *_figure(experiment.out, rows),
        _page(experiment, rows),
    ]


def _figure(out: Path, rows: list[dict[str, float]]) -> list[Path]:
    curves = []
    for claimed in dict.fromkeys(row["claimed_eps"] for row in rows):
        chosen = [row for row in rows if row["claimed_eps"] == claimed]
        ratios = [row["verified_eps"] / claimed for row in chosen]
        curves.append(
            Curve(f"claimed {claimed}", [row["steps"] for row in chosen], [np.log10(ratios)])
        )
    title = {"the paper's noise rule, c2 = 1": curves}
    return save_figure(
        accuracy_panels(title, "steps", "log10(verified eps / claimed eps)", log_x=True),
        out / "figure",
    )


def _page(experiment: Experiment, rows: list[dict[str, float]]) -> Path:
    return experiment.write_page(
        "The paper's noise rule, verified",
        f"J = {EXAMPLES} examples, one example per step (Poisson, rate 1/J), delta = {DELTA:g}, "
        "add or remove one example.",
        markdown(rows, list(rows[0])),
        "`needed_c2` is the constant with which the rule would have given the claimed eps. "
        "Proposition 1 holds only for `eps < c1 T / J^2`, that is for millions of steps here.",
        "![verified over claimed](figure.png)",
    )
