"""A neighbour with a broken push-sum weight: those who hear it name it, and send nothing wrong."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lying_party
from running import DIGITS, FORKS, Running, make_federation, running

LIAR = 1
PLAN = DIGITS.replace("directed_ring", "directed_exponential")  # nodes 2 and 3 hear node 1
LAGGED = PLAN + '\n[network]\nmax_lag = 2\nlate_gradients = "skip"\n'


def complaints(parties: Running, node: int) -> str:
    return "\n".join(parties.status(node)["log"])


def frames_that_left(root: Path, node: int) -> dict[int, set[str]]:
    """Return digests of what was handed to TLS, by round."""
    found: dict[int, set[str]] = defaultdict(set)
    for line in (root / f"tap-{node}").read_text().splitlines():
        round_, start, digest, _ = json.loads(line)
        found[round_].add(f"{start} {digest}")
    return found


def wait_for_end(parties: Running, node: int, start: int) -> None:
    """Wait until a party has refused a frame; its receiver 3 refuses one too, and comes again.

    Before its next release a party meets its receivers: one that has given up would be waited for.
    """
    deadline = time.monotonic() + 120
    while parties.processes[node].exitcode is None:
        assert time.monotonic() < deadline, (start, parties.status(node))
        parties.processes[node].join(1.0)
        if node == 2 and start == 2 and parties.processes[3].exitcode == 1:
            parties.start(3)
    assert parties.processes[node].exitcode == 1, (start, parties.status(node))


@pytest.mark.parametrize(
    ("plan", "weight", "place", "words"),
    [
        (LAGGED, "1e-9", 0, "push-sum weight 1e-09, but on this graph it cannot fall below 0.25"),
        pytest.param(LAGGED, "4.5", 0, "all 4 nodes together have 4", marks=pytest.mark.slow),
        pytest.param(LAGGED, "nan", 0, "must be finite and positive", marks=pytest.mark.slow),
        pytest.param(LAGGED, "1e6", 1, "a frame brings one or none", marks=pytest.mark.slow),
        pytest.param(PLAN, "0", 0, "must be finite and positive", marks=pytest.mark.slow),
    ],
    ids=["shrunk", "above all mass", "nan", "gradients", "in step"],
)
def test_who_lies_is_named_and_others_send_nothing_wrong(
    tmp_path: Path, plan: str, weight: str, place: int, words: str
) -> None:
    make_federation(tmp_path, 4, plan)
    with running(tmp_path, 4) as parties:
        for node in (0, 2, 3):
            parties.start(node)
        words_of_liar = (str(tmp_path), LIAR, weight, place)
        liar = FORKS.Process(target=lying_party.take_part, args=words_of_liar)
        parties.processes[LIAR] = liar
        liar.start()
        for start in (1, 2):  # the second one goes on from what the first one saved
            for node in (2, 3):
                wait_for_end(parties, node, start)
                assert "party 'lab-1': " in complaints(parties, node)
                assert words in complaints(parties, node)
                if start == 1:
                    parties.start(node)
        # Who does not hear the liar is not disturbed: it waits for its own senders.
        time.sleep(1.0)
        assert parties.processes[0].exitcode is None
        assert not complaints(parties, 0).count("push-sum")
        assert set(parties.status(0)["waiting_for"]) <= {"lab-2", "lab-3"}
    for node in (0, 2, 3):
        left = frames_that_left(tmp_path, node)
        # One frame a round, and no frame in two rounds.
        assert all(len(digests) == 1 for digests in left.values()), node
        assert len(set.union(*left.values())) == len(left), node
