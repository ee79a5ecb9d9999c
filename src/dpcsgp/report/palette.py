"""Colours and markers of runs: told apart by colour-blind readers, in print, on light and on dark ground.

A run is recognised by colour and marker together; six colours and seven markers give 42 distinct pairs.
"""

from __future__ import annotations

# (on light ground, on dark ground), dark and light ones alternating so that neighbours differ in brightness too.
COLOURS: tuple[tuple[str, str], ...] = (
    ("#0068a8", "#5cb3f0"),
    ("#d55e00", "#ff9a57"),
    ("#007a5a", "#3fcfa3"),
    ("#aa4499", "#e58fd6"),
    ("#8a6d00", "#e3c54a"),
    ("#4b5563", "#b4c0cc"),
)
MARKERS: tuple[tuple[str, str], ...] = (
    ("o", "●"),
    ("s", "■"),
    ("^", "▲"),
    ("D", "◆"),
    ("v", "▼"),
    ("P", "✚"),
    ("X", "✖"),
)  # matplotlib's name, and the sign that stands for it in text
INK = "#010101"  # stand-ins that become the page's own colours when a figure is put into it
GRID = "#020202"


def colour(index: int) -> str:
    """Return the colour of the run with this number, counted from zero."""
    return COLOURS[index % len(COLOURS)][0]


def colour_name(index: int) -> str:
    """Return the name under which the page's style sheet knows that colour."""
    return f"--series-{index % len(COLOURS) + 1}"


def marker(index: int) -> str:
    """Return matplotlib's name of the run's marker."""
    return MARKERS[index % len(MARKERS)][0]


def marker_sign(index: int) -> str:
    """Return the run's marker as a character."""
    return MARKERS[index % len(MARKERS)][1]
