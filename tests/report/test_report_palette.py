"""Colours that stand out from the ground and from one another, for any colour vision."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dpcsgp.report.palette import COLOURS, MARKERS, colour, marker

# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
Floats = NDArray[np.float64]


def linear(spelled: str) -> Floats:
    channels = np.array([int(spelled[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(rgb: Floats) -> Floats:
    x = XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colours_differ(sight: str, column: int) -> None:
    seen = [cielab(np.array(SIGHT[sight]) @ linear(pair[column])) for pair in COLOURS]
    distances = [
        np.linalg.norm(first - second)
        for index, first in enumerate(seen)
        for second in seen[:index]
    ]
    assert min(distances) >= 20


@pytest.mark.parametrize(("column", "ground"), [(0, "#ffffff"), (1, "#161d25")])
def test_colours_stand_out_from_the_ground(column: int, ground: str) -> None:
    for pair in COLOURS:
        dark, bright = sorted(
            float(XYZ[1] @ linear(spelled)) + 0.05 for spelled in (pair[column], ground)
        )
        assert bright / dark >= 3.5


def test_42_runs_have_looks_of_their_own() -> None:
    number = len(COLOURS) * len(MARKERS)
    assert len({(colour(index), marker(index)) for index in range(number)}) == number == 42
