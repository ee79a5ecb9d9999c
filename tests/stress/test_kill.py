"""kill -9 at random moments, then resume: what was sent once is sent again bit for bit and paid
once, nothing that was sent is missing from the ledger, and every run ends.

`make test` kills 8 times in the simulator and twice among real processes, `make stress` 32 and 8
times. The moments are drawn from a seed, but what a moment hits depends on the machine: that is the
point."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpcsgp.privacy.ledger import read_ledgers

DRIVER = Path(__file__).with_name("killed_run.py")
NODES, STEPS = 3, 30
SETTINGS = [
    "task.name=digits", "task.model=mlp:16", "graph.name=directed_ring", f"graph.num_nodes={NODES}",
    f"algorithm.steps={STEPS}", "privacy.epsilon=4", "privacy.expected_batch_size=32",
    "run.evaluate_every=10", "run.checkpoint_every=4",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(out: Path, tap: Path, mode: str, *settings: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(DRIVER), str(out), str(tap), mode, *settings]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def killed(out: Path, tap: Path, mode: str, after: float, *settings: str) -> bool:
    """Start, wait until training begins and then `after` seconds, kill; return whether the process
    was still running."""
    process = start(out, tap, mode, *settings)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    _, complaints = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), complaints
    return process.returncode != 0


def sent_steps(tap: Path) -> dict[int, int]:
    """Return, per node, in how many rounds the wiretap saw a frame with a new gradient (polish
    rounds release nothing); whatever was sent again must be the same frame."""
    lines = tap.read_text().splitlines() if tap.exists() else []
    seen: dict[tuple[str, str], str] = {}
    for line in lines:
        kind, round_, node, digest = line.split()
        if kind == "gradient":
            assert seen.setdefault((round_, node), digest) == digest, f"two frames: {line}"
    return Counter(int(node) for _, node in seen)


def recorded(out: Path) -> dict[int, int]:
    if not (out / "ledger").is_dir() or not list((out / "ledger").glob("node-*.jsonl")):
        return {}
    return {ledger.header.node: ledger.count for ledger in read_ledgers(out)}


def check_ledger(out: Path, tap: Path) -> int:
    """Assert that no node sent more than its ledger holds; return the number of frames seen."""
    sent, written = sent_steps(tap), recorded(out)
    assert all(written.get(node, 0) >= count for node, count in sent.items()), (sent, written)
    return sum(sent.values())


def finish(out: Path, tap: Path) -> dict[str, object]:
    process = start(out, tap, "resume")
    _, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    return json.loads((out / "summary.json").read_text())


def kills(in_ci: int, in_stress: int) -> pytest.MarkDecorator:
    counts = [
        pytest.param(in_ci, marks=pytest.mark.slow),
        pytest.param(in_stress, marks=pytest.mark.stress),
    ]
    return pytest.mark.parametrize("count", counts)


@kills(6, 24)
def test_private_runs_pay_every_release_exactly_once(tmp_path: Path, count: int) -> None:
    """Each run is killed up to three times; the last resume goes on to the end. Every other run
    has noise that cancels."""
    dice, done, run = random.Random(count), 0, 0
    frames_seen = releases = 0
    while done < count:
        out, tap = tmp_path / f"run-{run}", tmp_path / f"tap-{run}"
        shared = ["privacy.max_colluders=1"] if run % 2 else []
        mode, run = "new", run + 1
        for _ in range(min(3, count - done)):
            was_running = killed(out, tap, mode, dice.random() * 1.2, *SETTINGS, *shared)
            done += was_running
            check_ledger(out, tap)
            mode = "resume"
            if not was_running:
                break
        summary = finish(out, tap)
        frames_seen += check_ledger(out, tap)
        written = recorded(out)
        releases += sum(written.values())
        # as if nothing had happened: every step once, the whole budget and no more
        assert summary["stopped_because"] == "completed"
        assert summary["releases"] == [written[node] for node in range(NODES)] == [STEPS] * NODES
        assert sent_steps(tap) == dict.fromkeys(range(NODES), STEPS)
        assert 3.9 < float(str(summary["epsilon"])) <= 4
        account = subprocess.run(
            [sys.executable, "-m", "dpcsgp", "account", str(out), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(account.stdout)["epsilon"] == pytest.approx(
            float(str(summary["epsilon"])), rel=1e-9
        )
        assert not (out / "ledger" / "kept").exists()
    print(
        f"\n{done} kills in {run} private runs: {frames_seen} rounds of nodes sent, {releases} "
        "releases in ledgers, no two frames for one node and round"
    )


@kills(2, 8)
def test_seeded_runs_end_bit_identical(tmp_path: Path, count: int) -> None:
    settings = [
        *SETTINGS,
        "privacy.seed=5",
        "compression.spec=gsgd:4/64",
    ]
    process = start(tmp_path / "whole", tmp_path / "tap", "new", *settings)
    _, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    dice, done, run = random.Random(7 * count), 0, 0
    while done < count:
        out, tap = tmp_path / f"run-{run}", tmp_path / f"tap-{run}"
        run += 1
        done += killed(out, tap, "new", dice.random(), *settings)
        check_ledger(out, tap)
        summary = finish(out, tap)
        check_ledger(out, tap)
        assert summary["stopped_because"] == "completed"
        resumed = load_file(out / "model.safetensors")
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    print(f"\n{done} kills in {run} seeded runs: all models bit-identical to the uninterrupted one")


def workers_of(parent: int) -> list[int]:
    """Return the process ids of the launcher's children."""
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in listed.read_text().split()] if listed.exists() else []


def launch(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "dpcsgp",
        "launch",
        "--out",
        str(out),
        "--processes",
        "2",
        *words,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
@kills(2, 8)
def test_real_processes_go_on_after_one_of_them_is_killed(tmp_path: Path, count: int) -> None:
    """Kill one worker of `dpcsgp launch`; the others notice, the launcher ends, and --resume ends
    the run."""
    dice, done, run = random.Random(count), 0, 0
    settings = [
        *SETTINGS,
        "privacy.max_colluders=1",
        "network.timeout_seconds=8",
        "algorithm.steps=60",
    ]
    flags = [word for value in settings for word in ("--set", value)]
    while done < count:
        out = tmp_path / f"run-{run}"
        run += 1
        process = launch(out, *flags)
        deadline = time.monotonic() + 120
        while not recorded(out) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        time.sleep(dice.random())
        children = workers_of(process.pid)
        if children and process.poll() is None:
            os.kill(dice.choice(children), signal.SIGKILL)
            done += 1
        _, complaints = process.communicate(timeout=180)
        assert "Traceback" not in complaints, complaints
        before = recorded(out)
        resumed = launch(out, "--resume")
        _, complaints = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, complaints
        summary = json.loads((out / "summary.json").read_text())
        after = recorded(out)
        assert all(after[node] >= count_ for node, count_ in before.items())
        assert summary["releases"] == [after[node] for node in range(NODES)] == [60] * NODES
        assert all(count_ >= min(60, int(summary["steps"])) for count_ in after.values())
        assert float(summary["epsilon"]) <= 4
        reason = str(summary["stopped_because"])
        assert reason == "completed" or reason.startswith("privacy budget spent"), reason
    print(
        f"\n{done} workers killed in {run} runs of real processes: every run ended after --resume"
    )
