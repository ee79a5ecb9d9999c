"""Paper-like figures: mean and spread over repeats, one colour per method, the same files."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from dpcsgp.errors import ConfigError
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv

X = np.array([0.0, 10.0, 100.0, 1000.0])
Y = np.array([[0.1, 0.5, 0.7, 0.8], [0.1, 0.6, 0.8, 0.9], [0.1, 0.4, 0.6, 0.7]])


def two_panels(log_x: bool = False) -> Figure:
    exact = Curve("dp2sgd", X * 30, Y)
    ours = Curve("dp-csgp, rot:1", X, Y - 0.01)
    alone = Curve("local", np.zeros(4), Y - 0.2)
    return accuracy_panels(
        {"ε = 0.5": [ours, exact, alone], "ε = 0.2 $x_": [exact, alone]},
        "MB per edge",
        "test accuracy",
        log_x=log_x,
    )


def test_mean_and_band_over_repeats() -> None:
    curve = Curve("a", X, Y)
    mean, low, high = curve.mean_and_band("range")
    np.testing.assert_allclose(mean, Y.mean(axis=0))
    np.testing.assert_array_equal(low, Y.min(axis=0))
    np.testing.assert_array_equal(high, Y.max(axis=0))
    mean, low, high = curve.mean_and_band("deviation")
    np.testing.assert_allclose(high - mean, Y.std(axis=0, ddof=1), atol=1e-15)
    assert Curve("one repeat", X, Y[:1]).mean_and_band("deviation")[1].tolist() == Y[0].tolist()


def test_a_diverged_repeat_leaves_a_gap() -> None:
    y = Y.copy()
    y[1, 3] = math.inf
    mean, low, _ = Curve("a", X, y).mean_and_band("range")
    assert np.isnan([mean[3], low[3]]).all()
    assert np.isfinite(mean[:3]).all()


@pytest.mark.parametrize(("x", "y"), [(X, Y[0]), (X[:2], Y), (X, np.zeros((0, 4))), (Y, Y)])
def test_shapes_are_checked(x: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"curve 'a'.*give x \(points,\)"):
        Curve("a", x, y)


def test_a_method_keeps_its_colour_and_zero_bytes_become_a_level() -> None:
    figure = two_panels()
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["ε = 0.5", "ε = 0.2 $x_"]
    assert first.lines[1].get_color() == second.lines[0].get_color() != first.lines[0].get_color()
    level = second.lines[1]
    np.testing.assert_allclose(np.asarray(level.get_ydata(), dtype=float), Y.mean(axis=0)[-1] - 0.2)
    assert level.get_linestyle() == ":"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dp-csgp, rot:1",
        "dp2sgd",
        "local",
    ]
    assert sum(isinstance(artist, PolyCollection) for artist in first.collections) == 2


def test_a_logarithmic_axis_leaves_out_zero() -> None:
    axes = two_panels(log_x=True).axes[0]
    assert axes.get_xscale() == "log"
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [10.0, 100.0, 1000.0]


def test_five_panels_wrap_and_none_are_refused() -> None:
    figure = accuracy_panels({str(panel): [Curve("a", X, Y)] for panel in range(5)}, "x", "y")
    assert len(figure.axes) == 5
    with pytest.raises(ConfigError, match="panels is empty"):
        accuracy_panels({}, "x", "y")


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    def figure() -> Figure:
        return accuracy_panels({"ε": [Curve("a", X, Y)]}, "x", "y", log_x=True)

    paths = [save_figure(figure(), tmp_path / name / "fig1_eps0.5") for name in ("a", "b")]
    assert [path.name for path in paths[0]] == [
        "fig1_eps0.5.png",
        "fig1_eps0.5.svg",
        "fig1_eps0.5.pdf",
    ]
    for first, second in zip(*paths, strict=True):
        assert first.stat().st_size > 1000
        assert first.read_bytes() == second.read_bytes()


def test_rows_survive_csv(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "new" / "rows.csv", [{"step": 1, "name": 'a,"b"'}, {"step": 2, "nodes": [0, 1]}]
    )
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "1", "name": 'a,"b"', "nodes": ""},
        {"step": "2", "name": "", "nodes": "[0, 1]"},
    ]
