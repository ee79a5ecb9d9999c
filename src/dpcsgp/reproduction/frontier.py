"""Accuracy against bytes per edge at one verified eps, with the lines that cost no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpcsgp.report import save_figure, write_csv
from dpcsgp.report.figures import STYLE
from dpcsgp.report.labels import label_points
from dpcsgp.report.palette import colour, marker
from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.grid import Cell
from dpcsgp.reproduction.outcome import SCORES, markdown, table
from dpcsgp.reproduction.paper_figures import LOCAL

PLAIN, FREE = "plain 784-128-10", "free choice"
HOG = ("task.model=logistic", "privacy.expected_batch_size=6000")
THREE = "privacy.max_colluders=3"
DCT = ("task.features=dct:8", "task.model=mlp:56")


def frontier(experiment: Experiment) -> list[Path]:
    """Draw accuracy against bytes over compressors, step counts and public features."""
    runs = experiment.run(_cells(experiment.quick))
    rows = sorted(table(runs), key=lambda row: (row["model"], row["bytes_per_edge"]))
    for row in rows:
        # on the front: no cheaper row of the same kind is as accurate
        better = [
            other
            for other in rows
            if other["model"] == row["model"]
            and other["bytes_per_edge"] < row["bytes_per_edge"]
            and other["accuracy_node_mean"] >= row["accuracy_node_mean"]
        ]
        row["on_front"] = "" if better else "yes"
    files = [
        write_csv(experiment.out / "table.csv", rows),
        *save_figure(_figure(rows), experiment.out / "figure"),
    ]
    costs = ("bytes_per_edge", "epsilon_verified", "on_front", "repeats")
    page = experiment.write_page(
        "Accuracy against bytes at verified eps 0.5",
        "MNIST, 10 nodes, directed exponential graph. Bytes are frames on one edge, headers "
        "included. *Cancelling*: pairs of nodes share noise, and eps holds against any 3 "
        "colluders. Learning rates were chosen per setting on test accuracy with seeds other than "
        "these.",
        markdown(rows, ("model", "setting", *SCORES, *costs)),
        _headline(rows),
        "![accuracy against bytes](figure.png)",
    )
    return [*files, page]


def _cells(quick: bool) -> list[Cell]:
    plain: dict[str, tuple[str, ...]] = {
        "local, no messages": LOCAL,
        "exact (dp-sgp), 100 steps": (*_steps(100, 1.5), "algorithm.name=dp-sgp"),
        "exact (dp-sgp), 30 steps": (*_steps(30, 6), "algorithm.name=dp-sgp"),
        "rot:1, 10 steps": _steps(10, 12),
        "rot:1, 25 steps": _steps(25, 7),
        "rot:1, 30 steps": _steps(30, 6),
        "rot:2, 30 steps, cancelling": (*_steps(30, 6), "compression.spec=rot:2", THREE),
        "rot:3, 30 steps, cancelling": (*_steps(30, 8), "compression.spec=rot:3", THREE),
        "rot:4, 30 steps": (*_steps(30, 6), "compression.spec=rot:4"),
        "rot:4, 100 steps": (*_steps(100, 1.5), "compression.spec=rot:4"),
        "gsgd:4/64, 30 steps": (*_steps(30, 6), "compression.spec=gsgd:4/64"),
        "rand:0.1, 30 steps": (*_steps(30, 6), "compression.spec=rand:0.1"),
        "block of a tenth, 30 steps": (*_steps(30, 6), "algorithm.name=dp-block"),
        "block of a third, 8 bits, 30 steps": (
            *_steps(30, 6),
            "algorithm.name=dp-block",
            "algorithm.num_blocks=3",
            "compression.spec=gsgd:8/64",
        ),
        "rot:1 every 3rd step, 30 steps": (*_steps(30, 6), "algorithm.gossip_every=3"),
        "alone, then 3 rounds of rot:4": (
            *_steps(30, 2),
            "algorithm.name=local-then-average",
            "compression.spec=rot:4",
        ),
    }
    free: dict[str, tuple[str, ...]] = {
        "dct:8, 64-56-10, rot:1, 38 steps": (*DCT, *_steps(38, 12), "algorithm.polish_rounds=2"),
        "hog:12, linear, no messages": (
            *HOG,
            *LOCAL,
            "task.features=hog:12",
            *_steps(20, 5),
            "algorithm.polish_rounds=0",
        ),
        "hog:8, linear, alone, then 3 rounds of rot:3": (
            *HOG,
            "task.features=hog:8",
            *_steps(20, 10),
            "algorithm.name=local-then-average",
            "compression.spec=rot:3",
        ),
        "hog:8, linear, rot:1, 20 steps": (*HOG, "task.features=hog:8", *_steps(20, 20)),
        "hog:12, linear, rot:1, 40 steps": (*HOG, "task.features=hog:12", *_steps(40, 10)),
        "hog:12, linear, rot:2, 40 steps, cancelling": (
            *HOG,
            "task.features=hog:12",
            *_steps(40, 10),
            "compression.spec=rot:2",
            THREE,
        ),
    }
    # --quick: every third setting
    cells = [cell(*settings, model=PLAIN, setting=name) for name, settings in plain.items()]
    cells += [cell(*settings, model=FREE, setting=name) for name, settings in free.items()]
    return cells[::3] if quick else cells


def _steps(steps: int, learning_rate: float) -> tuple[str, ...]:
    return (
        f"algorithm.steps={steps}",
        f"algorithm.learning_rate={learning_rate:g}",
        "run.evaluate_every=0",
    )


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the plain network's best exact row with the cheapest within a point of it."""
    plain = [row for row in rows if row["model"] == PLAIN]
    exact = [row for row in plain if row["setting"].startswith("exact")]
    if not exact:
        return ""
    best = max(exact, key=lambda row: row["accuracy_node_mean"])
    near = [row for row in plain if row["accuracy_node_mean"] >= best["accuracy_node_mean"] - 0.01]
    least = min(near, key=lambda row: row["bytes_per_edge"])
    ratio = best["bytes_per_edge"] / max(least["bytes_per_edge"], 1)
    lost = 100 * (best["accuracy_node_mean"] - least["accuracy_node_mean"])
    text = (
        f"Best exact row: *{best['setting']}*, {100 * best['accuracy_node_mean']:.2f} %. "
        "Cheapest row of the plain network within one "
        f"point of it: *{least['setting']}*, {lost:.2f} points lower with {ratio:.0f} times "
        "fewer bytes."
    )
    # the same comparison at equal steps, where both were run
    both = {row["setting"]: row for row in plain}
    exact_row, coded_row = both.get("exact (dp-sgp), 30 steps"), both.get("rot:1, 30 steps")
    if exact_row is None or coded_row is None:
        return text
    ratio = exact_row["bytes_per_edge"] / coded_row["bytes_per_edge"]
    lost = 100 * (exact_row["accuracy_node_mean"] - coded_row["accuracy_node_mean"])
    return (
        f"{text} At equal steps (30) `rot:1` sends {ratio:.1f} times fewer bytes than exact "
        f"messages, {lost:.2f} points lower."
    )


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 6.4), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for index, model in enumerate((PLAIN, FREE)):
            # a line for what costs no bytes, points for the rest, joined where none is better
            chosen = [row for row in rows if row["model"] == model]
            sent = [row for row in chosen if row["bytes_per_edge"] > 0]
            for row in (row for row in chosen if row["bytes_per_edge"] == 0):
                axes.axhline(
                    100 * row["accuracy_node_mean"],
                    linestyle=":",
                    color=colour(index),
                    label=f"{model}: no messages",
                )
            spread = [100 * row.get("accuracy_node_mean_sd", 0.0) for row in sent]
            x, y = _points(sent)
            axes.errorbar(x, y, spread, fmt=marker(index), color=colour(index), label=model)
            front = [row for row in sent if row["on_front"]]
            axes.plot(*_points(front), color=colour(index), linewidth=1)
        axes.set(
            xlabel="kB per edge, frames included",
            ylabel="node mean accuracy, %",
            title="verified ε = 0.5",
        )
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.06 * (high - low))
        axes.legend(frameon=False, loc="lower left", fontsize=8)
        # names last: places are known only once scales and limits are
        sent = [row for row in rows if row["bytes_per_edge"] > 0]
        names = [row["setting"].replace(", linear", "") for row in sent]
        shades = [colour((PLAIN, FREE).index(row["model"])) for row in sent]
        label_points(axes, names, *_points(sent), shades)
    return figure


def _points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return kilobytes per edge and accuracy in percent."""
    kilobytes = [row["bytes_per_edge"] / 1e3 for row in rows]
    return kilobytes, [100 * row["accuracy_node_mean"] for row in rows]
