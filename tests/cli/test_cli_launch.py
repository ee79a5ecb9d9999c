"""`dpcsgp launch` as a user meets it: the simulator's results, Ctrl-C, kill -9, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
]

TINY = [
    "task.name=digits",
    "task.model=mlp:16",
    "graph.num_nodes=4",
    "privacy.expected_batch_size=32",
    "privacy.epsilon=8",
    "privacy.seed=1",
]
LONG = [
    "task.name=digits",
    "task.model=logistic",
    "graph.name=directed_ring",
    "graph.num_nodes=3",
    "privacy.noise=paper",
    "privacy.expected_batch_size=8",
    "privacy.seed=1",
    "run.evaluate_every=100",
    "run.checkpoint_every=3",
    "algorithm.learning_rate=0.1",
]
# For the tests of silence: elsewhere a busy machine may well take 5 s for a step.
SOON_SILENT = "network.timeout_seconds=8"


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def start(*words: str, own_group: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dpcsgp", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=own_group,
    )


def finish(process: subprocess.Popen[str], code: int, seconds: float = 240) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, output
    return " ".join(output.split())


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Return the direct children, ascending."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    return [worker for server in children_of(launcher.pid) for worker in children_of(server)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def releases(out: Path) -> int:
    ledger = out / "ledger" / "node-0000.jsonl"
    return len(ledger.read_bytes().splitlines()) - 1 if ledger.exists() else 0


def same_models(one: Path, other: Path) -> bool:
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


@pytest.mark.parametrize(
    ("processes", "shared"), [(4, []), (2, []), (2, ["privacy.max_colluders=1"])]
)
def test_launch_ends_bit_for_bit_like_the_simulator(
    tmp_path: Path, processes: int, shared: list[str]
) -> None:
    words = settings(*TINY, "algorithm.steps=12", *shared)
    finish(start("run", *words, "--out", str(tmp_path / "sim")), 0)
    output = finish(
        start("launch", *words, "--processes", str(processes), "--out", str(tmp_path / "real")), 0
    )
    assert "step 12/12" in output and "verified eps" in output
    assert f"s per step with {processes} processes" in output
    assert same_models(tmp_path / "sim", tmp_path / "real")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("sim", "real")]
    assert names[0] == names[1]
    sim, real = (
        json.loads((tmp_path / folder / "summary.json").read_text()) for folder in ("sim", "real")
    )
    timing = {"seconds", "seconds_per_step", "processes", "bytes_between_processes"}
    assert {key: value for key, value in real.items() if key not in timing} == {
        key: value for key, value in sim.items() if key not in timing
    }
    rows = [
        json.loads(line) for line in (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()
    ]
    twins = [
        json.loads(line) for line in (tmp_path / "sim" / "metrics.jsonl").read_text().splitlines()
    ]
    for row, twin in zip(rows, twins, strict=True):
        assert row.keys() == twin.keys()
        for key in row.keys() - {"seconds", "residual_ratio"}:
            assert row[key] == twin[key], key
        assert row.get("residual_ratio", 0) == pytest.approx(
            twin.get("residual_ratio", 0), rel=1e-5
        )


def test_a_run_that_is_interrupted_and_killed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    out, words = tmp_path / "real", settings(*LONG, SOON_SILENT, "algorithm.steps=160")
    finish(start("run", *words, "--out", str(tmp_path / "sim")), 0)
    resume = ["launch", "--resume", "--out", str(out)]

    launcher = start("launch", *words, "--out", str(out))  # Ctrl-C
    wait_for(lambda: releases(out) > 10)
    launcher.send_signal(signal.SIGINT)
    assert "interrupted at step" in finish(launcher, 130)
    assert (
        "interrupted at step" in json.loads((out / "summary.json").read_text())["stopped_because"]
    )

    launcher, before = start(*resume), releases(out)  # kill -9 of one worker
    wait_for(lambda: releases(out) > before + 10)
    workers = workers_of(launcher)
    os.kill(workers[1], signal.SIGKILL)
    began = time.monotonic()
    assert "node 1 (rank 1) went silent: ended by SIGKILL" in finish(launcher, 1)
    assert time.monotonic() - began < 9
    assert not any(map(alive, workers))

    launcher, before = start(*resume), releases(out)  # kill -9 of the launcher
    wait_for(lambda: releases(out) > before + 10)
    family = [*children_of(launcher.pid), *workers_of(launcher)]
    assert len(family) == 5  # resource tracker, fork server and three workers
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(map(alive, family)), 8)

    assert "results:" in finish(start(*resume), 0)
    assert same_models(tmp_path / "sim", out)
    rows = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("sim", "real")
    ]
    for one, other in zip(*rows, strict=True):
        assert (
            json.loads(one)["accuracy_average_model"] == json.loads(other)["accuracy_average_model"]
        )
    refused = finish(start("run", "--resume", "--out", str(out)), 2)
    assert "made by 3 processes" in refused and "dpcsgp launch --resume --processes 3" in refused


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_finishes_the_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    out, words = tmp_path / "run", settings(*LONG, "algorithm.steps=5000")
    launcher = start("launch", *words, "--out", str(out), own_group=True)
    wait_for(lambda: releases(out) > 10)
    os.killpg(launcher.pid, number)
    assert "interrupted at step" in finish(launcher, 130)


def test_ctrl_c_while_the_fork_server_imports_leaves_no_traceback(tmp_path: Path) -> None:
    words = settings(*LONG, "algorithm.steps=5000")
    launcher = start("launch", *words, "--out", str(tmp_path / "run"), own_group=True)
    wait_for(lambda: len(children_of(launcher.pid)) >= 2)  # resource tracker and fork server
    os.killpg(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=240)
    # Where the interpreter itself is on its way out it ends by the signal: a shell says 130 too.
    assert launcher.returncode in (130, -signal.SIGINT) and "Traceback" not in output


def test_a_script_without_a_guard_can_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from dpcsgp.runtime.launch import launch_run\n"
        "from dpcsgp.runtime.requests import BuiltinRequest\n"
        f"settings = {(*LONG, 'algorithm.steps=3')!r}\n"
        f"request = BuiltinRequest(None, settings, Path({str(tmp_path / 'run')!r}))\n"
        "print(launch_run(request)['stopped_because'])\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.stdout == "completed\n", ended.stderr


def test_a_stopped_worker_ends_the_run_and_is_not_left_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = settings(*LONG, SOON_SILENT, "algorithm.steps=100000")
    launcher = start("launch", *words, "--out", str(out))
    wait_for(lambda: releases(out) > 5)
    workers = workers_of(launcher)
    os.kill(workers[2], signal.SIGSTOP)
    wait_for(lambda: not any(map(alive, workers)), 8 + 4)
    output = finish(launcher, 1)
    # the cause, and both others
    assert output.count("node 2 (rank 2) went silent: no heartbeat for 1.6 s") == 3
    assert list((out / "checkpoint").glob("step-*.json"))


def test_bad_settings_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    output = finish(
        start("launch", *settings(*LONG), "--processes", "5", "--out", str(tmp_path / "run")), 2
    )
    assert "world size 5: the graph has 3 nodes" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.stress
@pytest.mark.mnist
def test_the_demo_with_ten_processes_reaches_the_demos_accuracy(tmp_path: Path) -> None:
    for command in ("run", "launch"):
        finish(
            start(command, *settings("privacy.seed=1"), "--out", str(tmp_path / command)), 0, 800
        )
    sim, real = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "launch")
    )
    print(
        f"seconds per step: simulator {sim['seconds'] / sim['steps']:.3f}, 10 processes "
        f"{real['seconds_per_step']:.3f}"
    )
    assert real["processes"] == 10
    assert real["accuracy_node_mean"] > 0.87
    assert abs(real["accuracy_node_mean"] - sim["accuracy_node_mean"]) < 0.005
    assert real["bytes_sent_per_node"] == sim["bytes_sent_per_node"]
