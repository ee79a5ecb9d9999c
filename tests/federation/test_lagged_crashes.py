"""A party with lag dies around each of its writes: one frame a round, one release a line."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import crashing_party
from crashing_party import CODE, MOMENTS
from lagged_twin import check_lagged_twin, turns_of
from running import DIGITS, FORKS, make_federation, results_of, running

from dpcsgp.privacy import read_ledgers, releases_by_node

LONG = DIGITS.replace("steps = 12", "steps = 30")
WAIT = LONG + "\n[network]\nmax_lag = 2\n"
SKIP = LONG + '\n[network]\nmax_lag = 2\nlate_gradients = "skip"\n'


@pytest.mark.parametrize(
    ("plan", "before"),
    [
        pytest.param(SKIP, False, marks=pytest.mark.slow),
        pytest.param(SKIP, True, marks=pytest.mark.stress),
        pytest.param(WAIT, False, marks=pytest.mark.stress),
        pytest.param(WAIT, True, marks=pytest.mark.stress),
    ],
    ids=["skip, after", "skip, before", "wait, after", "wait, before"],
)
def test_deaths_around_every_write_change_nothing(tmp_path: Path, plan: str, before: bool) -> None:
    roster = make_federation(tmp_path, 3, plan)
    with running(tmp_path, 3) as parties:
        parties.start(0, 2)
        for number, moment in enumerate(MOMENTS):
            # Late enough that something was replayed, early enough that the run goes on after it.
            calls = 1 if moment == "checkpoint" else 3 + number
            words = (str(tmp_path), 1, moment, calls, before)
            parties.processes[1] = FORKS.Process(target=crashing_party.take_part, args=words)
            parties.processes[1].start()
            parties.processes[1].join(60)
            assert parties.processes[1].exitcode == CODE, (moment, parties.status(1))
        parties.start(1)
        parties.wait()
    # Models, ledgers and bytes are those of a simulation of the turns that are on disk.
    given = check_lagged_twin(tmp_path, roster).contributed
    for node in range(3):
        left = defaultdict(set)
        for line in (tmp_path / f"tap-{node}").read_text().splitlines():
            round_, start, digest, _ = json.loads(line)
            left[round_, start].add(digest)
        assert all(len(digests) == 1 for digests in left.values())
        assert {round_ for round_, _ in left} == set(range(32))
        ledger = releases_by_node(read_ledgers(results_of(tmp_path, node) / "ledger"))
        assert sum(count for _, count in ledger[node]) == given[node]
        used = [turn.gradient for turn in turns_of(tmp_path, node) if turn.gradient >= 0]
        assert used == sorted(set(used))
