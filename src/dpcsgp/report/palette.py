"""Colours and markers of runs: told apart by colour-blind readers, on light and on dark ground.

A run is recognised by colour and marker together; six colours and seven markers give 42 distinct
pairs.
"""

from __future__ import annotations

# (on light ground, on dark ground). Any two are at least 20 apart in CIELAB for normal sight and
# for simulated protanopia, deuteranopia and tritanopia, and each has a contrast of at least 3.5 to
# its ground.
COLOURS: tuple[tuple[str, str], ...] = (
    ("#0062b3", "#4aa5ea"),
    ("#9c3200", "#ee8e4d"),
    ("#10966d", "#54dead"),
    ("#a84489", "#cf7cb2"),
    ("#9c890f", "#f2de60"),
    ("#2b3642", "#e1eaf4"),
)
# matplotlib's name, and the sign that stands for it in text
MARKERS: tuple[tuple[str, str], ...] = (
    ("o", "●"),
    ("s", "■"),
    ("^", "▲"),
    ("D", "◆"),
    ("v", "▼"),
    ("P", "✚"),
    ("X", "✖"),
)
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
