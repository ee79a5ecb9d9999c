"""Draw the picture of noise that cancels: `python docs/figures/make_cancelling.py`.

Three nodes and one coordinate: what each adds, what is seen of each, and what is left in the average.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpcsgp.report.figures import STYLE
from dpcsgp.report.palette import colour

HERE = Path(__file__).parent
NAMES = ("A", "B", "C")
GRADIENTS = (1.0, 1.4, 0.6)
OWN = (0.35, -0.25, 0.15)
PAIRS = {(0, 1): 2.1, (0, 2): -1.2, (1, 2): 0.8}  # what the first adds and the second subtracts


def main() -> None:
    shared = [0.0, 0.0, 0.0]
    for (first, second), value in PAIRS.items():
        shared[first] += value
        shared[second] -= value
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        panels = figure.subplots(1, 3)
        _pairs(panels[0])
        _messages(panels[1], shared)
        _average(panels[2])
    figure.savefig(HERE / "cancelling-idea.png", dpi=160)


def _pairs(axes: Axes) -> None:
    """Three nodes, an edge of shared noise between any two."""
    places = ((0.5, 0.85), (0.08, 0.15), (0.92, 0.15))
    for (first, second), value in PAIRS.items():
        (x0, y0), (x1, y1) = places[first], places[second]
        axes.plot([x0, x1], [y0, y1], color=colour(3), linewidth=2, zorder=1)
        for share, sign in ((0.3, 1), (0.7, -1)):
            x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
            axes.text(x, y, f"{sign * value:+.1f}", ha="center", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, zorder=2)  # fmt: skip
    for name, (x, y) in zip(NAMES, places, strict=True):
        axes.scatter([x], [y], s=520, color=colour(0), zorder=3)
        axes.text(x, y, name, ha="center", va="center", color="white", weight="bold", zorder=4)
    axes.set(xlim=(-0.15, 1.15), ylim=(-0.1, 1.1), title="each pair shares a secret number")
    axes.axis("off")


def _messages(axes: Axes, shared: list[float]) -> None:
    """What is in each message, and what everybody sees of it."""
    for place, name in enumerate(NAMES):
        axes.bar(place - 0.2, GRADIENTS[place], 0.36, color=colour(2))
        seen = GRADIENTS[place] + OWN[place] + shared[place]
        axes.bar(place + 0.2, seen, 0.36, color=colour(1))
        axes.text(place, -2.5, name, ha="center")
    axes.bar(0, 0, color=colour(2), label="the clipped sum (secret)")
    axes.bar(0, 0, color=colour(1), label="the message (seen)")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks([])
    axes.set(ylim=(-2.8, 3.4), title="a message hides its node well")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _average(axes: Axes) -> None:
    """The average of the messages is the average of the sums, but for a little own noise."""
    true, seen = sum(GRADIENTS) / 3, sum(GRADIENTS) / 3 + sum(OWN) / 3
    axes.bar([0, 1], [true, seen], 0.5, color=[colour(2), colour(1)])
    axes.set_xticks([0, 1], ["of the sums", "of the messages"])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylim=(-2.8, 3.4), title="the average is nearly clean")


if __name__ == "__main__":
    main()
