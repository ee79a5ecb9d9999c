"""The figure of scale: cost per node and step, and peak memory, against the number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dpcsgp.errors import ConfigError
from dpcsgp.report.figures import STYLE, write_figure
from dpcsgp.report.palette import colour, marker


def scale_figure(points: Sequence[Mapping[str, float]]) -> Figure:
    """Draw `wall` and `cpu` (seconds per node and step) and `peak` (bytes) against `num_nodes`."""
    if not points:
        raise ConfigError("no points to draw: run `dpcsgp benchmark scale`")
    nodes = [point["num_nodes"] for point in points]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        cost, memory = figure.subplots(1, 2)
        clocks = {"wall": "wall clock", "cpu": "processor time, all cores"}
        for index, (key, label) in enumerate(clocks.items()):
            values = [1e3 * point[key] for point in points]
            cost.plot(nodes, values, marker=marker(index), color=colour(index), label=label)
        cost.set_ylim(bottom=0)
        cost.set(xlabel="simulated nodes", ylabel="ms per node and step", title="cost")
        cost.legend(frameon=False, fontsize=8)
        gigabytes = [point["peak"] / 1e9 for point in points]
        memory.plot(nodes, gigabytes, marker=marker(2), color=colour(2))
        title = "peak memory of the process"
        memory.set(xlabel="simulated nodes", ylabel="GB", title=title, yscale="log")
        memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axes in (cost, memory):
            axes.set_xscale("log")
            axes.set_xticks(nodes, [f"{count:g}" for count in nodes])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
    return figure


def write_scale_figure(path: Path, points: Sequence[Mapping[str, float]]) -> Path:
    """Write the figure to a PNG, SVG or PDF file, by the ending of its name."""
    return write_figure(path, lambda: scale_figure(points))
