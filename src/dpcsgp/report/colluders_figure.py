"""The figure of collusion: the eps that is left when more and more of the others tell all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpcsgp.report.figures import STYLE, write_figure
from dpcsgp.report.palette import colour, marker


def colluders_figure(
    epsilons: Sequence[float], max_colluders: int | Literal["all"], delta: float
) -> Figure:
    """Draw eps of the worst node against 0, 1, ... colluders, and mark what is promised."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(range(len(epsilons)), epsilons, marker=marker(0), color=colour(0))
        if max_colluders != "all" and max_colluders < len(epsilons):
            promised = epsilons[max_colluders]
            axes.plot([max_colluders], [promised], marker="o", color=colour(1), markersize=8)
            axes.annotate(
                f"promised: ε = {promised:.3g}\nagainst any {max_colluders} colluders",
                (max_colluders, promised),
                xytext=(0, 18),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_ylim(bottom=0, top=1.15 * max(epsilons))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(
            xlabel="other nodes that tell all they know (last: all of them)",
            ylabel="ε of the worst node",
            title=f"who may collude, δ = {delta:g}",
        )
    return figure


def write_colluders_figure(
    path: Path, epsilons: Sequence[float], max_colluders: int | Literal["all"], delta: float
) -> Path:
    """Write the figure to a PNG, SVG or PDF file, by the ending of its name."""
    return write_figure(path, lambda: colluders_figure(epsilons, max_colluders, delta))
