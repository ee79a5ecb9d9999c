"""Put a matplotlib figure into a page: inline SVG that follows the page's style sheet."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib
from matplotlib.figure import Figure

from dpcsgp.report.palette import COLOURS, GRID, INK, colour_name

STYLE_COLOURS = {
    INK: "currentColor",
    GRID: "var(--grid)",
    **{light: f"var({colour_name(index)})" for index, (light, _) in enumerate(COLOURS)},
}


def inline_svg(figure: Figure, key: str, description: str) -> str:
    """Return the figure as an `<svg>` element; `key` keeps its ids apart on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Metadata only name the drawing program, and the style element would reach the whole page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    # the page shows and hides a run by its class; all other ids must be unique on the page
    text = re.sub(r' id="(run-\d+)"', r' class="\1"', text)
    text = re.sub(r' id="([^"]+)"', rf' id="{key}-\1"', text)
    text = re.sub(r"url\(#|xlink:href=\"#", lambda found: f"{found.group()}{key}-", text)
    # stand-ins become the page's colours, so that dark mode works
    for colour, style in STYLE_COLOURS.items():
        text = text.replace(colour, style)
    viewbox = re.search(r'viewBox="[^"]+"', text)
    assert viewbox is not None
    opening = f'<svg {viewbox.group()} role="img" aria-label="{escape(description)}" '
    opening += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opening + re.sub(r"\s*\n\s*", "\n", text[text.index(">") + 1 :])
