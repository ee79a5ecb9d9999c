"""Settings of lag: what is refused and why, what older files mean, who decides what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made_parties import PLAN, cards_of, make_parties, plan_of

from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.config import Config, change_config, load_config, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.federation.differences import differences
from dpcsgp.federation.founding import found
from dpcsgp.federation.party_run import PartyRequest
from dpcsgp.federation.roster import Roster
from dpcsgp.planning import diagnose
from dpcsgp.runs.design import design_run
from dpcsgp.runs.facts import declared_facts
from dpcsgp.runtime.launch import launch_run
from dpcsgp.runtime.requests import BuiltinRequest

SMALL = ["task.name=digits", "task.model=logistic", "graph.num_nodes=4", "run.checkpoint_every=2"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["network.max_lag=-1"], "network.max_lag = -1"),
        (["network.max_lag=65"], "network.max_lag = 65"),
        (["network.max_lag=2", "algorithm.name=dp-sgp"], 'choose "dp-csgp" .* it is dp-sgp'),
        (["network.max_lag=2", "algorithm.name=dp-block"], "has no rule for late messages"),
        (["network.max_lag=2", "algorithm.name=local-then-average"], "no rule for late messages"),
        (["network.late_gradients=skip"], "set network.max_lag = 3"),
        (["network.late_gradients=never", "network.max_lag=1"], "network.late_gradients = 'never'"),
        (
            ["network.late_gradients=skip", "network.max_lag=3", "privacy.max_colluders=2"],
            'set network.late_gradients = "wait"',
        ),
        (
            ["network.late_gradients=skip", "network.max_lag=3", "algorithm.gossip_every=2"],
            "set algorithm.gossip_every = 1",
        ),
        (["network.patience=0"], "network.patience = 0"),
        (["simulation.slow_nodes=[10]"], "there is no node 10, nodes are 0 to 9"),
        (["simulation.loss=1"], "simulation.loss = 1"),
        (["simulation.step_seconds=nan"], "simulation.step_seconds"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(settings: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, settings)


def test_older_runs_keep_their_fingerprint_and_patience_is_no_part_of_it() -> None:
    plain = Config()
    assert plain.fingerprint() == change_config(plain, {"network.patience": 60}).fingerprint()
    others = [
        change_config(plain, {"network.max_lag": 1}),
        change_config(plain, {"network.max_lag": 1, "network.late_gradients": "skip"}),
        change_config(plain, {"simulation.step_seconds": 1}),
    ]
    assert len({plain.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_settings_survive_their_file(tmp_path: Path) -> None:
    changed = load_config(
        None, ["network.max_lag=3", "network.patience=9", "simulation.slow_nodes=[1]"]
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(changed), encoding="utf-8")
    assert load_config(path) == changed


def test_launch_stays_in_step(tmp_path: Path) -> None:
    request = BuiltinRequest(None, (*SMALL, "network.max_lag=1"), tmp_path / "out", False, False)
    with pytest.raises(ConfigError, match=r"go in step; set network\.max_lag = 0, play lag"):
        launch_run(request, 2)
    assert not (tmp_path / "out").exists()


def test_the_design_and_the_doctor_know_the_lag() -> None:
    config = load_config(None, SMALL)
    late = change_config(config, {"network.max_lag": 4})
    before, after = (design_run(each, declared_facts(each)) for each in (config, late))
    assert before.mixing_rate is not None and after.mixing_rate is not None
    assert after.mixing_rate < before.mixing_rate
    assert isinstance(after.algorithm, LaggedDPCSGP)
    # Polish rounds are in step, at the rate that is best there.
    assert isinstance(after.polish, LaggedDPCSGP) and after.polish.max_lag == 0
    assert after.polish.mixing_rate == pytest.approx(before.mixing_rate)
    assert after.bytes_per_edge() == before.bytes_per_edge()
    found = diagnose(late, after.dim, 100)
    assert found.healthy and found.mixing_rate == after.mixing_rate
    assert "4 rounds late" in found.verdict
    assert found.disagreement > diagnose(config, before.dim, 100).disagreement


def test_a_roster_holds_what_all_must_agree_on(tmp_path: Path) -> None:
    cards = cards_of(make_parties(tmp_path))
    plain = found(plan_of(tmp_path), cards).roster
    assert "max_lag = 0" in plain.text() and "simulation" not in plain.text()
    lag = "\n[network]\nmax_lag = 2\npatience = 90\n\n[simulation]\nstep_seconds = 2\n"
    lagged = found(plan_of(tmp_path, PLAN + lag), cards).roster
    assert lagged.config.network.max_lag == 2 and "simulation" not in lagged.text()
    again = Roster.parse(lagged.text())
    assert again.fingerprint == lagged.fingerprint and again.config.network.max_lag == 2
    fields = {str(each).split(":")[0] for each in differences(plain, again)}
    assert {"settings.network.max_lag", "settings.network.patience"} <= fields


def test_patience_is_the_roster_s_unless_a_machine_says_otherwise(tmp_path: Path) -> None:
    parties = make_parties(tmp_path)
    patient = PLAN + "\n[network]\npatience = 90\n"
    roster = found(plan_of(tmp_path, patient), cards_of(parties)).roster
    asked = [PartyRequest(parties[0], roster, patience=given) for given in (None, 5.0, 0.0)]
    assert [request.patience_seconds for request in asked] == [90.0, 5.0, None]
    plain = found(plan_of(tmp_path), cards_of(parties)).roster
    assert PartyRequest(parties[0], plain).patience_seconds is None
