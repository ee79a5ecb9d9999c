"""Versions with lag after versions with lag: each release once, each frame the same."""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from amended import (
    PLAN,
    first_version,
    frames_sent,
    ledger_of,
    new_party,
    next_version,
    party,
    request_of,
    running,
    steps_of,
    summary_of,
)
from version_twin import Played, play, turns_until

from dpcsgp.errors import ConfigError
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.amending import Amendment, amend
from dpcsgp.federation.contributions import contributions
from dpcsgp.federation.party_run import prepare_party, results_folder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.succession import told_ahead
from dpcsgp.federation.turn_log import PartyTurn
from dpcsgp.privacy import composed_epsilon

LAG = PLAN + "\n[network]\nmax_lag = 2\n"
SKIP = LAG + 'late_gradients = "skip"\n'


def check_twin(root: Path, versions: list[Roster]) -> list[Played]:
    """Compare the model of every party with a simulation of everybody's turns."""
    played = play(root, versions)
    for name, ended in last_version(versions).items():
        found = load_file(latest_place(party(root, name)) / "model.safetensors")["node_models"][0]
        assert torch.equal(found, played[ended].models[name]), (name, ended)
    return played


def last_version(versions: list[Roster]) -> dict[str, int]:
    """Return in which of these versions each party ended."""
    return {card.name: place for place, each in enumerate(versions) for card in each.parties}


def check_once(root: Path, versions: list[Roster], unused: int = 1) -> dict[str, list[int]]:
    """One frame a round and version, one line a release, one frame for every release."""
    all_used: dict[str, list[int]] = {}
    for name in last_version(versions):
        sent = frames_sent(root, name)
        assert all(len(digests) == 1 for digests in sent.values()), name
        steps = steps_of(root, name)
        assert len(set(steps)) == len(steps), (name, steps)
        used: list[int] = []
        for place, roster in enumerate(versions):
            if name not in [card.name for card in roster.parties]:
                continue
            until = versions[place + 1] if place + 1 < len(versions) else None
            first = roster.history[-1].steps if roster.history else 0
            for number, turn in enumerate(turns_until(root, name, roster, until), start=first):
                late = roster.config.network.late_gradients == "skip"
                if late and turn.gradient >= 0:
                    used.append(turn.gradient)
                elif not late and number < roster.config.algorithm.steps:
                    used.append(number)
        assert used == sorted(set(used)) and set(used) <= set(steps), name
        # A release may have been ready too late for the last frame that could take it.
        assert len(set(steps) - set(used)) <= unused, (name, used, steps)
        epsilon = composed_epsilon(ledger_of(root, name).releases(), 1e-3)
        assert summary_of(root, name)["epsilon"] == pytest.approx(epsilon) and epsilon <= 4.0
        all_used[name] = used
    return all_used


@pytest.mark.slow
@pytest.mark.parametrize("plan", [LAG, SKIP], ids=["wait", "skip"])
def test_one_leaves_and_another_joins_with_lag(tmp_path: Path, plan: str) -> None:
    """Rounds 0 to 9 by a, b, c; 10 to 19 by a, b; 20 to 26 by a, b, d; killed around both."""
    one = first_version(tmp_path, "abc", steps=26, plan=plan)
    two = next_version(tmp_path, one, Amendment(10, leave=("c",)))
    new_party(tmp_path, "d")
    three = next_version(tmp_path, two, Amendment(20, join=(party(tmp_path, "d").card,)))
    assert three.config.network.max_lag == 2 and three.hands_over
    slow = dict.fromkeys("abcd", -0.3)
    with running(tmp_path, slow=slow) as parties:
        parties.start("v1.toml", *"abc")
        parties.until("c", step=1)
        parties.kill(*"abc")
        parties.start("v2.toml", *"abc")
        chance = random.Random(3)
        for name in "abca":
            time.sleep(chance.uniform(0.2, 0.8))
            parties.kill(name)
            parties.start("v2.toml", name)
        parties.wait("c")
        parties.until("b", version=2, step=7)
        parties.kill(*"ab")
        parties.start("v3.toml", *"abd")
        for name in "bdab":
            time.sleep(chance.uniform(0.2, 0.8))
            parties.kill(name)
            parties.start("v3.toml", name)
        parties.wait(*"abd")
    versions = [one, two, three]
    check_once(tmp_path, versions)
    check_twin(tmp_path, versions)
    for name in "abd":
        summary = summary_of(tmp_path, name)
        assert summary["handed_over"] and summary["version"] == 3 and summary["rounds"] == 27
    assert [v["version"] for v in summary_of(tmp_path, "a")["versions"]] == [1, 2, 3]
    assert summary_of(tmp_path, "c")["stopped_because"].startswith("completed: left after round 10")


def test_settings_of_lag_change_from_version_to_version(tmp_path: Path) -> None:
    """In step, then with lag, then with late gradients, then in step again."""
    one = first_version(tmp_path, "abc", plan=PLAN)
    lag, skip = "network.max_lag=2", "network.late_gradients=skip"
    two = next_version(tmp_path, one, Amendment(3, settings=(lag,)))
    three = next_version(tmp_path, two, Amendment(6, settings=(skip,)), approved=False)
    back = ("network.max_lag=0", "network.late_gradients=wait")
    four = amend(three, Amendment(9, settings=back)).roster
    rates = [examine(each).design.mixing_rate for each in (one, two, three, four)]
    assert rates[0] == rates[3] and rates[1] == rates[2] and (rates[1] or 1) < (rates[0] or 1)
    assert [each.config.network.max_lag for each in (one, two, three, four)] == [0, 2, 2, 0]
    with pytest.raises(ConfigError, match=r"late_gradients = \"skip\": in step nobody is ahead"):
        amend(one, Amendment(3, settings=(skip,)))


@pytest.mark.slow
@pytest.mark.parametrize("later", ["skip", "wait"])
def test_a_gradient_that_a_version_did_not_wait_for_is_used_once_or_never(
    tmp_path: Path, later: str
) -> None:
    """a computes for seconds: its first gradient is under way when the version ends."""
    one = first_version(tmp_path, "abc", steps=11, plan=SKIP)
    settings = (f"network.late_gradients={later}",)
    two = next_version(tmp_path, one, Amendment(8, settings=settings))
    with running(tmp_path, slow={"a": 5.0, "b": 0.1, "c": 0.1}) as parties:
        for name in "abc":
            results_folder(request_of(tmp_path, name, "v1.toml"))
        parties.start("v2.toml", *"abc")
        parties.until("a", version=2)
        parties.kill("a")
        parties.start("v2.toml", "a")
        parties.wait()
    used = check_once(tmp_path, [one, two])["a"]
    assert turns_until(tmp_path, "a", one, two)[-1].gradient == -1
    in_second = [step for step in used if step in {t.gradient for t in turns(tmp_path, "a", two)}]
    if later == "skip":  # under the number of the step at which it was begun
        assert in_second and in_second[0] < 8
        check_twin(tmp_path, [one, two])
    else:
        assert used == [8, 9, 10]


def turns(root: Path, name: str, roster: Roster) -> list[PartyTurn]:
    return turns_until(root, name, roster, None)


@pytest.mark.slow
def test_who_has_gone_further_refuses_and_names_a_round_that_nobody_has_passed(
    tmp_path: Path,
) -> None:
    """b has dropped what it had released of later steps; a round that it names will do."""
    one = first_version(tmp_path, "abc", steps=40, plan=SKIP)
    early = next_version(tmp_path, one, Amendment(2, settings=("algorithm.learning_rate=0.5",)))
    with running(tmp_path, slow=dict.fromkeys("abc", -0.1)) as parties:
        parties.start("v1.toml", *"abc")
        parties.until("b", step=18)
        parties.kill(*"abc")
        before = steps_of(tmp_path, "b")
        with pytest.raises(ConfigError, match=r"b has made step .* --at-round") as caught:
            prepare_party(request_of(tmp_path, "b", "v2.toml"))
        assert caught.value.exit_code == 2 and steps_of(tmp_path, "b") == before
        (named,) = map(int, re.findall(r"--at-round (\d+) or later", str(caught.value)))
        made = {name: len(turns(tmp_path, name, one)) for name in "abc"}
        # From b two edges lead to a, each with its lag.
        assert named == made["b"] + 2 * 3 and max(made.values()) <= named
        two = next_version(tmp_path, one, Amendment(named, leave=("c",)))
        parties.start("v2.toml", *"abc")
        parties.wait()
    assert early.history[0].rounds == 2 and two.history[0].rounds == named
    check_once(tmp_path, [one, two])
    check_twin(tmp_path, [one, two])


@pytest.mark.slow
@pytest.mark.parametrize("late", ["skip", "wait"])
def test_who_has_gone_further_and_kept_its_releases_goes_back_and_uses_them(
    tmp_path: Path, late: str
) -> None:
    """a even begins a version that the others do not want: nothing was made under it."""
    plan = (SKIP if late == "skip" else LAG).replace(
        "checkpoint_every = 3", "checkpoint_every = 99"
    )
    one = first_version(tmp_path, "abc", steps=16, plan=plan)
    unwanted = next_version(tmp_path, one, Amendment(2, settings=("algorithm.polish_rounds=2",)))
    with running(tmp_path, slow=dict.fromkeys("abc", -0.2)) as parties:
        parties.start("v1.toml", *"abc")
        parties.until("a", step=7)
        parties.kill(*"abc")
        made = {name: steps_of(tmp_path, name) for name in "abc"}
        assert max(made["a"]) >= 4
        parties.start("v2.toml", "a")
        parties.until("a", version=2)
        parties.kill("a")
        two = next_version(tmp_path, one, Amendment(4, leave=("c",)))
        parties.start("v2.toml", *"abc")
        parties.wait()
    assert unwanted.fingerprint != two.fingerprint
    check_once(tmp_path, [one, two], unused=16)
    for name in "ab":  # what was released counts once, and is put in once
        steps = steps_of(tmp_path, name)
        assert set(made[name]) <= set(steps) and len(set(steps)) == len(steps)
        later = [t.gradient for t in turns(tmp_path, name, two)] if late == "skip" else steps
        assert {step for step in made[name] if step >= 4} <= set(later)
    assert set(made["c"]) <= set(steps_of(tmp_path, "c"))
    # c leaves with the model of that round, whatever it had heard in later ones.
    model_D = load_file(latest_place(party(tmp_path, "c")) / "model.safetensors")["node_models"][0]
    assert torch.equal(model_D, play(tmp_path, [one, two], most=1)[0].models["c"])


@pytest.mark.slow
def test_who_keeps_an_old_version_with_lag_comes_back_from_wherever_it_stands(
    tmp_path: Path,
) -> None:
    """b and c hear of the next version late: each went on for its lag, and saved every step."""
    plan = LAG.replace("checkpoint_every = 3", "checkpoint_every = 1")
    one = first_version(tmp_path, "abc", steps=16, plan=plan)  # a -> b -> c -> a
    two = next_version(tmp_path, one, Amendment(4, settings=("algorithm.polish_rounds=2",)))
    results_folder(request_of(tmp_path, "a", "v1.toml"))
    with running(tmp_path) as parties:
        parties.start("v2.toml", "a")
        parties.start("v1.toml", *"bc")
        # How far each went depends on timing: a small y asks for messages in step.
        parties.until("b", step=4, waiting_for="a", waiting_seconds=3)
        parties.until("c", step=4, waiting_for="b", waiting_seconds=3)
        parties.kill(*"bc")
        beyond = {name: len(turns(tmp_path, name, one)) for name in "bc"}
        assert 4 <= beyond["b"] <= 4 + 3 and 4 <= beyond["c"] <= 4 + 6
        made = {name: steps_of(tmp_path, name) for name in "bc"}
        parties.start("v2.toml", *"bc")
        parties.wait()
    check_once(tmp_path, [one, two])
    for name in "bc":
        assert steps_of(tmp_path, name)[: len(made[name])] == made[name]
    assert [steps_of(tmp_path, name) for name in "abc"] == [list(range(16))] * 3


@pytest.mark.slow
def test_shared_noise_goes_on_with_lag(tmp_path: Path) -> None:
    """All tell each other keys anew in every version; b is killed on both sides of the change."""
    plan = LAG.replace("[privacy]", "[privacy]\nmax_colluders = 1")
    one = first_version(tmp_path, "abcd", steps=16, plan=plan)
    two = next_version(tmp_path, one, Amendment(8, leave=("d",)))
    for name in "abcd":
        results_folder(request_of(tmp_path, name, "v1.toml"))
    with running(tmp_path, slow=dict.fromkeys("abcd", -0.2)) as parties:
        parties.start("v2.toml", *"abcd")
        for least in ({"step": 3}, {"version": 2, "step": 10}):
            parties.until("b", **least)
            parties.kill("b")
            parties.start("v2.toml", "b")
        parties.wait()
    check_once(tmp_path, [one, two], unused=0)
    assert [steps_of(tmp_path, name) for name in "abc"] == [list(range(16))] * 3


def test_a_message_that_may_be_under_way_is_not_claimed(tmp_path: Path) -> None:
    one = first_version(tmp_path, "abc", plan=LAG)  # a -> b -> c -> a

    def last_rounds(polished: bool = True, settled: bool = True) -> list[int]:
        found = contributions(one, 0, 10, 10, polished=polished, settled=settled)
        return [each.last_round for each in found]

    assert last_rounds() == [9, 8, 9]  # the polish round has brought all
    assert last_rounds(polished=False) == [9, 4, 9]
    assert last_rounds(polished=False, settled=False) == [7, 4, 7]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [LAG, SKIP], ids=["wait", "skip"])
def test_nobody_waits_for_one_that_is_gone_with_lag(tmp_path: Path, plan: str) -> None:
    """c never returns and b has an old backup: both as without lag, a few rounds later."""
    one = first_version(tmp_path, "abc", steps=30, plan=plan)
    with running(tmp_path, slow=dict.fromkeys("abc", -0.2)) as parties:
        parties.start("v1.toml", *"abc")
        parties.until_released("b", 2)
        parties.kill("b")
        shutil.copytree(tmp_path / "b" / "runs", tmp_path / "backup")
        made = parties.releases("b")
        parties.start("v1.toml", "b")
        parties.until_released("b", made + 4)
        parties.kill(*"abc")
        before, made = steps_of(tmp_path, "b"), len(turns(tmp_path, "a", one))
        shutil.rmtree(tmp_path / "b" / "runs")
        (tmp_path / "backup").rename(tmp_path / "b" / "runs")
        next_version(tmp_path, one, Amendment(made + 2, gone=("c",), rejoin=("b",)))
        parties.start("v2.toml", "a")
        parties.processes["a"].join(60)
        assert parties.processes["a"].exitcode == 1  # b hears a, and may have been a lag ahead
        two = next_version(tmp_path, one, Amendment(made + 3, gone=("c",), rejoin=("b",)))
        parties.start("v2.toml", *"ab")
        parties.until("a", version=2)
        parties.kill("a")
        parties.start("v2.toml", "a")
        parties.wait("a", "b")
    steps, first = steps_of(tmp_path, "b"), two.history[0].steps
    # b: one line per step that it may have released, before the first new one.
    assert len(set(steps)) == len(steps) and {*before, *range(first)} <= set(steps)
    assert len(set(steps_of(tmp_path, "a"))) == len(steps_of(tmp_path, "a"))
    for name in "ab":
        own = [digests for key, digests in frames_sent(tmp_path, name).items() if name == "a"]
        assert all(len(digests) == 1 for digests in own)
        put_in = [t.gradient for t in turns(tmp_path, name, two) if t.gradient >= 0]
        assert put_in == sorted(set(put_in))
        epsilon = composed_epsilon(ledger_of(tmp_path, name).releases(), 1e-3)
        assert summary_of(tmp_path, name)["epsilon"] == pytest.approx(epsilon) and epsilon <= 4.0
    # Of a version that was cut off nothing is claimed that may have been under way.
    told = summary_of(tmp_path, "a")["versions"][0]
    heard = {each["party"]: each["last_round"] for each in told["contributions"]}
    assert heard["c"] <= told["rounds"] - 3


@pytest.mark.slow
def test_a_promise_is_kept_by_a_party_that_was_ahead_whatever_rule_its_noise_follows(
    tmp_path: Path,
) -> None:
    """Steps that it has released ahead cost more than the new version says of them."""
    plan = PLAN.replace("clip_norm = 1.0", 'clip_norm = 1.0\nnoise = "paper"\nc2 = 1.48')
    names = ["anna", "bert", "carl"]
    first = first_version(tmp_path, names, steps=24, plan=plan + "\n[network]\nmax_lag = 6\n")
    with running(tmp_path, pause=0.25) as parties:
        parties.start("v1.toml", *names)
        parties.until("carl", round=4)
        parties.kill("carl")
        time.sleep(8)
        reached = parties.status("carl")["round"]
        parties.kill("anna", "bert")
    wanted = Amendment(max(6, reached), settings=("algorithm.steps=48",))
    second = next_version(tmp_path, first, wanted)
    agreement, path = examine(second), latest_place(party(tmp_path, "bert"))
    told = told_ahead(path, agreement, "bert")
    assert re.search(r"bert has released \d+ steps of this version already", told), told
    assert "goes on without new gradients" in told
    with running(tmp_path, pause=0.0) as parties:
        parties.start("v2.toml", *names)
        parties.wait(seconds=90)
    for name in names:
        spent = composed_epsilon(ledger_of(tmp_path, name).releases(), 1e-3)
        assert spent <= 4.0, (name, spent)
        assert summary_of(tmp_path, name)["epsilon"] == pytest.approx(spent)
