"""Stopped, killed and tampering processes end the run in time, with the right message."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from real_processes import (
    FAULTY,
    TINY,
    all_end,
    processes,
    settings,
    wait_for,
    wait_for_steps,
)

from ports import free_port

TIMEOUT = 10.0
LONG = [
    *TINY,
    "algorithm.steps=100000",
    f"network.timeout_seconds={TIMEOUT}",
    "run.checkpoint_every=1",
]


def run_words(out: Path, *values: str) -> list[str]:
    return ["run", *settings(*LONG, *values), "--out", str(out)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_silent_process_is_named_by_all_others_in_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    with processes([run_words(out)] * 3, tmp_path) as children:
        wait_for_steps(out, 5)
        children[1].send(number)
        others = [children[0], children[2]]
        seconds = all_end(others, TIMEOUT + 10)
        assert seconds < TIMEOUT + 2, "ended too late"
        for child in others:
            assert child.code == 1, child.said()
            assert "error: node 1 (rank 1) went silent" in child.said()
            assert "Traceback" not in child.said()
    # all processes still have one complete checkpoint in common, although each step wrote a new one
    steps = [
        {path.name[:11] for path in (out / "checkpoint").glob(f"step-*part-{rank}-of-3.json")}
        for rank in range(3)
    ]
    assert set.intersection(*steps)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_the_process_that_serves_the_store_all_others_end_in_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    with processes([run_words(out)] * 3, tmp_path, port=free_port()) as children:
        wait_for_steps(out, 5)
        children[0].send(number)
        assert all_end(children[1:], TIMEOUT + 10) < TIMEOUT + 2, "ended too late"
        for child in children[1:]:
            assert child.code == 1, child.said()
            assert "error: the store of the run went silent" in child.said()
            assert "rank 0" in child.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "keyed", "words"),
    [
        (
            "corrupt",
            False,
            "gradient step 6, frame from sender 1 in round 5: checksum does not match",
        ),
        (
            "corrupt",
            True,
            "gradient step 6, frame from sender 1 in round 5: keyed tag does not match",
        ),
        (
            "truncate",
            False,
            "gradient step 6, frame from sender 1 in round 5: checksum does not match",
        ),
        (
            "replay",
            True,
            "gradient step 6, frame from sender 1 in round 5: carries round 4: replayed or late",
        ),
    ],
)
def test_a_spoilt_frame_ends_all_processes_and_is_named(
    tmp_path: Path, fault: str, keyed: bool, words: str
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(os.urandom(32))
    values = [*LONG, *([f"network.key_file={key_file}"] if keyed else [])]
    commands = [
        [str(FAULTY), fault if rank == 1 else "none", str(tmp_path / "run"), *values]
        for rank in range(3)
    ]
    with processes(commands, tmp_path) as children:
        wait_for(lambda: any(child.code is not None for child in children), 120)
        all_end(children, TIMEOUT)
        for child in children:
            assert child.code == 1
            assert words in child.said(), child.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "world_sizes", "words"),
    [
        (["graph.name=complete"], None, "graph.name = 'complete' (rank 0: 'directed_ring')"),
        (["run.seed=7"], None, "run.seed = 7 (rank 0: 0)"),
        ([], [2, 3], "world size = 3 (rank 0: 2)"),
        (["network.key_file=KEY"], None, "key in network.key_file"),
    ],
)
def test_a_process_of_another_run_is_refused_by_all(
    tmp_path: Path, changed: list[str], world_sizes: list[int] | None, words: str
) -> None:
    (tmp_path / "KEY").write_bytes(os.urandom(32))
    changed = [value.replace("KEY", str(tmp_path / "KEY")) for value in changed]
    commands = [run_words(tmp_path / "run"), run_words(tmp_path / "run", *changed)]
    with processes(commands, tmp_path, world_sizes) as children:
        all_end(children, 120)
        for child in children:
            assert child.code != 0
            assert "handshake: rank" in child.said(), child.said()
        said = children[0].said()
        assert words in said, said
        assert "rank 1" in said
    assert not (tmp_path / "run").exists()  # nothing was started, nothing spent
