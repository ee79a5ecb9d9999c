"""Where collaboration pays: from even data to two labels per node, alone and together."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dpcsgp.report import save_figure, write_csv
from dpcsgp.report.figures import STYLE
from dpcsgp.report.palette import colour
from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.grid import Cell, Done
from dpcsgp.reproduction.outcome import SCORES, markdown, raw_rows, table
from dpcsgp.reproduction.paper_figures import LOCAL

PARTITIONS = {
    "two shards": "shards:2",
    "Dirichlet 0.1": "dirichlet:0.1",
    "Dirichlet 0.3": "dirichlet:0.3",
    "Dirichlet 1": "dirichlet:1",
    "even": "iid",
}
TOGETHER = (
    "algorithm.steps=60",
    "algorithm.learning_rate=2",
    "algorithm.learning_rate_decay=0.2",
    "algorithm.polish_rounds=12",
    "run.evaluate_every=10",
)
ALONE, CENTRAL = "local, no messages", "dp-sgd, all data"
BY_EXAMPLES = "DP-CSGP, 4 bits, by examples"
CANCELLING = "DP-CSGP, 4 bits, by examples, cancelling, 3 colluders"
METHODS = {
    ALONE: (*LOCAL,),
    "DP-CSGP, 4 bits": (*TOGETHER, "compression.spec=rot:4"),
    BY_EXAMPLES: (
        *TOGETHER,
        "compression.spec=rot:4",
        "algorithm.node_weights=examples",
    ),
    CANCELLING: (
        *TOGETHER,
        "algorithm.learning_rate=3",
        "compression.spec=rot:4",
        "algorithm.node_weights=examples",
        "privacy.max_colluders=3",
    ),
    "dp2sgd, exact": (*TOGETHER, "algorithm.name=dp2sgd"),
    CENTRAL: (*TOGETHER, "algorithm.name=dp-sgd"),
}
# what the figure shows, and under which name
BARS = {
    ALONE: "every node alone",
    BY_EXAMPLES: "together, 4 bits per coordinate",
    CANCELLING: "together, noise that cancels (3 may collude)",
    CENTRAL: "all data in one place",
}


def skew(experiment: Experiment) -> list[Path]:
    """Compare all methods on all partitions."""
    partitions = dict(list(PARTITIONS.items())[::4]) if experiment.quick else PARTITIONS
    runs = experiment.run(
        [_cell(name, spec, method) for name, spec in partitions.items() for method in METHODS]
    )
    rows = table(runs)
    files = [
        write_csv(experiment.out / "table.csv", rows),
        write_csv(experiment.out / "curves.csv", raw_rows(runs)),
    ]
    files += save_figure(_figure(runs, list(partitions)), experiment.out / "figure")
    scores = (*SCORES, "accuracy_average_model")
    columns = ("data", "method", *scores, "bytes_per_edge", "epsilon_verified")
    columns += ("epsilon_all_collude", "repeats")
    page = experiment.write_page(
        "Skewed data: where collaboration pays",
        "MNIST, 784-128-10, 10 nodes, directed exponential graph, verified eps 0.5. *Two shards*: "
        "sorted by label, two pieces per node, so that a node sees about two of the ten digits. "
        "Test accuracy on all ten.",
        markdown(rows, columns),
        "![test accuracy of the mean node: alone, together, all data in one place](figure.png)",
        "`dp-sgd` holds all data in one place and is the same run in every row, with the learning "
        "rate of the others; `dpcsgp reproduce cancelling` has it with its own. *By examples*: a "
        "node counts in proportion to its declared number of examples (`algorithm.node_weights`). "
        "A Dirichlet split leaves some nodes with few examples, whose noise then drowns "
        "everybody's gradient if all count equally.",
    )
    return [*files, page]


def _cell(name: str, spec: str, method: str) -> Cell:
    # all data in one place know no partition: one run serves all rows
    central = METHODS[method][-1] == "algorithm.name=dp-sgd"
    return cell(
        *METHODS[method], f"task.partition={'iid' if central else spec}", data=name, method=method
    )


def _figure(runs: list[Done], names: list[str]) -> Figure:
    """Draw the mean node's accuracy as bars: alone, together, all data in one place."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        width = 0.8 / len(BARS)
        for index, (method, label) in enumerate(BARS.items()):
            values_RP = np.array(_values(runs, method, names, "accuracy_node_mean"))
            places = np.arange(len(names)) + (index - (len(BARS) - 1) / 2) * width
            bars = axes.bar(places, values_RP.mean(0), 0.92 * width, color=colour(index))
            axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
            bars.set_label(label)
        axes.set_xticks(np.arange(len(names)), names)
        axes.set_ylim(0, 119)
        axes.set_yticks(range(0, 101, 20))
        axes.grid(visible=False, axis="x")
        axes.set(ylabel="test accuracy of the mean node, %", xlabel="how the data are dealt")
        axes.set_title("10 nodes, MNIST, verified ε = 0.5")
        axes.legend(frameon=False, loc="upper center", ncols=2, fontsize=8)
    return figure


def _values(runs: list[Done], method: str, names: list[str], key: str) -> list[list[float]]:
    """Return accuracy in percent, one row per repeat, one column per partition."""
    columns = [
        [
            100 * run.summary[key]
            for run in runs
            if run.tags["method"] == method and run.tags["data"] == name
        ]
        for name in names
    ]
    return [list(values) for values in zip(*columns, strict=True)]
