"""A party dies around each of its writes while one version with lag ends and the next begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import amended
from amended import (
    SEED,
    first_version,
    new_party,
    next_version,
    party,
    request_of,
    running,
    summary_of,
)
from crashing_party import CODE
from running import FORKS
from test_lagged_versions import LAG, SKIP, check_once, check_twin

from dpcsgp.federation.amending import Amendment
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.party_run import results_folder
from dpcsgp.federation.turn_log import TurnLog
from dpcsgp.privacy.kept_releases import KeptReleases
from dpcsgp.privacy.private_gradients import PrivateGradients
from dpcsgp.records.checkpoint import CheckpointFolder

CUT, STEPS = 6, 36  # b is late after every death, and some gradient has to be left for it
Moment = tuple[type, str, Callable[[Any, int], bool]]


def _second(path: Path) -> bool:
    return "version-2" in path.parts


# In the order in which they happen; `number` is the first word of the call.
MOMENTS: dict[str, Moment] = {
    "last old turn": (TurnLog, "record", lambda log, number: number == CUT - 1),
    "last old frame": (Journal, "release", lambda journal, number: number == CUT - 1),
    "last old checkpoint": (CheckpointFolder, "save", lambda folder, number: number == CUT),
    "start": (CheckpointFolder, "save", lambda folder, number: folder.path.name == "start"),
    "model handed over": (
        Journal,
        "release",
        lambda journal, number: _second(journal._folder) and number == 0,
    ),
    "first checkpoint": (
        CheckpointFolder,
        "save",
        lambda folder, number: _second(folder.path) and folder.path.name == "checkpoint",
    ),
    # A gradient that is made now is new, whatever its number: late ones were left out before.
    "release kept": (KeptReleases, "keep", lambda kept, number: True),
    "ledger line": (PrivateGradients, "account", lambda gradients, number: True),
    "first turn": (TurnLog, "record", lambda log, number: _second(log._path)),
    "first frame": (
        Journal,
        "release",
        lambda journal, number: _second(journal._folder) and number > 0,
    ),
}


def take_part(root: str, name: str, moment: str, before: bool) -> None:
    """Be one party until it makes this write, then die on the spot."""
    owner, method, is_it = MOMENTS[moment]
    write = getattr(owner, method)

    def deadly(self: Any, number: int, *words: Any, **more: Any) -> Any:
        now = is_it(self, number)
        if now and before:
            os._exit(CODE)
        found = write(self, number, *words, **more)
        if now:
            os._exit(CODE)
        return found

    setattr(owner, method, deadly)
    amended.take_part(root, name, "v2.toml", 0.0, SEED)


@pytest.mark.parametrize(
    ("plan", "before"),
    [
        pytest.param(SKIP, False, marks=pytest.mark.slow),
        pytest.param(SKIP, True, marks=pytest.mark.stress),
        pytest.param(LAG, False, marks=pytest.mark.stress),
        pytest.param(LAG, True, marks=pytest.mark.slow),
    ],
    ids=["skip, after", "skip, before", "wait, after", "wait, before"],
)
@pytest.mark.timeout(400)
def test_deaths_around_every_write_between_two_versions_change_nothing(
    tmp_path: Path, plan: str, before: bool
) -> None:
    one = first_version(tmp_path, "abc", steps=STEPS, plan=plan)
    new_party(tmp_path, "d")
    two = next_version(tmp_path, one, Amendment(CUT, join=(party(tmp_path, "d").card,)))
    for name in "abc":
        results_folder(request_of(tmp_path, name, "v1.toml"))
    with running(tmp_path, slow=dict.fromkeys("acd", 0.3)) as parties:
        parties.start("v2.toml", *"acd")
        for moment in MOMENTS:
            words = (str(tmp_path), "b", moment, before)
            parties.processes["b"] = FORKS.Process(target=take_part, args=words)
            parties.processes["b"].start()
            parties.processes["b"].join(60)
            assert parties.processes["b"].exitcode == CODE, (moment, parties.status("b"))
        parties.start("v2.toml", "b")
        parties.wait()
    check_once(tmp_path, [one, two])
    # Models are those of a simulation of the turns that are on disk.
    check_twin(tmp_path, [one, two])
    for name in "abcd":
        assert summary_of(tmp_path, name)["handed_over"]
