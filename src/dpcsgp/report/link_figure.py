"""The figure of thin links: accuracy against seconds, one curve per message format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dpcsgp.errors import ConfigError
from dpcsgp.report.figures import STYLE, write_figure
from dpcsgp.report.palette import colour, marker


def link_figure(curves: Sequence[Mapping[str, Any]], target: float, title: str) -> Figure:
    """Draw `accuracy` against `seconds` for every curve, and the accuracy that is to be reached."""
    if not curves:
        raise ConfigError("no curves to draw: run `dpcsgp benchmark link`")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for index, curve in enumerate(curves):
            percent = [100 * value for value in curve["accuracy"]]
            megabytes = curve["bytes_per_edge"] / 1e6
            axes.plot(
                curve["seconds"],
                percent,
                marker=marker(index),
                markersize=3,
                color=colour(index),
                label=f"{curve['spec']}: {megabytes:,.2f} MB per edge",
            )
        axes.axhline(100 * target, color="0.5", linewidth=0.8, linestyle="--")
        axes.set(xlabel="seconds", ylabel="mean accuracy, %", title=title)
        axes.set_xlim(left=0)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def write_link_figure(
    path: Path, curves: Sequence[Mapping[str, Any]], target: float, title: str
) -> Path:
    """Write the figure to a PNG, SVG or PDF file, by the ending of its name."""
    return write_figure(path, lambda: link_figure(curves, target, title))
