"""Parties that are not in step: exact after any crash, late gradients, slow and hostile ones."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lagged_twin import check_lagged_twin, turns_of
from running import DIGITS, make_federation, results_of, running
from test_party_twin import check_exactly_once

from dpcsgp.privacy import read_ledgers, releases_by_node

LAGGED = DIGITS + "\n[network]\nmax_lag = 2\n"
SLOW = LAGGED.replace("[run]", "[run]\nevaluate_every = 1").replace("steps = 12", "steps = 30")


def test_three_parties_with_lag_are_a_simulation_of_their_turns(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 3, LAGGED)
    with running(tmp_path, 3) as parties:
        parties.start()
        parties.wait()
    check_lagged_twin(tmp_path, roster)


@pytest.mark.slow
def test_kills_change_no_frame_of_a_lagged_party(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 3, SLOW)
    with running(tmp_path, 3, pause=0.1) as parties:
        parties.start()
        parties.until_step(0, 2)
        assert parties.kill_at_random(4, random.Random(1)) == 4
        parties.wait()
    timeline = check_lagged_twin(tmp_path, roster)
    check_exactly_once(tmp_path, roster)
    # Somebody really was behind somebody: otherwise nothing was tried.
    behind = [
        round_ - count
        for turns in timeline.turns
        for round_, turn in enumerate(turns)
        for count in turn.credits
    ]
    assert max(behind) > 0 and min(behind) == 0


SKIPPING = LAGGED.replace("max_lag = 2", 'max_lag = 2\nlate_gradients = "skip"')


@pytest.mark.slow
def test_a_slow_party_gossips_on_time_and_adds_its_gradients_when_they_are_ready(
    tmp_path: Path,
) -> None:
    roster = make_federation(tmp_path, 3, SKIPPING.replace("steps = 12", "steps = 30"))
    with running(tmp_path, 3, slow={0: 0.15, 1: 1.5, 2: 0.15}) as parties:
        parties.start()
        parties.until_step(1, 9)
        assert parties.kill(1)  # most likely while a gradient is under way
        parties.start(1)
        parties.wait()
    timeline = check_lagged_twin(tmp_path, roster)
    given = timeline.contributed
    assert 1 <= given[1] <= 15 and given[0] >= 20 and given[2] >= 20
    for node in range(3):
        results = results_of(tmp_path, node)
        releases = releases_by_node(read_ledgers(results / "ledger"))
        # Every release was put in once; one may have been ready too late for the last round.
        assert 0 <= sum(count for _, count in releases[node]) - given[node] <= 1
        summary = json.loads((results / "summary.json").read_bytes())
        told = {each["party"]: each["gradients"] for each in summary["contributions"]}
        assert told[f"lab-{node}"] == given[node]
        assert told[f"lab-{(node - 1) % 3}"] == given[(node - 1) % 3]  # heard on the ring
        assert told[f"lab-{(node + 1) % 3}"] is None
        used = [turn.gradient for turn in turns_of(tmp_path, node) if turn.gradient >= 0]
        assert used == sorted(set(used))


def seconds_of(root: Path, node: int) -> float:
    return json.loads((results_of(root, node) / "summary.json").read_bytes())["seconds"]


@pytest.mark.stress
def test_lag_makes_more_rounds_a_minute_where_step_times_vary(tmp_path: Path) -> None:
    """Real processes; gradients sleep for exponential times, the same with and without lag."""
    plan, seconds = DIGITS.replace("steps = 12", "steps = 60"), {}
    for lag in (0, 3):
        root = tmp_path / f"lag-{lag}"
        root.mkdir()
        make_federation(root, 4, f"{plan}\n[network]\nmax_lag = {lag}\n")
        with running(root, 4, slow=dict.fromkeys(range(4), -0.4)) as parties:
            parties.start()
            parties.wait(200)
        seconds[lag] = max(seconds_of(root, node) for node in range(4))
    assert seconds[0] >= 1.25 * seconds[3], seconds


@pytest.mark.stress
def test_one_slow_party_that_skips_takes_at_most_a_fifth_of_the_others_speed(
    tmp_path: Path,
) -> None:
    plan = SKIPPING.replace("steps = 12", "steps = 40").replace("max_lag = 2", "max_lag = 3")
    seconds = []
    for name, slow in (("equal", 0.4), ("one slow", 4.0)):
        root = tmp_path / name
        root.mkdir()
        roster = make_federation(root, 4, plan)
        with running(root, 4, slow={0: 0.4, 1: slow, 2: 0.4, 3: 0.4}) as parties:
            parties.start()
            parties.wait(200)
        # The slow party itself ends its last gradient before it writes its summary.
        seconds.append(max(seconds_of(root, node) for node in (0, 2, 3)))
        given = check_lagged_twin(root, roster).contributed
    assert seconds[1] <= 1.25 * seconds[0], seconds
    assert 1 <= given[1] <= 10 and min(given[0], given[2], given[3]) >= 30
