"""Parties that share noise: it cancels between them, and no stream ever meets two sums."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from drawn_streams import check_streams, uncancelled
from running import DIGITS, check_twin, make_federation, results_of, running

from dpcsgp.privacy import composed_epsilon, read_ledgers, releases_by_node

SHARED = DIGITS + "\n[privacy]\nmax_colluders = 1\n"
# One evaluation per step, after which the tests' parties pause: there is time to kill them.
SLOW = SHARED.replace("[run]", "[run]\nevaluate_every = 1").replace("steps = 12", "steps = 30")
AROUND = 3  # edges from a party to the last of a ring of four


def check_promises(root: Path, steps: int) -> None:
    """One release per step in every ledger; eps for one colluder and for all of them."""
    for node in range(4):
        folder = results_of(root, node)
        releases = releases_by_node(read_ledgers(folder / "ledger"))[node]
        assert sum(count for _, count in releases) == steps
        (event,) = {event for event, _ in releases}
        assert event.max_colluders == 1 and len(event.by_colluders) == 4
        summary = json.loads((folder / "summary.json").read_bytes())
        assert summary["private"] and summary["max_colluders"] == 1
        assert summary["epsilon"] == pytest.approx(composed_epsilon(releases, 1e-4))
        assert 3.9 < summary["epsilon"] <= 4.0 < summary["epsilon_all_collude"]
        assert summary["stopped_because"] == "completed" and summary["handed_over"]


def own_notices(root: Path, node: int) -> list[dict[str, Any]]:
    lines = json.loads((results_of(root, node) / "journal" / "notices.json").read_bytes())
    return [notice for notice in map(json.loads, lines) if notice["node"] == node]


def test_seeded_parties_share_the_noise_of_the_simulator(tmp_path: Path) -> None:
    """A ring of four: opposite parties have no edge, and agree all the same."""
    roster = make_federation(tmp_path, 4, SHARED)
    with running(tmp_path, 4) as parties:
        parties.start()
        parties.wait()
    check_twin(tmp_path, roster)
    check_streams(tmp_path, range(4))
    assert uncancelled(tmp_path, range(4), 12) == []


@pytest.mark.slow
def test_killed_parties_share_noise_again_from_the_step_that_they_announce(tmp_path: Path) -> None:
    """Noise is fresh at every start, and cancels in all steps but those of the news' travel."""
    make_federation(tmp_path, 4, SLOW)
    with running(tmp_path, 4, pause=0.1, seed=None) as parties:
        parties.start(0, 1, 2)
        while parties.status(1).get("waiting_for") != ["lab-3"]:
            time.sleep(0.2)  # everybody's first notice, also of one that is no neighbour
        assert parties.status(1)["epsilon"] == 0.0
        parties.start(3)
        for node, step in ((1, 3), (3, 13)):
            parties.until_step(node, step)
            assert parties.kill(node)
            parties.start(node)
        parties.wait()
    check_streams(tmp_path, range(4))
    check_promises(tmp_path, 30)
    travel = set()
    for node in (1, 3):
        first, second = own_notices(tmp_path, node)
        assert (first["start"], first["valid_from"], second["start"]) == (1, 0, 2)
        travel |= set(range(second["valid_from"] - AROUND, second["valid_from"]))
    assert uncancelled(tmp_path, range(4), 30) == sorted(travel)


@pytest.mark.slow
def test_an_old_backup_draws_no_stream_again(tmp_path: Path) -> None:
    make_federation(tmp_path, 4, SLOW)
    party, backup = tmp_path / "lab-1", tmp_path / "backup"
    with running(tmp_path, 4, pause=0.1, seed=None) as parties:
        parties.start()
        parties.until_released(1, 4)
        assert parties.kill(1)
        shutil.copytree(party, backup)
        made = parties.releases(1)
        parties.start(1)
        parties.until_released(1, made + 6)
        assert parties.kill(1)
        shutil.rmtree(party)
        backup.rename(party)
        parties.start(1)
        parties.processes[1].join(60)
        assert parties.processes[1].exitcode == 1
        assert all(parties.processes[node].exitcode is None for node in (0, 2, 3))
    check_streams(tmp_path, range(4))
