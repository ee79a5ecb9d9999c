"""The doctor's figure: radius of compressed gossip against the mixing rate.

Legend: R mixing rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import ArrayLike

from dpcsgp.errors import ConfigError
from dpcsgp.report.figures import STYLE, write_figure
from dpcsgp.report.formatting import significant
from dpcsgp.report.palette import colour, marker

HIGHEST_RADIUS = 1.3  # beyond, only the sense of the curve matters: it is cut off


def radius_figure(title: str, rates_R: ArrayLike, curves: Mapping[str, ArrayLike]) -> Figure:
    """Draw radius against mixing rate; above 1 disagreement grows, a dot is the lowest."""
    if not curves:
        raise ConfigError(
            "no curve to draw: none of the compressors has a radius (top and sign have none)"
        )
    rates = np.asarray(rates_R, dtype=np.float64)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 3.8), layout="constrained")
        axes = figure.add_subplot()
        # the region where gossip diverges
        axes.axhspan(1.0, 10.0, color="#9c3200", alpha=0.10, linewidth=0)
        axes.axhline(1.0, color="#9c3200", linewidth=1.0)
        for index, (label, values) in enumerate(curves.items()):
            radii = np.asarray(values, dtype=np.float64)
            best = int(np.argmin(radii))
            style = "-" if index < 6 else "--"  # there are six colours
            axes.plot(rates, radii, style, color=colour(index), label=label)
            axes.plot(
                rates[best], radii[best], marker=marker(index), color=colour(index), markersize=6
            )
        lowest = min(float(np.min(np.asarray(values))) for values in curves.values())
        axes.set_ylim(max(0.0, lowest - 0.04), HIGHEST_RADIUS)
        words = " above 1: the nodes drift apart"
        axes.text(rates[0], 1.015, words, color="#9c3200", va="bottom", fontsize=8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
        axes.set(xlabel="mixing rate", ylabel="radius per round", title=title)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def write_radius_figure(
    path: Path, title: str, rates_R: ArrayLike, curves: Mapping[str, ArrayLike]
) -> Path:
    """Write the figure to a PNG, SVG or PDF file, by the ending of its name."""
    return write_figure(path, lambda: radius_figure(title, rates_R, curves))
