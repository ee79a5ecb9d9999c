"""`dpcsgp plan` as a user meets it: a table, a config that `run` accepts, and no data opened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dpcsgp.cli.main import app
from dpcsgp.config import load_config

DIGITS = (
    "--task",
    "digits",
    "--num-nodes",
    "4",
    "--epsilon",
    "4",
    "--model",
    "mlp:8",
    "--max-megabytes",
    "0.004",
)


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    """Run a command inside this process; return exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["dpcsgp", *words])
    with pytest.raises(SystemExit) as ended:
        app()
    captured = capsys.readouterr()
    return (
        (ended.value.code if isinstance(ended.value.code, int) else 0),
        captured.out,
        captured.err,
    )


@pytest.mark.slow
def test_the_written_config_runs_with_the_predicted_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "plan.toml"
    code, out, _ = run(capsys, monkeypatch, "plan", *DIGITS, "--out", str(path), "--json")
    assert code == 0
    answer = json.loads(out)
    chosen = answer["chosen"]
    assert chosen["bytes_per_edge"] <= 4000
    assert chosen in answer["rows"]
    config = load_config(path)
    assert (config.algorithm.steps, config.privacy.expected_batch_size) == (
        chosen["steps"],
        chosen["batch_size"],
    )
    words = ("--set", "run.checkpoint_every=0", "--set", "run.evaluate_every=0", "--json")
    code, out, err = run(
        capsys, monkeypatch, "run", str(path), "--out", str(tmp_path / "run"), *words
    )
    assert code == 0, err
    summary = json.loads(out)
    assert summary["bytes_per_edge"] == chosen["bytes_per_edge"]
    assert summary["epsilon"] <= 4.0
    assert summary["accuracy_node_mean"] > 0.5


def test_the_table_shows_the_choice_the_zero_byte_line_and_the_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = run(
        capsys, monkeypatch, "plan", *DIGITS, "--out", str(tmp_path / "p.toml"), "--top", "20"
    )
    assert code == 0
    assert "->" in out
    assert "local" in out
    assert "*" in out
    assert "…" not in out  # eighty columns are enough
    assert "dpcsgp run" in out


@pytest.mark.slow
def test_plans_for_mnist_open_no_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPCSGP_CACHE", str(tmp_path / "empty"))
    words = (
        "--num-nodes",
        "3",
        "--model",
        "logistic",
        "--features",
        "dct:4",
        "--num-examples",
        "60",
        "--epsilon",
        "8",
    )
    code, out, err = run(
        capsys, monkeypatch, "plan", "--task", "mnist", *words, "--max-megabytes", "0.002", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["chosen"]["batch_size"] <= 60
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "mnits"], "task.name = 'mnits'"),
        (["--max-megabytes", "-1"], "--max-megabytes -1"),
        (["--num-examples", "0"], "--num-examples 0"),
        (["--epsilon", "-1"], "privacy.epsilon = -1"),
        (["--features", "hogg:8"], "hogg:8"),
    ],
)
def test_wrong_input_ends_with_code_2_and_a_remedy(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    code, _, err = run(capsys, monkeypatch, "plan", *words)
    assert code == 2
    assert message in " ".join(err.split())
