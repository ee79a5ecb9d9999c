"""Noise that cancels: what sharing noise with other nodes buys at the same verified eps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dpcsgp.report import save_figure, write_csv
from dpcsgp.report.figures import STYLE
from dpcsgp.report.palette import colour, marker
from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.grid import Cell
from dpcsgp.reproduction.outcome import SCORES, markdown, table

PLAIN, HOG, SHARDS = "784-128-10", "hog:12, linear", "784-128-10, two shards per node"
INDEPENDENT, THREE, NOBODY = "independent", "cancelling, 3 colluders", "cancelling, 0 colluders"
CENTRAL = "dp-sgd, all data"
COLLUDERS = {
    INDEPENDENT: (),
    THREE: ("privacy.max_colluders=3",),
    NOBODY: ("privacy.max_colluders=0",),
}
# eps -> learning rate with cancelling noise, with independent noise, with all data in one place
PLAIN_RATES = {0.5: (8, 6, 8), 0.2: (5, 3, 6), 0.1: (4, 2, 4)}
HOG_RATES = {0.2: (8, 5, 8), 0.05: (4, 2, 4)}
HOG_SETTINGS = (
    "task.features=hog:12",
    "task.model=logistic",
    "privacy.expected_batch_size=6000",
    "algorithm.steps=40",
)


def cancelling(experiment: Experiment) -> list[Path]:
    """Compare independent noise with noise that cancels between pairs of nodes."""
    runs = experiment.run(_cells(experiment.quick))
    rows = table(runs)
    files = [
        write_csv(experiment.out / "table.csv", rows),
        *save_figure(_figure(rows), experiment.out / "figure"),
    ]
    costs = ("bytes_per_edge", "epsilon_verified", "epsilon_all_collude", "repeats")
    page = experiment.write_page(
        "Noise that cancels",
        "MNIST, 10 nodes, directed exponential graph, delta 1e-4. *Cancelling*: pairs of nodes "
        "share noise (`privacy.max_colluders`); the verified eps holds against everybody who sees "
        "all messages together with any so many other nodes. *Epsilon all collude*: what is left "
        "if all others tell all they know. Learning rates were chosen per row on test accuracy "
        "with other seeds.",
        markdown(rows, ("model", "epsilon", "noise", *SCORES, *costs)),
        "![accuracy against eps](figure.png)",
    )
    return [*files, page]


def _cells(quick: bool) -> list[Cell]:
    cells: list[Cell] = []
    for epsilon, rates in PLAIN_RATES.items():
        cells += _row(PLAIN, epsilon, rates, ("compression.spec=rot:3",), COLLUDERS)
    for epsilon, rates in HOG_RATES.items():
        settings = (*HOG_SETTINGS, "compression.spec=rot:2")
        cells += _row(HOG, epsilon, rates, settings, COLLUDERS)
    shards = (
        "task.partition=shards:2",
        "compression.spec=rot:4",
        "algorithm.steps=60",
        "algorithm.polish_rounds=12",
    )
    two = {noise: COLLUDERS[noise] for noise in (INDEPENDENT, THREE)}
    cells += _row(SHARDS, 0.2, (3, 2, 3), shards, two)
    return cells[::4] if quick else cells


def _row(
    model: str,
    epsilon: float,
    rates: Sequence[float],
    settings: Sequence[str],
    noises: dict[str, tuple[str, ...]],
) -> list[Cell]:
    """Return one model at one eps with every kind of noise, and with all data in one place."""
    common = (*settings, f"privacy.epsilon={epsilon}", "run.evaluate_every=0")
    shared, alone, central = (f"algorithm.learning_rate={rate:g}" for rate in rates)
    cells = [
        cell(
            *common,
            alone if noise == INDEPENDENT else shared,
            *extra,
            model=model,
            epsilon=epsilon,
            noise=noise,
        )
        for noise, extra in noises.items()
    ]
    batch = "privacy.expected_batch_size=60000" if model == HOG else "run.evaluate_every=0"
    place = ("algorithm.name=dp-sgd", "task.partition=iid", batch, central)
    return [*cells, cell(*common, *place, model=model, epsilon=epsilon, noise=CENTRAL)]


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw accuracy against eps, one panel per model that was run at several."""
    models = [
        model
        for model in (PLAIN, HOG)
        if len({row["epsilon"] for row in rows if row["model"] == model}) > 1
    ] or [PLAIN]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(models), 3.4), layout="constrained")
        for place, model in enumerate(models):
            axes = figure.add_subplot(1, len(models), place + 1)
            for index, noise in enumerate((CENTRAL, NOBODY, THREE, INDEPENDENT)):
                chosen = sorted(
                    (row for row in rows if row["model"] == model and row["noise"] == noise),
                    key=lambda row: row["epsilon"],
                )
                axes.errorbar(
                    [row["epsilon"] for row in chosen],
                    [100 * row["accuracy_node_mean"] for row in chosen],
                    [100 * row.get("accuracy_node_mean_sd", 0.0) for row in chosen],
                    marker=marker(index),
                    color=colour(index),
                    linestyle="--" if noise == CENTRAL else "-",
                    label=noise,
                )
            ticks = sorted({row["epsilon"] for row in rows if row["model"] == model})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set(xlabel="verified ε", ylabel="node mean accuracy, %", title=model)
            if place == 0:
                axes.legend(frameon=False, loc="lower right", fontsize=8)
    return figure
