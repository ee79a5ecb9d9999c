"""The page's charts: accuracy against steps and megabytes, every node's, eps, disagreement.

Charts carry no run names: a legend beside them serves all, and a run keeps its colour and marker
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dpcsgp.report.folders import Floats, RunResults, is_party, node_values
from dpcsgp.report.formatting import as_number, epsilon, score, significant
from dpcsgp.report.palette import GRID, INK, colour, marker
from dpcsgp.report.svg import inline_svg

# inches of 72 points: small enough that text stays readable on a phone
WIDTH, HEIGHT = 360 / 72, 244 / 72
DETAILED_RUNS = 4  # beyond this, bands and average models would hide one another
LOG_RATIO = 20.0  # a wider range than this needs a logarithmic axis
ROUND = [1, 2, 2.5, 5, 10]  # steps between ticks that a reader can count in
STYLE: Any = {
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.9,
    "lines.markersize": 4.5,
}


@final
@dataclass(frozen=True)
class Chart:
    """A drawing with its words; without anything to draw `svg` is empty, `caption` says why."""

    key: str
    title: str
    caption: str
    svg: str = ""


Draw = Callable[[Axes], None]


def charts(runs: Sequence[RunResults], metrics: Sequence[str]) -> list[Chart]:
    """Draw all charts of a page; each metric has its own, in which runs without it are absent."""
    # A party knows its own model only: nothing to compare it with.
    parties = all(map(is_party, runs))
    of_metric = (_score_against_steps, _score_against_megabytes, _score_of_nodes)
    scores = [
        draw(runs, metric, f"-{number}" if number else "")
        for number, metric in enumerate(metrics)
        for draw in (of_metric[:2] if parties else of_metric)
    ]
    return [
        *scores,
        _epsilon_against_steps(runs),
        *([] if parties else [_disagreement_against_steps(runs)]),
    ]


def score_axis(metric: str) -> tuple[str, float]:
    """Return the label of a metric's axis and the factor that brings values to its unit."""
    return ("test accuracy (%)", 100.0) if metric == "accuracy" else (metric.replace("_", " "), 1.0)


def _draw(key: str, xlabel: str, ylabel: str, description: str, draw: Draw) -> str:
    """Return one chart as SVG: frame and labels here, curves by `draw`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        # lies over the axis: a turned label would cost a phone a tenth of its width
        axes.set_title(ylabel)
        axes.set_xlabel(xlabel)
        draw(axes)
        return inline_svg(figure, key, description)


def _score_against_steps(runs: Sequence[RunResults], metric: str, suffix: str) -> Chart:
    ylabel, scale = score_axis(metric)

    def draw(axes: Axes) -> None:
        for index, run in enumerate(runs):
            _score_curve(axes, index, run, metric, run.column("step"), len(runs) <= DETAILED_RUNS)
            # nodes alone are the control: where they ended runs through the whole chart
            if run.trained_alone:
                _level(axes, index, scale * run.column(f"{metric}_node_mean")[-1])
        _step_ticks(axes)
        _name_last_value(axes, runs, metric, runs[0].column("step")[-1])

    whose = "The party's own model" if all(map(is_party, runs)) else "Mean over the nodes"
    caption = f"{whose} after each evaluation, on public test data. "
    caption += "The last point includes the rounds of pure averaging, if there were any."
    svg = _draw(f"steps{suffix}", "gradient steps", ylabel, _describe(runs, metric, "steps"), draw)
    return Chart(f"steps{suffix}", f"{_noun(metric)} against steps", caption, svg)


def _score_against_megabytes(runs: Sequence[RunResults], metric: str, suffix: str) -> Chart:
    ylabel, scale = score_axis(metric)
    title = f"{_noun(metric)} against communication"
    talking = [run.column("bytes_per_edge")[-1] / 1e6 for run in runs if not run.sends_nothing]
    ends = [end for end in talking if math.isfinite(end) and end > 0]
    if not ends:
        caption = "No message was sent in any of these runs, so there is nothing to draw."
        return Chart(f"megabytes{suffix}", title, caption)
    logarithmic = _is_wide(ends)

    def draw(axes: Axes) -> None:
        for index, run in enumerate(runs):
            if run.sends_nothing:
                _level(axes, index, scale * run.column(f"{metric}_node_mean")[-1], shown=True)
            else:
                # the start, before any message, has no place on a logarithmic axis
                megabytes = run.column("bytes_per_edge") / 1e6
                x = np.where(megabytes > 0, megabytes, math.nan) if logarithmic else megabytes
                _score_curve(axes, index, run, metric, x, len(runs) <= DETAILED_RUNS)
        if logarithmic:
            axes.set_xscale("log")
            _plain_log_ticks(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
        _name_last_value(axes, runs, metric, runs[0].column("bytes_per_edge")[-1] / 1e6)

    caption = "Bytes are counted when frames are sent, headers included; 1 MB = 1,000,000 bytes. "
    if any(run.sends_nothing for run in runs):
        caption += "Dotted lines: runs that send nothing. "
    svg = _draw(
        f"megabytes{suffix}",
        "MB sent per directed edge",
        ylabel,
        _describe(runs, metric, "megabytes"),
        draw,
    )
    return Chart(f"megabytes{suffix}", title, caption.strip(), svg)


def _score_of_nodes(runs: Sequence[RunResults], metric: str, suffix: str) -> Chart:
    ylabel, scale = score_axis(metric)
    alone = len(runs) == 1

    def draw(axes: Axes) -> None:
        for index, run in enumerate(runs):
            values = scale * node_values(run.last, f"{metric}_nodes")
            # marks of a run lie side by side around its number, in the order of the nodes
            beside = np.linspace(-0.3, 0.3, values.size) if values.size > 1 else np.zeros(1)
            places = index + 1 + beside
            style: dict[str, Any] = {"color": colour(index), "gid": f"run-{index + 1}"}
            axes.plot([index + 0.62, index + 1.38], [values.mean()] * 2, linewidth=1.4, **style)
            size = 6 if alone else 4.5
            axes.plot(
                places, values, linestyle="none", marker=marker(index), markersize=size, **style
            )
            if alone:
                _label_nodes(axes, places, run.last.get("nodes"))
        axes.set_xlim(0.6, len(runs) + 0.4)
        if not alone:
            axes.set_xticks(range(1, len(runs) + 1, math.ceil(len(runs) / 16)))

    caption = "Each mark is one node's own model at the end; the line is their mean. "
    lower = any(run.lower_is_better(metric) for run in runs if metric in run.metrics)
    caption += f"A {'high' if lower else 'low'} mark is a node left behind."
    description = f"{_noun(metric)} of every node at the end of a run."
    svg = _draw(f"nodes{suffix}", "node" if alone else "run", ylabel, description, draw)
    return Chart(f"nodes{suffix}", f"{_noun(metric)} of every node at the end", caption, svg)


def _epsilon_against_steps(runs: Sequence[RunResults]) -> Chart:
    title = "Privacy spent"
    curves = [run.per_node("epsilon_nodes", lambda values: float(values.max())) for run in runs]
    claims = [run.number("epsilon_claimed") for run in runs]
    ends = [end for end in (curve[-1] for curve in curves) if math.isfinite(end) and end > 0]
    if not ends:
        caption = "No run has a finite ε: without noise nothing bounds what messages reveal."
        return Chart("epsilon", title, caption)
    levels = ends + [claim for claim in claims if math.isfinite(claim) and claim > 0]
    logarithmic = _is_wide(levels)

    def draw(axes: Axes) -> None:
        for index, (run, curve, claim) in enumerate(zip(runs, curves, claims, strict=True)):
            y = np.where(np.isfinite(curve) & ((curve > 0) | (not logarithmic)), curve, math.nan)
            low = run.per_node("epsilon_nodes", lambda values: float(values.min()))
            # nodes with budgets of their own: the range down to the one that spent least
            if np.any(low < y):
                _band(axes, index, run.column("step"), np.where(np.isfinite(low), low, math.nan), y)
            _curve(axes, index, run.column("step"), y)
            if math.isfinite(claim):
                _level(axes, index, claim)
        _step_ticks(axes)
        _scale_y(axes, logarithmic)

    whose = "this party" if all(map(is_party, runs)) else "the node that has spent most"
    caption = f"Verified ε of {whose}, from the releases in its ledger. "
    caption += "Dotted: the ε asked for."
    svg = _draw("epsilon", "gradient steps", "verified ε", "Verified eps against steps.", draw)
    return Chart("epsilon", title, caption, svg)


def _disagreement_against_steps(runs: Sequence[RunResults]) -> Chart:
    title = "Disagreement between nodes"
    curves = [run.column("disagreement") for run in runs]
    known = np.concatenate([curve[np.isfinite(curve) & (curve > 0)] for curve in curves])
    if not known.size:
        caption = "Nothing to draw: there is one node only, or the distance was not recorded."
        return Chart("disagreement", title, caption)
    logarithmic = _is_wide(known)

    def draw(axes: Axes) -> None:
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
            y = np.where((curve > 0) | (not logarithmic), curve, math.nan)
            _curve(axes, index, run.column("step"), y)
        _scale_y(axes, logarithmic)
        _step_ticks(axes)

    caption = "Root mean square distance of the nodes' models from their mean. "
    caption += "It must not grow without end: that is divergence."
    ylabel, description = "distance (parameter units)", "Disagreement against steps."
    svg = _draw("disagreement", "gradient steps", ylabel, description, draw)
    return Chart("disagreement", title, caption, svg)


def _is_wide(values: Sequence[float] | Floats) -> bool:
    """Say whether positive values span so much that they need a logarithmic axis."""
    return bool(max(values) / min(values) > LOG_RATIO)


def _step_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=ROUND))


def _scale_y(axes: Axes, logarithmic: bool) -> None:
    """Make the vertical axis logarithmic, or let it start at zero."""
    if logarithmic:
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def _score_curve(
    axes: Axes, index: int, run: RunResults, metric: str, x: Floats, detailed: bool
) -> None:
    """Draw the node mean; where there is room, the range over nodes and the average model too."""
    scale = score_axis(metric)[1]
    if detailed:
        low = run.per_node(f"{metric}_nodes", lambda values: float(values.min()))
        high = run.per_node(f"{metric}_nodes", lambda values: float(values.max()))
        _band(axes, index, x, scale * low, scale * high)
        average = scale * run.column(f"{metric}_average_model")
        style: dict[str, Any] = {"color": colour(index), "gid": f"run-{index + 1}"}
        axes.plot(x, average, linestyle=(0, (4, 2)), linewidth=1.3, **style)
    _curve(axes, index, x, scale * run.column(f"{metric}_node_mean"))


def _curve(axes: Axes, index: int, x: Floats, y: Floats) -> None:
    # the page hides and shows a run by its gid; about ten markers per curve, a gap where not finite
    style: dict[str, Any] = {"color": colour(index), "gid": f"run-{index + 1}"}
    style |= {"marker": marker(index), "markevery": max(1, len(x) // 10), "markeredgewidth": 0}
    axes.plot(x, np.where(np.isfinite(y), y, math.nan), **style)


def _band(axes: Axes, index: int, x: Floats, low: Floats, high: Floats) -> None:
    axes.fill_between(
        x, low, high, color=colour(index), alpha=0.18, linewidth=0, gid=f"run-{index + 1}"
    )


def _level(axes: Axes, index: int, y: float, shown: bool = False) -> None:
    """Draw a dotted horizontal line; `shown` makes it as strong as a curve."""
    if math.isfinite(y):
        width = 1.9 if shown else 1.1
        axes.axhline(y, linestyle=":", linewidth=width, color=colour(index), gid=f"run-{index + 1}")


def _name_last_value(axes: Axes, runs: Sequence[RunResults], metric: str, x: float) -> None:
    """Write the final value beside the curve of a run that is alone."""
    value = as_number(runs[0].last.get(f"{metric}_node_mean"))
    if len(runs) > 1 or not math.isfinite(value):
        return
    place = (x, score_axis(metric)[1] * value)
    # Under the end of a rising curve, over that of a falling one: away from the axis.
    low, high = axes.get_ylim()
    falls = place[1] < (low + high) / 2
    style: dict[str, Any] = {"ha": "right", "va": "bottom" if falls else "top", "weight": "bold"}
    offset = (0, 9 if falls else -9)
    axes.annotate(score(metric, value), place, offset, textcoords="offset points", **style)


def _label_nodes(axes: Axes, places: Floats, nodes: Any) -> None:
    names = nodes if isinstance(nodes, list) and len(nodes) == places.size else range(places.size)
    every = math.ceil(places.size / 16)  # more labels than that would overlap
    axes.set_xticks(places[::every], [str(name) for name in names][::every])


def _plain_log_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers: 0.1, 1, 10."""
    low, high = axis.get_view_interval()
    narrow = high / low < 100
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if narrow else (1,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    axis.set_minor_formatter(NullFormatter())


def _noun(metric: str) -> str:
    return metric.replace("_", " ").capitalize()


def _describe(runs: Sequence[RunResults], metric: str, unit: str) -> str:
    """Say in words what the chart shows, for those who cannot see it."""
    ends = [
        f"{run.name}: {score(metric, as_number(run.last.get(f'{metric}_node_mean')))}"
        for run in runs
    ]
    spent = [epsilon(run.number("epsilon")) for run in runs]
    ends = [f"{end} at eps {eps}" for end, eps in zip(ends, spent, strict=True)]
    whose = "own model" if all(map(is_party, runs)) else "node mean"
    return f"{_noun(metric)} ({whose}) against {unit}. At the end: {'; '.join(ends)}."
