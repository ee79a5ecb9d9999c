"""Tables and fits of the experiments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.reproduction.gossip import growth_per_step
from dpcsgp.reproduction.grid import Done
from dpcsgp.reproduction.outcome import curves, markdown, table
from dpcsgp.reproduction.scaling import fit_slope


def run(accuracy: float, method: str, seed: int, stopped: str = "completed") -> Done:
    summary: dict[str, Any] = {
        "accuracy_node_mean": accuracy,
        "accuracy_node_min": accuracy,
        "accuracy_average_model": accuracy,
        "steps": 3,
        "bytes_per_edge": 1e6,
        "epsilon_claimed": 0.5,
        "epsilon": "inf",
        "stopped_because": stopped,
    }
    rows = [
        {"bytes_per_edge": 1e6 * step, "accuracy_node_mean": accuracy, "epsilon_nodes": [0.5]}
        for step in range(3)
    ]
    return Done({"method": method}, summary, rows, Path(f"x-{seed}-abc"))


def test_the_table_has_mean_and_spread_over_repeats() -> None:
    rows = table([run(0.5, "a", 1), run(0.7, "a", 2, "diverged: node 1"), run(0.9, "b", 1)])
    assert [row["method"] for row in rows] == ["a", "b"]
    assert rows[0]["accuracy_node_mean"] == pytest.approx(0.6)
    assert rows[0]["accuracy_node_mean_sd"] == pytest.approx(math.sqrt(0.02))
    assert (rows[0]["repeats"], rows[0]["diverged"], rows[1]["repeats"]) == (2, 1, 1)
    assert math.isinf(rows[0]["epsilon_verified"])
    assert "60.00 ± 14.14" in markdown(rows, ["method", "accuracy_node_mean"])


def test_curves_are_percent_against_megabits() -> None:
    (curve,) = curves([run(0.5, "a", 1), run(0.7, "a", 2)], "method")
    assert curve.x_P.tolist() == [0.0, 8.0, 16.0]
    assert curve.y_RP.tolist() == [[50.0] * 3, [70.0] * 3]


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    rows = [
        {"nodes": n, "squared_gradient_norm": 3 * n**-0.5 * (1.01 if seed else 0.99)}
        for n in (4, 16)
        for seed in (0, 1)
    ]
    slope, low, high = fit_slope(rows)
    assert slope == pytest.approx(-0.5) and low < -0.5 < high


def test_growth_per_step_is_the_factor_of_a_geometric_path() -> None:
    assert growth_per_step([1.1**step for step in range(40)]) == pytest.approx(1.1)
    assert growth_per_step([1.1**step for step in range(40)] + [math.inf]) == pytest.approx(1.1)
