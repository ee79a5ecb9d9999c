"""`dpcsgp run` with lag: the same after a stop, as accurate as in step, and told in the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpcsgp.network import Simulator
from dpcsgp.privacy import read_ledgers, releases_by_node
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.runtime.session import Hooks, Outcome, run_simulated

SMALL = (
    "task.name=digits",
    "task.model=logistic",
    "graph.num_nodes=4",
    "algorithm.steps=14",
    "algorithm.average_last=2",
    "privacy.epsilon=4",
    "privacy.seed=3",
    "run.evaluate_every=0",
    "run.checkpoint_every=3",
    "simulation.step_seconds=1",
    "simulation.jitter=exponential",
    "simulation.loss=0.2",
)
WAIT = ("network.max_lag=3",)
SKIP = (*WAIT, "network.late_gradients=skip", "simulation.slow_nodes=[1]")


def run(out: Path, settings: tuple[str, ...], stop_at: int = 99, resume: bool = False) -> Outcome:
    request = BuiltinRequest(None, () if resume else (*SMALL, *settings), out, resume, False)
    return run_simulated(request, Hooks(should_stop=lambda step: step == stop_at))


@pytest.mark.parametrize("settings", [WAIT, SKIP], ids=["wait", "skip"])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """What is under way, and gradients that are not put in yet, are in the checkpoint."""
    whole = run(tmp_path / "whole", settings)
    for stop in (5, 10):
        run(tmp_path / "parts", settings, stop_at=stop, resume=stop > 5)
    parts = run(tmp_path / "parts", settings, resume=True)
    for name in ("whole", "parts"):
        assert (tmp_path / name / "summary.json").exists()
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert parts.summary["releases"] == whole.summary["releases"]
    assert parts.summary["bytes_per_edge"] == whole.summary["bytes_per_edge"]
    # Nothing is left under way: the mass of all nodes is there.
    assert float(parts.progress.state.y_N1.sum()) == pytest.approx(4, rel=1e-12)


def test_who_skips_releases_less_and_the_summary_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", SKIP).summary
    played = summary["simulated"]
    assert played["contributed"] == summary["releases"]
    assert played["contributed"][1] < 8 and min(played["contributed"]) >= 1
    ledgers = releases_by_node(read_ledgers(tmp_path / "run" / "ledger"))
    made = [sum(count for _, count in ledgers[node]) for node in range(4)]
    assert made == played["contributed"]
    assert played["rounds_per_minute"] > 0 and len(played["waiting_share"]) == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["simulated"] == played


def test_without_lag_and_clock_the_simulator_is_the_plain_one(tmp_path: Path) -> None:
    plain = ("simulation.step_seconds=0", "simulation.loss=0", "algorithm.steps=2")
    found = run(tmp_path / "run", plain)
    assert type(found.run.network) is Simulator and "simulated" not in found.summary


def test_a_clock_alone_changes_no_bit(tmp_path: Path) -> None:
    settings = ("algorithm.steps=4", "algorithm.average_last=0")
    clocked = run(tmp_path / "clock", settings)
    plain = run(tmp_path / "plain", (*settings, "simulation.step_seconds=0", "simulation.loss=0"))
    assert torch.equal(clocked.progress.state.x_ND, plain.progress.state.x_ND)
    assert clocked.summary["simulated"]["contributed"] == [4] * 4


@pytest.mark.stress
@pytest.mark.parametrize(
    "settings", [WAIT, (*SKIP, "simulation.slow_factor=10")], ids=["jitter", "one slow"]
)
def test_accuracy_is_within_a_point_of_in_step(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Means over ten seeds of the private noise: one run differs from another by points."""
    longer = ("graph.num_nodes=6", "algorithm.steps=60", "run.checkpoint_every=0")
    means = []
    for name, these in (("in step", ()), ("late", settings)):
        scores = [
            run(tmp_path / f"{name} {seed}", (*longer, *these, f"privacy.seed={seed}")).summary[
                "accuracy_node_mean"
            ]
            for seed in range(10)
        ]
        means.append(sum(scores) / len(scores))
    assert means[1] >= means[0] - 0.01, means
