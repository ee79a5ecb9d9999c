"""What people are told around an amendment: what changes, what to do next, and in which order."""

from __future__ import annotations

import datetime
import io
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from amended import PROMISE, first_version, new_party, next_version, request_of, write
from commands import until

from dpcsgp.cli.exit_codes import ExitCode, code_of_error
from dpcsgp.console.federations import changed_fields, overview
from dpcsgp.errors import JournalInUseError
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.amending import Amendment, amend
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_run import (
    open_network,
    own_end,
    prepare_party,
    results_folder,
    run_party,
)
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.status_file import STATUS
from dpcsgp.federation.succession import remedy_of_round


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parties and their first roster."""
    folder = tmp_path_factory.mktemp("amending")
    first_version(folder, "abc")
    return folder


@pytest.fixture(scope="module")
def one(root: Path) -> Roster:
    return Roster.load(root / "v1.toml")


@pytest.fixture(scope="module")
def two(one: Roster) -> Roster:
    return amend(one, Amendment(4, leave=("b",))).roster


def test_what_an_amendment_does_is_said_in_one_line_first(one: Roster, root: Path) -> None:
    card = new_party(root, "newcomer").card
    changes, ends = ("privacy.clip_norm=2.0",), one.ends - datetime.timedelta(days=9)
    wanted = Amendment(4, leave=("b",), join=(card,), settings=changes, ends=ends)
    first, head, *lines = changed_fields(one, amend(one, wanted).roster).splitlines()
    assert first == "b leaves and newcomer joins at round 4; also changed: ends, privacy.clip_norm"
    assert head == f"{len(lines)} fields change from version 1 (before / after):"
    assert "party newcomer, certificate: (not there) / there" in lines
    assert "party b, noise_key: there / (not there)" in lines
    assert "CERTIFICATE" not in "".join(lines)
    same = amend(one, Amendment(4)).roster
    assert changed_fields(one, same).startswith("the same parties go on at round 4\n")
    fresh = PartyFolder.create(root / "fresh", "a", one.parties[0].address, PROMISE).card
    text = changed_fields(one, amend(one, Amendment(4, replace=(fresh,))).roster)
    assert text.startswith("a has another card at round 4\n")
    assert "party a, certificate: (changed)" in text and "party a, noise_key: (changed)" in text
    gone = changed_fields(one, amend(one, Amendment(4, gone=("b",), rejoin=("c",))).roster)
    assert gone.startswith("b is left behind and c comes back, what its ledger lacks counts as")


def test_an_amended_roster_tells_its_own_traffic_and_a_roster_that_ended_says_so(
    one: Roster, two: Roster
) -> None:
    def shown(roster: Roster) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(overview(examine(roster)))
        return console.export_text(styles=True)

    assert "for the whole run" in shown(one) and "this roster ended" not in shown(one)
    assert f"per edge from round {two.history[-1].rounds} on" in shown(two)
    over = shown(replace(one, ends=datetime.date(2020, 1, 1)))
    assert "\x1b[1;31mthis roster ended on 2020-01-01" in over


def test_where_the_plan_has_no_later_round_none_is_proposed(one: Roster) -> None:
    """12 steps: another version can begin at round 11 at the latest."""
    assert "--at-round 6 or later: nobody can have passed" in remedy_of_round(one, 0, 4)
    assert "an --at-round from 10 to 11 that nobody has passed" in remedy_of_round(one, 0, 10)
    over = remedy_of_round(one, 0, 12)
    assert "up to round 11" in over and "there is no later --at-round" in over
    assert "dpcsgp federation new" in over


def test_the_path_of_results_is_absolute_from_the_first_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_version(tmp_path, "abc")
    monkeypatch.chdir(tmp_path)
    paths = [results_folder(request_of(Path(), "a", "v1.toml")).path for _ in range(2)]
    assert paths[0] == paths[1] and paths[0].is_absolute()
    named = replace(request_of(Path(), "b", "v1.toml"), out=Path("named"))
    assert [results_folder(named).path for _ in range(2)] == [tmp_path / "named"] * 2


def test_who_starts_a_later_version_beside_an_earlier_one_is_told_which_process_to_stop(
    tmp_path: Path,
) -> None:
    one = first_version(tmp_path, "abc")
    next_version(tmp_path, one, Amendment(4, leave=("b",)))
    old = prepare_party(request_of(tmp_path, "a", "v1.toml"))
    results = results_folder(old.request)
    with closing(open_network(old, results.path)) as network:
        new = prepare_party(request_of(tmp_path, "a", "v2.toml"))
        place = results_folder(new.request)
        with pytest.raises(JournalInUseError, match="in use by another process"):
            run_party(new, place)  # no status says who
        with StatusKeeper(results.path / STATUS, one, network, 0, old.rounds):
            process = rf"version 1 of this federation is running here \(pid {os.getpid()}\)"
            with pytest.raises(JournalInUseError, match=rf"{process}; stop it with Ctrl-C") as told:
                run_party(new, place)
            with pytest.raises(JournalInUseError, match=rf"{process}; leave it alone"):
                run_party(old, results)
    assert code_of_error(told.value) is ExitCode.RECORDS


def test_a_newcomer_knows_why_those_of_an_earlier_version_hang_up(tmp_path: Path) -> None:
    one = first_version(tmp_path, "abc")
    card = new_party(tmp_path, "late").card
    joined = amend(one, Amendment(4, join=(card,))).roster
    write(tmp_path, joined, name="joined.toml")
    hint = "a party that still runs an earlier version of the roster cannot know this one"
    for name in "abc":
        assert own_end(request_of(tmp_path, name, "joined.toml")).hint == ""
    networks = []
    try:
        # late sends to a, the next one on the ring
        for name, file in (("a", "v1.toml"), ("late", "joined.toml")):
            prepared = prepare_party(request_of(tmp_path, name, file))
            networks.append(open_network(prepared, results_folder(prepared.request).path))
        until(lambda: networks[1].status()["a"].problem.endswith(f"; {hint}"))
        assert networks[1].status()["a"].last_heard is None
    finally:
        for network in networks:
            network.close()
