"""`federation show --firewall`: exactly the connections that the parties make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from made_parties import PLAN, cards_of, federation, make_parties, plan_of
from parties import networks

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError
from dpcsgp.federation.firewall import connections
from dpcsgp.federation.founding import found
from dpcsgp.graphs import from_edges


@pytest.mark.parametrize("graph", ["directed_ring", "star", "complete", "directed_exponential"])
@pytest.mark.parametrize("closed", ["", "c"])
def test_every_edge_has_one_connection_and_none_is_spare(
    tmp_path: Path, graph: str, closed: str
) -> None:
    plan = plan_of(tmp_path, PLAN.replace("directed_ring", graph))
    roster = found(plan, cards_of(make_parties(tmp_path, closed, "abcd"))).roster
    needed = set()
    for sender, receiver in roster.edges:
        # The sender calls whoever can be called; otherwise the receiver fetches.
        if roster.parties[receiver].address is not None:
            needed.add((sender, receiver, "sends"))
        else:
            needed.add((receiver, sender, "fetches"))
    shown = connections(roster)
    names = [card.name for card in roster.parties]
    split = {
        (names.index(each.caller), names.index(each.called), use)
        for each in shown
        for use in each.carries.split(" and ")
    }
    assert split == needed
    assert len({(each.caller, each.called) for each in shown}) == len(shown)
    for each in shown:
        assert f"{each.host}:{each.port}" == roster.parties[names.index(each.called)].address


def test_parties_connect_as_the_table_says(tmp_path: Path) -> None:
    """The table's rule is held against real lines: three parties, one of which only calls out."""
    star = from_edges(3, [(0, 1), (1, 0), (0, 2), (2, 0)])
    with networks(star, tmp_path, outbound_only=[2]) as parties:
        calls = {
            (node, peer.node)
            for node, network in enumerate(parties)
            for peer, _ in network._neighbours.calls()
        }
    plan = plan_of(tmp_path, PLAN.replace("directed_ring", "star"))
    roster = found(plan, cards_of(make_parties(tmp_path, "c"))).roster
    names = [card.name for card in roster.parties]
    shown = {(names.index(each.caller), names.index(each.called)) for each in connections(roster)}
    assert shown == calls == {(0, 1), (1, 0), (2, 0)}


def test_the_command_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("federation.toml").write_text(federation(tmp_path, "c").roster.text())
    words = ["federation", "show", "federation.toml", "--firewall"]
    shown = CliRunner().invoke(cli, words, env={"COLUMNS": "80"}).stdout
    assert "lab-c" in shown and "a.example" in shown and "7400" in shown
    answer = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["connections"]
    assert {"caller", "called", "host", "port", "carries"} == set(answer[0])
    assert not any(each["called"] == "lab-c" for each in answer)
    result = CliRunner().invoke(cli, [*words, "federation.toml"])
    assert isinstance(result.exception, ConfigError) and "takes one roster" in str(result.exception)


def test_dashboard_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["party", "dashboard"]).exit_code == 0
    assert json.loads(Path("dpcsgp-dashboard.json").read_bytes())["title"] == "dpcsgp party"
    again = CliRunner().invoke(cli, ["party", "dashboard"])
    assert isinstance(again.exception, ConfigError) and again.exception.exit_code == 2
