"""Paper-like figures, and the files they are kept in: PNG, SVG, PDF and the raw rows as CSV.

Legend: P points of a curve, R repeats of a run.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from dpcsgp.errors import ConfigError
from dpcsgp.report.formatting import significant
from dpcsgp.report.palette import colour, marker

Spread = Literal["range", "deviation"]
PANEL_INCHES = (3.3, 2.7)
PANELS_PER_ROW = 4
FEW_POINTS = 15  # up to here every point gets its marker
STYLE: Any = {
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
SAVING: Any = {"svg.hashsalt": "dpcsgp", "pdf.fonttype": 42}
# ending -> notes in the file; without the date, equal figures give equal files
METADATA: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@final
@dataclass(frozen=True, eq=False)
class Curve:
    """One method in one panel: x (P,), and y (R, P) over the repeats of the run.

    A curve whose x is zero throughout (a run that sends nothing) is drawn as a horizontal line at
    its last point.
    """

    label: str
    x: ArrayLike
    y: ArrayLike

    def __post_init__(self) -> None:
        x_P, y_RP = np.asarray(self.x, dtype=np.float64), np.asarray(self.y, dtype=np.float64)
        if x_P.ndim != 1 or y_RP.ndim != 2 or y_RP.shape[1] != x_P.size or not y_RP.size:
            raise ConfigError(
                f"curve {self.label!r}: x has shape {x_P.shape} and y {y_RP.shape}; "
                "give x (points,) and y (repeats, points) with at least one of each"
            )

    @property
    def x_P(self) -> NDArray[np.float64]:
        """The places of the points."""
        return np.asarray(self.x, dtype=np.float64)

    @property
    def y_RP(self) -> NDArray[np.float64]:
        """The values, one row per repeat."""
        return np.asarray(self.y, dtype=np.float64)

    def mean_and_band(
        self, spread: Spread
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and edges over repeats; one that is not finite leaves a gap."""
        y_RP = np.where(np.isfinite(self.y_RP), self.y_RP, math.nan)
        mean = y_RP.mean(axis=0)
        if spread == "range":
            return mean, y_RP.min(axis=0), y_RP.max(axis=0)
        deviation = y_RP.std(axis=0, ddof=1) if y_RP.shape[0] > 1 else np.zeros_like(mean)
        return mean, mean - deviation, mean + deviation


def accuracy_panels(
    panels: Mapping[str, Sequence[Curve]],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    spread: Spread = "range",
) -> Figure:
    """Draw one panel per title (say, per eps), mean and spread over repeats, one legend for all.

    A label has one colour and marker in all panels. `spread` is the range (smallest to largest
    repeat) or one standard deviation to either side. With `log_x`, points at x = 0 cannot be shown
    and are left out.
    """
    if not panels:
        raise ConfigError(
            "panels is empty; give at least one panel, for example {'ε = 0.5': [Curve(...)]}"
        )
    # a label's place in this list gives its colour and marker
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    columns = min(len(panels), PANELS_PER_ROW)
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        # the figure grows with its panels and with the lines of the legend below them
        width = PANEL_INCHES[0] * columns
        per_row = _legend_columns(labels, width)
        lines = math.ceil(len(labels) / per_row)
        height = PANEL_INCHES[1] * rows + 0.3 + 0.2 * lines
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
            _panel(axes, title, curves, labels, log_x, spread)
            axes.set_xlabel(xlabel)
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()  # a last row that is not full
        for axes in grid[:, 0]:
            axes.set_ylabel(ylabel)
        figure.legend(
            handles=[_handle(index, label, panels) for index, label in enumerate(labels)],
            loc="outside lower center",
            ncols=per_row,
            frameon=False,
        )
    return figure


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many entries of a legend fit into one row of so many inches."""
    # 0.55 inches for the line and the gaps, 0.072 for a letter at font size 9
    longest = max(map(len, labels), default=1)
    return max(1, min(len(labels), int(width / (0.55 + 0.072 * longest))))


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem.png`, `stem.svg` and `stem.pdf`; equal figures give equal files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(SAVING):
        for ending, notes in METADATA.items():
            # not with_suffix: a stem such as fig1_eps0.5 has a dot
            path = stem.with_name(f"{stem.name}.{ending}")
            figure.savefig(path, dpi=200, metadata=notes)
            paths.append(path)
    return paths


def write_figure(path: Path, draw: Callable[[], Figure]) -> Path:
    """Draw a command's `--figure` and write it as PNG, SVG or PDF, by the ending of its name."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in METADATA:
        raise ConfigError(f"--figure {path}: expected a name that ends in .png, .svg or .pdf")
    figure = draw()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(SAVING):
            figure.savefig(path, dpi=160, metadata=METADATA[ending])
    except OSError as error:
        raise ConfigError(
            f"--figure {path} cannot be written: {error.strerror}; choose another name"
        ) from None
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write raw rows as CSV: columns as they first appear, lists as JSON, gaps empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _csv_value(value) for key, value in row.items()})
    return path


def _csv_value(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _panel(
    axes: Axes, title: str, curves: Sequence[Curve], labels: list[str], log_x: bool, spread: Spread
) -> None:
    axes.set_title(title)
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, numticks=8))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    for curve in curves:
        index = labels.index(curve.label)
        mean, low, high = curve.mean_and_band(spread)
        # a run that sends nothing is a level, not a curve
        if _is_level(curve):
            axes.axhline(float(mean[-1]), linestyle=":", color=colour(index))
            axes.axhspan(
                float(low[-1]), float(high[-1]), color=colour(index), alpha=0.12, linewidth=0
            )
            continue
        kept = curve.x_P > 0 if log_x else np.ones(curve.x_P.shape, dtype=bool)
        every = 1 if kept.sum() <= FEW_POINTS else max(1, int(kept.sum()) // 8)
        axes.fill_between(
            curve.x_P[kept], low[kept], high[kept], color=colour(index), alpha=0.18, linewidth=0
        )
        axes.plot(
            curve.x_P[kept], mean[kept], color=colour(index), marker=marker(index), markevery=every
        )


def _is_level(curve: Curve) -> bool:
    return not curve.x_P.any()


def _handle(index: int, label: str, panels: Mapping[str, Sequence[Curve]]) -> Line2D:
    level = all(
        _is_level(curve) for curves in panels.values() for curve in curves if curve.label == label
    )
    style: dict[str, Any] = {"linestyle": ":"} if level else {"marker": marker(index)}
    return Line2D([], [], color=colour(index), label=label, **style)
