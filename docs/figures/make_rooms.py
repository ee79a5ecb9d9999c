"""Draw the rooms of the package, floor by floor, from the import layers in pyproject.toml.

    python docs/figures/make_rooms.py

It writes rooms.svg beside this file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PYPROJECT = HERE.parents[1] / "pyproject.toml"
PICTURE = HERE / "rooms.svg"

WIDTH, FLOOR, GAP, MARGIN, ARROW = 660, 34, 10, 12, 46
# Rooms in which a gradient becomes private, and rooms that only ever see what is public.
PRIVATE, PUBLIC = "#f6d8cf", "#dfe9f5"


def layers(pyproject: Path = PYPROJECT) -> list[list[str]]:
    """Return the rooms of every floor, the highest first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]
    (found,) = (each["layers"] for each in contracts["contracts"] if each["type"] == "layers")
    return [
        [room.strip(" ()").removeprefix("dpcsgp.") for room in floor.split("|")] for floor in found
    ]


def drawn(floors: list[list[str]]) -> str:
    """Return the picture as SVG: a row of boxes per floor, and an arrow down beside them."""
    height = 2 * MARGIN + len(floors) * FLOOR + (len(floors) - 1) * GAP
    left, inner = MARGIN + ARROW, WIDTH - 2 * MARGIN - ARROW
    middle = MARGIN + ARROW / 2 - 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="14" text-anchor="middle">',
        "<title>Rooms of the package; imports point downwards</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<path d="M{middle} {MARGIN} V{height - MARGIN - 8}" stroke="#66717c" stroke-width="2"/>',
        f'<path d="M{middle - 6} {height - MARGIN - 10} h12 l-6 10 z" fill="#66717c"/>',
        f'<text transform="translate({middle + 18} {height / 2}) rotate(-90)" fill="#66717c">'
        "imports</text>",
    ]
    for number, rooms in enumerate(floors):
        top = MARGIN + number * (FLOOR + GAP)
        width = (inner - (len(rooms) - 1) * GAP) / len(rooms)
        for place, room in enumerate(rooms):
            x = left + place * (width + GAP)
            fill = PRIVATE if room == "privacy" else PUBLIC
            parts.append(
                f'<rect x="{x:g}" y="{top}" width="{width:g}" height="{FLOOR}" rx="5" '
                f'fill="{fill}" stroke="#8a949e"/>'
            )
            parts.append(
                f'<text x="{x + width / 2:g}" y="{top + FLOOR / 2 + 5:g}" fill="#1c2733">'
                f"{room}</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(layers()), encoding="utf-8")
