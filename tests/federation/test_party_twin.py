"""Twin: parties in processes of their own end with the simulator's models, ledgers and bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from running import DIGITS, check_twin, make_federation, results_of, running, simulate

from dpcsgp.federation.roster import Roster
from dpcsgp.privacy import read_ledgers, releases_by_node

# One evaluation per step, after which the tests' parties pause: there is time to kill them.
SLOW = DIGITS.replace("[run]", "[run]\nevaluate_every = 1").replace("steps = 12", "steps = 30")


def check_exactly_once(root: Path, roster: Roster) -> None:
    """One release per step in every ledger, and one frame per round on every line."""
    algorithm = roster.config.algorithm
    for node in range(len(roster.parties)):
        folder = results_of(root, node)
        releases = releases_by_node(read_ledgers(folder / "ledger"))
        assert sum(count for _, count in releases[node]) == algorithm.steps
        seen = defaultdict(set)
        for line in (root / f"tap-{node}").read_text().splitlines():
            round_, start, digest, _ = json.loads(line)
            seen[round_, start].add(digest)
        assert all(len(digests) == 1 for digests in seen.values())
        rounds = algorithm.steps + algorithm.polish_rounds
        assert {round_ for round_, _ in seen} == set(range(rounds))
        assert not list(folder.glob("ledger/kept/*"))


def test_three_parties_end_as_the_simulator_does(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 3)
    with running(tmp_path, 3) as parties:
        parties.start()
        parties.wait()
    check_twin(tmp_path, roster)


@pytest.mark.slow
def test_parties_with_adam_and_weight_decay_end_as_the_simulator_does(tmp_path: Path) -> None:
    adam = 'optimizer = "adam"\nweight_decay = 0.1\nwarmup_steps = 2\nsteps = 12'
    roster = make_federation(tmp_path, 3, DIGITS.replace("steps = 12", adam))
    with running(tmp_path, 3) as parties:
        parties.start()
        parties.wait()
    check_twin(tmp_path, roster)


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 3, SLOW)
    with running(tmp_path, 3, pause=0.1) as parties:
        parties.start()
        parties.until_step(0, 2)
        assert parties.kill_at_random(3, random.Random(1)) == 3
        parties.wait()
    check_twin(tmp_path, roster)
    check_exactly_once(tmp_path, roster)


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        pytest.param(10, 60, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(300, 700, marks=[pytest.mark.stress, pytest.mark.timeout(5400)]),
    ],
)
def test_killed_private_parties_release_every_step_once(
    tmp_path: Path, kills: int, steps: int
) -> None:
    """Noise is fresh at every start here: what is drawn anew would be seen."""
    plan = SLOW.replace("steps = 30", f"steps = {steps}")
    roster = make_federation(tmp_path, 3, plan)
    with running(tmp_path, 3, pause=0.2, seed=None) as parties:
        parties.start()
        assert parties.kill_at_random(kills, random.Random(kills), pauses=(0.1, 1.5)) == kills
        parties.wait(seconds=900)
    check_exactly_once(tmp_path, roster)
    # An undisturbed run of the same plan: the kills have cost nothing.
    undisturbed = simulate(tmp_path, roster.config).summary["epsilon"]
    for node in range(3):
        summary = json.loads((results_of(tmp_path, node) / "summary.json").read_bytes())
        assert summary["private"] and summary["epsilon"] == undisturbed <= 4.0


@pytest.mark.slow
def test_a_party_that_starts_late_is_waited_for_by_name(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 5)
    with running(tmp_path, 5) as parties:
        parties.start(0, 1, 2, 3)
        while parties.status(3).get("waiting_for") != ["lab-4"]:
            time.sleep(0.5)
        time.sleep(10)
        # Nothing is released by the one whose only receiver is missing.
        assert parties.status(3)["waiting_for"] == ["lab-4"]
        assert parties.status(3)["epsilon"] == 0.0
        assert not list((results_of(tmp_path, 3) / "ledger").glob("kept/*"))
        parties.start(4)
        parties.wait()
    check_twin(tmp_path, roster)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_start_goes_on(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 3, SLOW)
    with running(tmp_path, 3, pause=0.3) as parties:
        parties.start()
        parties.until_step(1, 5)
        pid = parties.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        parties.processes[1].join(10)
        assert parties.processes[1].exitcode == 130
        summary = json.loads((results_of(tmp_path, 1) / "summary.json").read_bytes())
        assert summary["stopped_because"].startswith("interrupted at step")
        assert not summary["handed_over"]
        # The others wait for the one that is gone. Ctrl-C ends a wait too, with a checkpoint.
        time.sleep(1.5)
        waiting = parties.processes[2]
        assert waiting.exitcode is None and waiting.pid is not None
        os.kill(waiting.pid, signal.SIGINT)
        waiting.join(10)
        assert waiting.exitcode == 130
        parties.start(1, 2)
        parties.wait()
    check_twin(tmp_path, roster)
    check_exactly_once(tmp_path, roster)


@pytest.mark.slow
def test_a_party_restored_from_an_older_backup_releases_nothing(tmp_path: Path) -> None:
    """Others hold what it has forgotten: it would be released a second time, with other noise."""
    make_federation(tmp_path, 3, SLOW)
    party, backup = tmp_path / "lab-1", tmp_path / "backup"

    def releases() -> int:
        found = releases_by_node(read_ledgers(results_of(tmp_path, 1) / "ledger"))
        return sum(count for _, count in found[1])

    with running(tmp_path, 3, pause=0.1, seed=None) as parties:
        parties.start()
        parties.until_released(1, 6)
        assert parties.kill(1)
        shutil.copytree(party, backup)
        made = parties.releases(1)
        parties.start(1)
        parties.until_released(1, made + 6)
        assert parties.kill(1)
        shutil.rmtree(party)
        backup.rename(party)
        before = releases()
        parties.start(1)
        parties.processes[1].join(60)
        assert parties.processes[1].exitcode == 1
        # A release that was kept when the backup was made may get its line now.
        assert releases() <= before + 1
        assert parties.status(1)["phase"] == "failed"
        assert parties.processes[0].exitcode is None and parties.processes[2].exitcode is None
