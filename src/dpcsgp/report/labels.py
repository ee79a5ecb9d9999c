"""Names beside the points of a figure, moved apart where they would cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

# where a name may stand, in points from its own: beside it first, then further and further off
_ACROSS = (6, -6)
_UP = (0, 8, -8, 16, -16, 24, -24, 34, -34, 46, -46, 60, -60)


def label_points(
    axes: Axes,
    names: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    colours: Sequence[str],
) -> None:
    """Write a name beside every point, in the first place where it covers no other name or point.

    Args:
        axes: where the points are drawn already; its limits must not change afterwards.
        names: one per point.
        x: their places.
        y: their heights.
        colours: of the texts.
    """
    figure = axes.figure
    canvas = FigureCanvasAgg(figure)  # type: ignore[arg-type]
    canvas.draw()  # sizes of texts are known only once something was drawn
    taken: list[Bbox] = [text.get_window_extent() for text in axes.texts]
    places = axes.transData.transform(list(zip(x, y, strict=True)))
    taken += [Bbox.from_bounds(left - 4, low - 4, 8, 8) for left, low in places]
    for name, across, up, shade in zip(names, x, y, colours, strict=True):
        text = axes.annotate(
            name, (across, up), xytext=(6, 0), textcoords="offset points", fontsize=7, color=shade
        )
        text.set_verticalalignment("center")
        frame = axes.get_window_extent()
        for high, side in product(_UP, _ACROSS):
            text.set_position((side, high))
            text.set_horizontalalignment("left" if side > 0 else "right")
            box = text.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(text.get_window_extent())
