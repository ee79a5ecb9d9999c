"""Full disks and read-only folders: one clear line, exit code 1 or 2, and the previous state
intact."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dpcsgp.config import load_config
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.records.checkpoint import CheckpointFolder

DIGITS = [
    "task.name=digits", "task.model=mlp:16", "graph.name=directed_ring", "graph.num_nodes=2",
    "algorithm.steps=8", "privacy.epsilon=8", "privacy.expected_batch_size=32",
    "run.evaluate_every=2", "run.checkpoint_every=2",
]  # fmt: skip


def run_with(limit: int | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line while no file may grow beyond `limit` bytes, as on a full disk."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "dpcsgp", "run", *words],
        capture_output=True, text=True, timeout=240, preexec_fn=restrict,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def settings(*more: str) -> list[str]:
    return [word for value in (*DIGITS, *more) for word in ("--set", value)]


def assert_clear(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.strip().startswith("error: ")
    assert any(
        word in done.stderr
        for word in ("free space", "writable", "choose another", "another --out")
    ), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "more"),
    [(100, []), (900, []), (8000, []), (3500, ["run.checkpoint_every=0", "run.evaluate_every=1"])],
    ids=["first file", "settings or ledger", "checkpoint", "rows"],
)
def test_a_full_disk_ends_the_run_with_one_line(
    tmp_path: Path, limit: int, more: list[str]
) -> None:
    assert_clear(run_with(limit, *settings(*more), "--out", str(tmp_path / "run")))
    assert not list((tmp_path / "run").rglob(".*.tmp"))


@pytest.mark.slow
def test_a_disk_that_fills_during_a_resume_leaves_the_checkpoint_and_the_ledger_whole(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    assert run_with(None, *settings(), "--out", str(out)).returncode == 0
    for path in out.glob("checkpoint/step-000008*"):  # as if it had been cut after step 6
        path.unlink()
    before = {path.name: path.read_bytes() for path in (out / "checkpoint").iterdir()}
    ledger = read_ledger(out / "ledger" / "node-0000.jsonl")
    done = run_with(2000, "--resume", "--out", str(out))
    assert_clear(done)
    assert {path.name: path.read_bytes() for path in (out / "checkpoint").iterdir()} == before
    assert read_ledger(out / "ledger" / "node-0000.jsonl").continues(ledger.head, ledger.count)
    run_id = json.loads((out / "environment.json").read_text())["run_id"]
    fingerprint = load_config(out / "config.toml").fingerprint()
    assert CheckpointFolder(out / "checkpoint", run_id, config=fingerprint).complete_steps() == [6]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        done = run_with(None, *settings(), "--out", str(tmp_path / "run"))
    finally:
        tmp_path.chmod(0o700)
    assert_clear(done)
    assert str(tmp_path) in done.stderr.replace("\n", "")
