"""kill -9 of one process, then resume: what was sent is paid once and sent again bit for bit.

Noise cancels between the nodes here; no stream of a pair is drawn twice by one node.

`make test` kills twice, `make stress` 32 times.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from real_processes import RealProcess, all_end, processes, wait_for

from dpcsgp.privacy.ledger import read_ledgers

WORKER = Path(__file__).with_name("tapped_worker.py")
NODES, STEPS, EPSILON = 3, 60, 4.0
SETTINGS = [
    "task.name=digits",
    "task.model=mlp:16",
    "graph.name=directed_ring",
    f"graph.num_nodes={NODES}",
    f"algorithm.steps={STEPS}",
    f"privacy.epsilon={EPSILON}",
    "privacy.expected_batch_size=32",
    "run.evaluate_every=0",
    "run.checkpoint_every=4",
    "algorithm.polish_rounds=0",
    "privacy.max_colluders=1",
    "network.timeout_seconds=6",
]


def sent(taps: Path) -> Counter[int]:
    """Count the rounds in which each node sent: without polish rounds each is a release.

    A frame that was sent again must be the same one.
    """
    seen: dict[tuple[str, str], str] = {}
    for tap in taps.glob("tap-?"):
        for line in tap.read_text().splitlines():
            round_, node, digest = line.split()
            assert seen.setdefault((round_, node), digest) == digest, f"two frames: {line}"
    return Counter(int(node) for _, node in seen)


def check_pair_streams(taps: Path) -> int:
    """Assert that no process drew a stream of a pair twice, over all starts; return how many."""
    count = 0
    for tap in taps.glob("tap-*.streams"):
        drawn = [line.split()[0] for line in tap.read_text().splitlines()]
        assert len(set(drawn)) == len(drawn)
        count += len(drawn)
    return count


def check_ledgers(out: Path, taps: Path) -> tuple[int, int]:
    """Assert that no node sent more than its ledger holds; return frames and releases."""
    seen = sent(taps)
    written = (
        {ledger.header.node: ledger.count for ledger in read_ledgers(out)}
        if (out / "ledger").is_dir()
        else {}
    )
    assert all(written.get(node, 0) >= count for node, count in seen.items()), (seen, written)
    return sum(seen.values()), sum(written.values())


def commands(out: Path, folder: Path, mode: str) -> list[list[str]]:
    return [
        [str(WORKER), str(out), str(folder / f"tap-{rank}"), mode, *SETTINGS]
        for rank in range(NODES)
    ]


def kill_one(children: list[RealProcess], out: Path, folder: Path, dice: random.Random) -> bool:
    """Kill a random process at a random moment of training; return whether it was still running."""
    before = sum(sent(folder).values())
    wait_for(
        lambda: (
            sum(sent(folder).values()) > before or all(child.code is not None for child in children)
        ),
        120,
    )
    time.sleep(dice.random())
    victim = dice.choice(children)
    was_running = victim.code is None
    if was_running:
        victim.send(signal.SIGKILL)
    all_end(children, 60)
    assert all("Traceback" not in child.said() for child in children)
    return was_running


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.stress)]
)
def test_every_release_is_sent_and_paid_exactly_once(tmp_path: Path, count: int) -> None:
    dice, done, run, frames_seen, releases, streams = random.Random(count), 0, 0, 0, 0, 0
    while done < count:
        folder = tmp_path / f"run-{run}"
        out, mode, run = folder / "out", "new", run + 1
        folder.mkdir()
        for _ in range(min(2, count - done)):
            with processes(commands(out, folder, mode), folder) as children:
                done += kill_one(children, out, folder, dice)
            check_ledgers(out, folder)
            mode = "resume"
        with processes(commands(out, folder, mode), folder) as children:
            all_end(children, 180)
            assert [child.code for child in children] == [0] * NODES, [
                child.said() for child in children
            ]
        counts = check_ledgers(out, folder)
        frames_seen, releases = frames_seen + counts[0], releases + counts[1]
        summary = json.loads((out / "summary.json").read_text())
        assert summary["stopped_because"] == "completed"
        written = {ledger.header.node: ledger.count for ledger in read_ledgers(out)}
        assert summary["releases"] == [written[node] for node in range(NODES)] == [STEPS] * NODES
        assert sent(folder) == dict.fromkeys(range(NODES), STEPS)
        assert 0.97 * EPSILON < float(summary["epsilon"]) <= EPSILON
        streams += check_pair_streams(folder)
        assert not (out / "ledger" / "kept").exists()
    print(
        f"\n{done} kills in {run} runs of {NODES} processes: {frames_seen} rounds of nodes sent, "
        f"{releases} releases, {streams} streams of pairs, none twice"
    )
