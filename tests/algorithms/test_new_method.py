"""The method of docs/design.md, one file outside the package, trains privately in one process and
in several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpcsgp.algorithms import MethodSettings
from dpcsgp.algorithms.methods import find_method
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import star
from dpcsgp.network import Simulator
from dpcsgp.randomness import PublicRandomness

ROOT = Path(__file__).parents[2]
NAME = "my_method:LAZY"
SETTINGS = [
    f"algorithm.name={NAME}", "task.name=digits", "task.model=logistic", "graph.num_nodes=3",
    "graph.name=star",
    "privacy.epsilon=4", "privacy.expected_batch_size=100", "algorithm.steps=10",
    "algorithm.learning_rate=2", "run.evaluate_every=5",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with `my_method.py`, word for word from the page."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.split("## Add a method\n")[1]
    block = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "my_method.py").write_text(block[1], encoding="utf-8")
    return tmp_path


def test_it_keeps_the_average_and_comes_to_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    method = find_method(NAME).build(MethodSettings(parse_compressor("none"), 0.1))
    network, random = Simulator(star(4)), PublicRandomness(0, range(4))
    start_ND, grad_ND = torch.randn(4, 7), torch.randn(4, 7)
    state = method.descend(method.init(start_ND), grad_ND)
    for _ in range(100):
        state = method.gossip(state, network, random)
    expected_D = (start_ND - 0.1 * grad_ND).mean(0)
    assert torch.allclose(method.average(state), expected_D, atol=1e-5)
    assert torch.allclose(method.model(state), expected_D.expand(4, 7), atol=1e-4)
    assert network.traffic.bytes_per_edge == method.wire_bytes(7, 100)


def dpcsgp(folder: Path, *words: str) -> str:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "dpcsgp", *words], cwd=folder, capture_output=True, text=True,
        timeout=240, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(
    folder: Path, command: str, *settings: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    out = folder / command
    dpcsgp(folder, command, *words, "--out", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "launch"])
def test_it_trains_privately(folder: Path, command: str) -> None:
    summary, rows = train(folder, command)
    assert summary["algorithm"] == NAME
    assert summary["private"] is True
    assert 3 < summary["epsilon"] <= 4
    assert summary["releases"] == [10, 10, 10]
    assert summary["stopped_because"] == "completed"
    assert summary["bytes_per_edge"] > 13 * 4 * summary["num_coordinates"]  # 10 steps, 3 rounds
    assert "residual_ratio" not in rows[-1]
    assert summary["accuracy_average_model"] > 0.6 > 0.3 > rows[0]["accuracy_average_model"]


@pytest.mark.slow
def test_processes_and_simulator_agree(folder: Path) -> None:
    one, many = (train(folder, command, "privacy.seed=5")[1] for command in ("run", "launch"))
    for row, twin in zip(one, many, strict=True):
        assert {**row, "seconds": 0} == {**twin, "seconds": 0}


@pytest.mark.slow
def test_it_goes_on_and_is_diagnosed_and_reported(folder: Path) -> None:
    train(folder, "run")
    dpcsgp(folder, "run", "--resume", "--out", "run")
    dpcsgp(folder, "report", "run")
    assert NAME in (folder / "run" / "report.html").read_text(encoding="utf-8")
    found = json.loads(dpcsgp(folder, "doctor", "--set", f"algorithm.name={NAME}", "--json"))
    assert NAME in json.dumps(found)
