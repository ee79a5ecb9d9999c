"""Grids of runs: what is done is not done again, Ctrl-C loses nothing, settings are valid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpcsgp.errors import DpcsgpError
from dpcsgp.reproduction import EXPERIMENTS, Experiment, experiment
from dpcsgp.reproduction.grid import Cell, Done, run_grid
from dpcsgp.runs.design import design_run
from dpcsgp.runs.facts import declared_facts

sys.path.insert(0, str(Path(__file__).parent))
from grid_script import CELLS

SCRIPT = Path(__file__).with_name("grid_script.py")
TINY = (
    "task.name=digits",
    "task.model=logistic",
    "graph.num_nodes=2",
    "privacy.noise=none",
    "algorithm.steps=3",
    "run.seed=1",
    "privacy.seed=1",
)


@pytest.mark.slow
def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    cells = [Cell((*TINY, f"algorithm.learning_rate={rate}"), {"rate": rate}) for rate in (1, 2)]
    shown: list[tuple[int, int]] = []
    first = run_grid(
        cells, tmp_path, lambda text, done, total: shown.append((done, total)), processes=1
    )
    assert [run.tags["rate"] for run in first] == [1, 2]
    assert shown == [(0, 2), (1, 2), (2, 2)]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    again = run_grid([cells[1], cells[0]], tmp_path, lambda *_: shown.append((-1, -1)))
    assert [run.summary for run in again] == [first[1].summary, first[0].summary]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == written
    assert (-1, -1) not in shown  # nothing was run, so nothing was shown


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path / "broken")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "broken").rglob("step-*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to all processes
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 130, complaints
    assert "the same command continues" in said and "Traceback" not in complaints
    assert not list((tmp_path / "broken").rglob("model.safetensors.tmp"))
    for folder in ("broken", "whole"):
        subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / folder)],
            check=True,
            env=environment,
            timeout=240,
        )
    for cell in CELLS:
        broken, whole = (
            load_file(cell.folder(tmp_path / name) / "model.safetensors")
            for name in ("broken", "whole")
        )
        assert all(torch.equal(broken[name], whole[name]) for name in whole)
        assert not (cell.folder(tmp_path / "broken") / "checkpoint").exists()


class CaughtCells(Exception):
    """Carries the cells that an experiment wanted to run."""

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells


@pytest.mark.parametrize(
    "name", ["fig1", "fig2", "fig3", "fig4", "frontier", "skew", "block", "features", "cnn"]
)
@pytest.mark.parametrize("quick", [False, True])
def test_all_settings_of_an_experiment_are_valid(
    name: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def catch(cells: list[Cell], *rest: Any) -> list[Done]:
        raise CaughtCells(cells)

    monkeypatch.setattr(experiment, "run_grid", catch)
    with pytest.raises(CaughtCells) as caught:
        EXPERIMENTS[name](Experiment(name, tmp_path, 2, quick, lambda *_: None, lambda text: None))
    cells = caught.value.cells
    assert len(cells) >= 4  # two settings, two seeds
    tags = [tuple(cell.tags.items()) for cell in cells]
    # two seeds, and no two settings under one name
    assert all(tags.count(tag) == 2 for tag in tags)
    for cell in cells:
        assert cell.config.privacy.seed == cell.config.run.seed in (1, 2)
    for cell in cells[::2]:  # what cannot be stable, or has no noise that fits, is refused here
        design_run(cell.config, declared_facts(cell.config), cell.allow_divergence)


@pytest.mark.slow
def test_an_error_in_one_run_names_its_folder(tmp_path: Path) -> None:
    unstable = Cell(
        (*TINY, "compression.spec=rand:0.5", "algorithm.mixing_rate=1", "graph.num_nodes=10")
    )
    with pytest.raises(DpcsgpError, match=r"digits-dp-csgp-rand-0\.5-1-.*mixing"):
        run_grid([unstable], tmp_path, lambda *_: None)
