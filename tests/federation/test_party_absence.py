"""Nobody ends because another did: who is away is waited for, by name and almost for free."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from running import DIGITS, Running, check_twin, make_federation, running

PLAN = DIGITS.replace("[run]", "[run]\nevaluate_every = 1").replace("steps = 12", "steps = 40")
GONE = 2


def moves_on(parties: Running, seconds: float) -> float:
    """Start the party that was gone; return how long the others stand still once it is there."""
    before = {node: parties.status(node)["round"] for node in parties.processes if node != GONE}
    parties.start(GONE)
    deadline, pid = time.monotonic() + 60, parties.processes[GONE].pid
    # Its own start (data, roster, checkpoint) is over when it speaks.
    while parties.status(GONE).get("pid") != pid:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    there = time.monotonic()
    while any(parties.status(node)["round"] <= before[node] for node in before):
        assert time.monotonic() < there + seconds, {n: parties.status(n) for n in before}
        time.sleep(0.05)
    return time.monotonic() - there


@pytest.mark.skipif(sys.platform != "linux", reason="reads processor times from /proc")
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(12.0, marks=pytest.mark.slow),
        pytest.param(300.0, marks=[pytest.mark.stress, pytest.mark.timeout(900)]),
    ],
)
def test_a_party_that_is_gone_is_waited_for(tmp_path: Path, seconds: float) -> None:
    roster = make_federation(tmp_path, 5, PLAN)
    with running(tmp_path, 5, pause=0.1, quick=False) as parties:
        parties.start()
        parties.until_step(GONE, 3)
        assert parties.kill(GONE)
        time.sleep(6.0)  # rounds that can be finished without it
        others = [node for node in range(5) if node != GONE]
        before = {node: parties.processor_seconds(node) for node in others}
        time.sleep(seconds)
        used = [(parties.processor_seconds(node) - before[node]) / seconds for node in others]
        waited = {node: parties.status(node)["waiting_for"] for node in others}
        assert max(used) < 0.05, used
        # In a ring everybody waits for its sender, and the one behind the gap says for whom.
        assert waited == {0: ["lab-4"], 1: ["lab-0"], 3: ["lab-2"], 4: ["lab-3"]}
        for node, names in waited.items():
            lags = {peer["name"]: peer["lag"] for peer in parties.status(node)["peers"]}
            assert lags[names[0]] >= 1, (node, lags)
        assert moves_on(parties, seconds=5.0) < 5.0
        parties.wait()
    check_twin(tmp_path, roster)
