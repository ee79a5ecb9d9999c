"""`dpcsgp run` as a user meets it: good runs, wrong inputs, Ctrl-C and going on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpcsgp.cli.main import app

FILES = [
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
    "report.html",
]
DIGITS = [
    "task.name=digits",
    "graph.num_nodes=4",
    "algorithm.steps=5",
    "privacy.expected_batch_size=32",
    "privacy.epsilon=8",
]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dpcsgp", *words]


def dpcsgp(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, cwd=cwd, timeout=240)


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    """Run a command in this process that ends with code 2; return what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["dpcsgp", *words])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.mark.slow
def test_a_small_run_fills_the_results_folder(tmp_path: Path) -> None:
    done = dpcsgp("run", *settings(*DIGITS), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "run" / name).exists() for name in FILES)
    assert "verified eps" in done.stdout and "MB" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["private"] is True
    again = dpcsgp("run", *settings(*DIGITS), "--out", str(tmp_path / "run"))
    assert again.returncode == 2
    assert "already holds a run" in again.stderr and "--resume" in again.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, dpcsgp.cli.main as m; m.cli(['--help'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    ["run", "launch", "demo", "doctor", "plan", "account", "audit", "report", "data", "benchmark"],
)
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = dpcsgp(name, "--help")
    assert done.returncode == 0
    assert f"dpcsgp {name}" in done.stdout


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["privacy.epsilom=1"], ["privacy.epsilom", "epsilon"]),
        (["privacy.epsilon=-1"], ["privacy.epsilon = -1"]),
        (["privacy.delta=1.0"], ["privacy.delta = 1.0"]),
        (
            ["privacy.expected_batch_size=2000"],
            ["privacy.expected_batch_size = 2000", "375 examples"],
        ),
        (["graph.num_nodes=5000"], ["5000", "1500"]),
        (["compression.spec=gsgd:1"], ["gsgd:1", "2 to 16"]),
        (["compression.spec=rand:0"], ["rand:0"]),
        (["task.model=mpl:3"], ["mpl:3", "mlp"]),
        (
            ["compression.spec=rand:0.1", "algorithm.mixing_rate=1"],
            ["mixing_rate = 1", "--allow-divergence"],
        ),
    ],
)
def test_wrong_settings_end_with_code_2_and_a_remedy(
    tmp_path: Path,
    values: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = refused(
        capsys, monkeypatch, "run", *settings(*DIGITS, *values), "--out", str(tmp_path / "run")
    )
    assert all(word in text for word in words), text
    assert not (tmp_path / "run").exists()  # nothing was started, nothing spent


def test_a_graph_that_is_not_strongly_connected_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 0\n1 2\n")
    values = [
        "task.name=digits",
        "graph.name=edges",
        f"graph.edges_file={edges}",
        "graph.num_nodes=3",
    ]
    text = refused(capsys, monkeypatch, "run", *settings(*values))
    assert "node 2" in text


def test_a_missing_config_file_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere.toml does not exist" in refused(capsys, monkeypatch, "run", "nowhere.toml")


def test_resume_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(capsys, monkeypatch, "run", "--resume", "--out", str(tmp_path / "nothing"))
    assert "holds no run" in text
    text = refused(capsys, monkeypatch, "run", "--resume")
    assert "--resume needs --out" in text


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_completes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        *settings(
            *DIGITS,
            "algorithm.steps=400",
            "run.checkpoint_every=500",
            "privacy.seed=1",
            "run.evaluate_every=1000",
        )
    ]
    process = subprocess.Popen(
        command("run", *words, "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ledger = out / "ledger" / "node-0000.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
        ledger.exists() and len(ledger.read_bytes().splitlines()) > 20
    ):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert (
        "interrupted at step" in json.loads((out / "summary.json").read_text())["stopped_because"]
    )
    assert list((out / "checkpoint").glob("*.json"))
    before = json.loads((out / "summary.json").read_text())["steps"]
    assert 20 <= before < 400
    done = dpcsgp("run", "--resume", "--out", str(out))
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_because"]) == (400, "completed")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("task.partition=dirichlet:0.02", 'set algorithm.node_weights = "examples"'),
        ("privacy.epsilon=[0.01,4,4,4,4,4,4,4]", "give it a larger privacy.epsilon"),
    ],
)
def test_a_node_whose_noise_dominates_the_average_is_warned_about(
    tmp_path: Path, setting: str, remedy: str
) -> None:
    words = ["task.name=digits", "graph.num_nodes=8", "algorithm.steps=1", "task.model=mlp:8"]
    settings = [part for word in [*words, setting] for part in ("--set", word)]
    done = subprocess.run(
        [sys.executable, "-m", "dpcsgp", "run", *settings, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"node \d \(\d+ examples\) brings \d+% of the noise", done.stderr)
    assert remedy in done.stderr
