"""The demo, for real: ten private nodes on MNIST reach the accuracy that the README names, for the
bytes and eps it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.runtime.session import Hooks, run_simulated

DEMO = Path(__file__).parents[1] / "configs" / "demo.toml"


@pytest.mark.slow
@pytest.mark.mnist
def test_the_demo_reaches_its_numbers(tmp_path: Path) -> None:
    # Seeded, so that a test does not fail by chance once in a while; the demo itself is not.
    settings = ("privacy.seed=1", "run.evaluate_every=0")
    request = BuiltinRequest(DEMO, settings, tmp_path / "run")
    summary = run_simulated(request, Hooks(write_page=True)).summary
    assert summary["accuracy_node_mean"] >= 0.887
    assert summary["accuracy_node_min"] >= 0.88
    assert summary["epsilon"] <= 0.5 and summary["delta"] == 1e-4
    assert summary["bytes_per_edge"] <= 500_000
    assert summary["private"] is False and summary["seeded"] is True
    assert (tmp_path / "run" / "report.html").exists()
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_because"]
        == "completed"
    )


@pytest.mark.slow
@pytest.mark.mnist
def test_rand_half_diverges_at_mixing_rate_one_and_learns_at_the_lower_one(tmp_path: Path) -> None:
    accuracy = {}
    for rate in (1.0, 0.4):
        settings = [
            "compression.spec=rand:0.5",
            f"algorithm.mixing_rate={rate}",
            "algorithm.steps=60",
            "algorithm.polish_rounds=0",
        ]
        settings += [
            "algorithm.learning_rate=0.5",
            "algorithm.momentum=0",
            "algorithm.learning_rate_decay=1",
        ]
        settings += ["privacy.expected_batch_size=256", "privacy.seed=1", "run.evaluate_every=0"]
        request = BuiltinRequest(
            settings=tuple(settings), out=tmp_path / str(rate), allow_divergence=True
        )
        summary = run_simulated(request).summary
        accuracy[rate] = summary["accuracy_node_mean"]
    assert accuracy[1.0] < 0.5
    assert accuracy[0.4] > 0.8
