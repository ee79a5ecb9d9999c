"""Every example runs as a user would run it: a process of its own, from the command in its
docstring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


def run(name: str, *words: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / name), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())


def test_own_tabular_model(tmp_path: Path) -> None:
    said = run("own_tabular_model.py", "--out", str(tmp_path / "run"))
    found = summary(tmp_path / "run")
    assert found["accuracy_node_mean"] > 0.9 and found["private"] and found["epsilon"] <= 2
    assert "bytes per edge" in said


def test_own_tabular_model_is_short() -> None:
    """What a user writes: imports and command-line words aside, fewer than fifteen statements'
    worth of lines."""
    lines = (
        (EXAMPLES / "own_tabular_model.py").read_text().split("out = parser")[1].splitlines()[1:]
    )
    own = [
        line
        for line in lines
        if line and not line.startswith(("summary", "print", "import", "from", "#", ")"))
    ]
    assert len(own) < 15


def test_patients_with_visits(tmp_path: Path) -> None:
    said = run("patients_with_visits.py", "--out", str(tmp_path / "run"))
    found = summary(tmp_path / "run")
    assert found["accuracy_node_mean"] > 0.8 and found["private"] and found["epsilon"] <= 2
    assert "one person with all rows" in said


def test_own_image_model(tmp_path: Path) -> None:
    said = run("own_image_model.py", "--out", str(tmp_path / "run"))
    assert summary(tmp_path / "run")["accuracy_node_mean"] > 0.6
    assert said.splitlines()[0].startswith("step   0")


def test_torchrun_script_alone_and_together(tmp_path: Path) -> None:
    run("torchrun_script.py", "--out", str(tmp_path / "alone"))
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run("torchrun_script.py", "--out", str(tmp_path / "together"), launcher=words)
    assert "nodes (0, 1)" in said and "nodes (2, 3)" in said
    for name in ("alone", "together"):
        assert summary(tmp_path / name)["mean_absolute_error_node_mean"] < 0.2
    assert summary(tmp_path / "together")["processes"] == 2


def test_continue_from_checkpoint_and_read_results(tmp_path: Path) -> None:
    said = run("continue_from_checkpoint.py", "--out", str(tmp_path / "run")).splitlines()
    assert said[0].startswith("interrupted at step 8 of 20") and said[1].startswith("completed")
    assert said[2] == "releases per node: [20, 20, 20, 20]"
    said = run("read_results.py", str(tmp_path / "run")).splitlines()
    assert any("verified eps" in line for line in said)
    assert sum(line.startswith("node ") for line in said) == 4
