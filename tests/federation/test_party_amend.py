"""Parties leave and join while others run: real processes, killed around the switch."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from amended import (
    PLAN,
    PROMISE,
    deal_mnist,
    first_version,
    frames_sent,
    ledger_of,
    new_party,
    next_version,
    party,
    request_of,
    run,
    running,
    steps_of,
    summary_of,
    write,
)

from dpcsgp.errors import ConfigError
from dpcsgp.federation.amending import Amendment, amend
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.differences import differences
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_run import results_folder
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.privacy import composed_epsilon


@pytest.mark.slow
def test_one_leaves_and_another_joins(tmp_path: Path) -> None:
    """Rounds 0 to 3 by a, b, c; 4 to 7 by a, b; 8 to 12 by a, b, d."""
    one = first_version(tmp_path, "abc")
    two = next_version(tmp_path, one, Amendment(4, leave=("c",)))
    new_party(tmp_path, "d")
    three = next_version(tmp_path, two, Amendment(8, join=(party(tmp_path, "d").card,)))
    with running(tmp_path, pause=0.6) as parties:
        # a has the newest version at once; b and c begin with the first.
        parties.start("v1.toml", "a", "b", "c")
        parties.until("c", step=1)
        parties.kill("a", "b", "c")
        parties.start("v2.toml", "a", "b", "c")
        parties.wait("c")
        parties.until("b", version=2)
        parties.kill("b")
        parties.pause = 0.0
        parties.start("v3.toml", "b", "d")
        parties.kill("a")
        parties.start("v3.toml", "a")
        parties.wait("a", "b", "d")
    expected = {"a": list(range(12)), "b": list(range(12)), "c": [0, 1, 2, 3], "d": [8, 9, 10, 11]}
    assert {name: steps_of(tmp_path, name) for name in expected} == expected
    for name in "abd":
        summary, ledger = summary_of(tmp_path, name), ledger_of(tmp_path, name)
        assert summary["handed_over"] and summary["version"] == three.version
        assert summary["rounds"] == 13 and summary["releases"] == [len(expected[name])]
        found = composed_epsilon(ledger.releases(), 1e-3)
        assert summary["epsilon"] == pytest.approx(found) and found <= 4.0
    left = summary_of(tmp_path, "c")
    assert left["stopped_because"].startswith("completed: left after round 4")
    assert [v["version"] for v in summary_of(tmp_path, "a")["versions"]] == [1, 2, 3]


@pytest.mark.slow
def test_one_is_gone_and_one_comes_back_from_an_old_backup(tmp_path: Path) -> None:
    """c never returns, b has forgotten what it released: both are left behind or made good."""
    one = first_version(tmp_path, "abc")
    with running(tmp_path, pause=0.4) as parties:
        parties.start("v1.toml", "a", "b", "c")
        parties.until_released("b", 2)
        parties.kill("b")
        shutil.copytree(tmp_path / "b" / "runs", tmp_path / "backup")
        made = parties.releases("b")
        parties.start("v1.toml", "b")
        parties.until_released("b", made + 3)
        parties.kill("a", "b", "c")
        before = set(steps_of(tmp_path, "b"))
        shutil.rmtree(tmp_path / "b" / "runs")
        (tmp_path / "backup").rename(tmp_path / "b" / "runs")
        assert set(steps_of(tmp_path, "b")) < before
        last = max(*before, *steps_of(tmp_path, "a"))
        # Too early a round is refused by those who have gone further, with nothing spent.
        early = next_version(tmp_path, one, Amendment(3, gone=("c",), rejoin=("b",)))
        parties.start("v2.toml", "a")
        parties.processes["a"].join(60)
        assert parties.processes["a"].exitcode == 1 and early.history[0].cut
        # b hears a, and may have been a round ahead of it.
        two = next_version(tmp_path, one, Amendment(last + 2, gone=("c",), rejoin=("b",)))
        parties.pause = 0.0
        parties.start("v2.toml", "a", "b")
        parties.wait("a", "b")
    first = two.history[0].steps
    # b: one line per step that it may have released, before the first new one.
    assert sorted(steps_of(tmp_path, "b")) == list(range(12))
    made = steps_of(tmp_path, "a")
    assert len(set(made)) == len(made) and set(range(first, 12)) < set(made)
    (file,) = (latest_place(party(tmp_path, "b")) / "ledger").glob("node-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert before <= {line["step"] for line in lines[1:] if line["step"] < first}
    assert all(line["step"] < first for line in lines if line.get("lost"))
    for name in "ab":
        epsilon = composed_epsilon(ledger_of(tmp_path, name).releases(), 1e-3)
        assert summary_of(tmp_path, name)["epsilon"] == pytest.approx(epsilon) and epsilon <= 4.0


@pytest.mark.slow
def test_a_party_goes_on_with_new_keys(tmp_path: Path) -> None:
    """As docs/operating.md says: new TLS and noise keys under the old name, the folder of the run
    stays."""
    one = first_version(tmp_path, "abc")
    with running(tmp_path, pause=0.3) as parties:
        parties.start("v1.toml", "a", "b", "c")
        parties.until("b", step=3)
        parties.kill("a", "b", "c")
        made = {name: steps_of(tmp_path, name) for name in "abc"}
        fresh = PartyFolder.create(tmp_path / "new-keys", "b", one.parties[1].address, PROMISE)
        last = max(step for steps in made.values() for step in steps)
        for file in ("key.pem", "noise-key.pem", "b.card.toml"):
            (tmp_path / "new-keys" / file).replace(tmp_path / "b" / file)
        two = next_version(tmp_path, one, Amendment(last + 1, replace=(fresh.card,)))
        assert two.history[0].cut and two.parties[1].noise_key != one.parties[1].noise_key
        parties.pause = 0.0
        parties.start("v2.toml", "a", "b", "c")
        parties.wait()
    for name in "abc":
        steps, epsilon = steps_of(tmp_path, name), summary_of(tmp_path, name)["epsilon"]
        assert steps[: len(made[name])] == made[name] and len(set(steps)) == len(steps)
        assert set(range(last + 1, 12)) <= set(steps) and epsilon <= 4.0


@pytest.mark.slow
def test_two_second_versions_do_not_run_together(tmp_path: Path) -> None:
    """Nobody releases anything new; once they agree, releases under way are used as they are."""
    one = first_version(tmp_path, "abc")
    two = next_version(tmp_path, one, Amendment(5, leave=("c",)))
    other = amend(one, Amendment(7, leave=("c",), settings=("algorithm.steps=20",))).roster
    write(tmp_path, other, name="other.toml")
    with running(tmp_path, pause=0.3) as parties:
        parties.start("v1.toml", "a", "b", "c")
        parties.until("c", step=1)
        parties.kill("a", "b", "c")
        parties.pause = 0.0
        parties.start("v2.toml", "a", "c")
        parties.start("other.toml", "b")
        parties.until("a", version=2, waiting_for="b")
        told = parties.until("b", waiting_for="a", peers="need the same roster file")
        assert two.words in json.dumps(told["peers"])
        parties.kill("a", "b")
        assert max(steps_of(tmp_path, "a")) <= 5 and max(steps_of(tmp_path, "b")) <= 5
        fields = {each.field for each in differences(two, other)}
        assert {"settings.algorithm.steps", "history of version 1, rounds"} <= fields
        parties.start("v2.toml", "a", "b")
        parties.wait("a", "b", "c")
    assert steps_of(tmp_path, "a") == steps_of(tmp_path, "b") == list(range(12))
    assert steps_of(tmp_path, "c") == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_who_keeps_an_old_version_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """c has not heard of version 2: it is served to the last old round, then told, and can leave.

    a only calls out, so that the old version is dialled from both sides.
    """
    plan = PLAN.replace("directed_ring", "star")
    one = first_version(tmp_path, "bac", plan=plan, closed=("a",))
    next_version(tmp_path, one, Amendment(3, leave=("c",)))
    with running(tmp_path) as parties:
        results_folder(request_of(tmp_path, "a", "v1.toml"))
        results_folder(request_of(tmp_path, "b", "v1.toml"))
        parties.start("v2.toml", "a", "b")
        parties.start("v1.toml", "c")
        parties.until("c", waiting_for="b", log="version 2 of the roster")
        # One release was under way. It stays in the ledger, whatever happens.
        assert steps_of(tmp_path, "c") == [0, 1, 2, 3]
        parties.kill("c")
        parties.start("v2.toml", "c")
        parties.wait("a", "b")
    for name in "ab":
        assert steps_of(tmp_path, name) == list(range(12))
        assert summary_of(tmp_path, name)["handed_over"]
    assert steps_of(tmp_path, "c") == [0, 1, 2, 3]
    assert {frame for frames in frames_sent(tmp_path, "c").values() for frame in frames}
    with pytest.raises(ConfigError, match="version 1 of the roster is over"):
        results_folder(request_of(tmp_path, "a", "v1.toml"))


@pytest.mark.slow
def test_who_leaves_late_needs_nobody_if_all_was_acknowledged_before(tmp_path: Path) -> None:
    """c stays on version 1 until the others have ended version 2; it is killed, not stopped."""
    one = first_version(tmp_path, "abc", plan=PLAN.replace("directed_ring", "star"))
    next_version(tmp_path, one, Amendment(3, leave=("c",)))
    with running(tmp_path) as parties:
        for name in "ab":
            results_folder(request_of(tmp_path, name, "v1.toml"))
        parties.start("v2.toml", "a", "b")
        parties.start("v1.toml", "c")
        parties.wait("a", "b")
        parties.until("c", waiting_for="a", round=3)
        time.sleep(1.5)
        parties.kill("c")
        kept = latest_place(party(tmp_path, "c")) / "journal" / "acknowledged.json"
        assert json.loads(kept.read_bytes()) == {"0": 3}
        started = time.monotonic()
        parties.start("v2.toml", "c")
        parties.wait("c", seconds=60)
        assert time.monotonic() - started < 40
    summary, status = summary_of(tmp_path, "c"), parties.status("c")
    assert summary["handed_over"] and summary["stopped_because"].startswith("completed: left")
    # Step 3 was under way in version 1: nobody used it, and it counts.
    assert steps_of(tmp_path, "c") == [0, 1, 2, 3]
    assert status["phase"] == "ended" and status["releases"] == 4
    assert status["epsilon"] == pytest.approx(summary["epsilon"])


@pytest.mark.slow
def test_who_leaves_just_before_the_end_does_not_leave_models_apart(tmp_path: Path) -> None:
    """Two rounds are left: copies at zero would not catch up, so models are handed over."""
    one = first_version(tmp_path, "abc")
    two = next_version(tmp_path, one, Amendment(11, leave=("c",)))
    with running(tmp_path) as parties:
        for name in "abc":
            results_folder(request_of(tmp_path, name, "v1.toml"))
        parties.start("v2.toml", "a", "b", "c")
        parties.until("a", version=2)
        parties.kill("a")  # while it begins: it goes on with the same message
        parties.start("v2.toml", "a")
        parties.wait()
    models = [load_file(latest_place(party(tmp_path, name)) / "model.safetensors") for name in "ab"]
    a_D, b_D = (tensors["node_models"][0] for tensors in models)
    assert (a_D - b_D).norm() < 0.03 * a_D.norm()  # with copies at zero: 0.1
    for name in "ab":
        assert steps_of(tmp_path, name) == list(range(12))
        assert summary_of(tmp_path, name)["rounds"] == 13
    assert two.hands_over and not two.newcomers


@pytest.mark.slow
def test_who_calls_again_and_again_with_an_old_version_does_not_fill_the_log(
    tmp_path: Path,
) -> None:
    """c runs version 1 though it is in version 2: a, which hears it, says why it waits, once."""
    one = first_version(tmp_path, "abc")
    next_version(tmp_path, one, Amendment(3, settings=("algorithm.polish_rounds=2",)))
    with running(tmp_path) as parties:
        for name in "ab":
            results_folder(request_of(tmp_path, name, "v1.toml"))
        parties.start("v2.toml", "a", "b")
        parties.start("v1.toml", "c")
        parties.until("a", waiting_for="c", peers="it still runs an earlier version of the roster")
        parties.until("c", peers="took effect at round 3")
        parties.until("a", log="waiting for c")
        parties.until("c", log="waiting for b")
        before = [parties.status(name)["log"] for name in "ac"]
        time.sleep(3)  # some ten calls, all refused
        assert [parties.status(name)["log"] for name in "ac"] == before
        parties.kill("c")
        parties.start("v2.toml", "c")
        parties.wait()


PAIRS = 5  # of runs without and with amendments
TRIAL = Promise(2000, 8.0, 1e-4)
SPEC = """
[task]
name = "own"
model = "logistic"

[data]
input_shape = [49]
num_classes = 10

[algorithm]
steps = 30
polish_rounds = 6
learning_rate = 1.0

[run]
checkpoint_every = 5
evaluate_every = 1

[graph]
name = "directed_exponential"
"""


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.mnist
@pytest.mark.parametrize("lag", [0, 2])
def test_leaving_and_joining_costs_no_accuracy(tmp_path: Path, lag: int) -> None:
    """One leaves at round 10 of 30, another joins at 20; killed around both switches.

    Two runs that differ by their noise alone are some tenths of a point apart: the mean over
    several pairs tells a loss of one point from chance.
    """
    gaps = []
    for seed in range(PAIRS):
        calm, amended_ = _pair_of_runs(tmp_path / f"{seed}", seed, lag)
        gaps.append(100 * (calm - amended_))
        print(f"seed {seed}: without {calm:.4f}, with {amended_:.4f}, gap {gaps[-1]:+.2f} points")
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / PAIRS**0.5
    print(f"mean gap {mean:+.2f} points, standard error {error:.2f}")
    assert error < 0.5, "too noisy to tell"
    assert mean <= 1.0


def _pair_of_runs(root: Path, seed: int, lag: int) -> tuple[float, float]:
    """Return the accuracy without and with the two amendments; ledgers are checked on the way."""
    calm, amended_ = root / "calm", root / "amended"
    for each in (calm, amended_):
        each.mkdir(parents=True)
        deal_mnist(each, "abcdef", TRIAL.num_examples, seed)
    names, plan = "abcde", f"{SPEC}\n[network]\nmax_lag = {lag}\n"
    first_version(calm, names, plan=plan, promise=TRIAL)
    one = first_version(amended_, names, plan=plan, promise=TRIAL)
    two = next_version(amended_, one, Amendment(10, leave=("c",)))
    new_party(amended_, "f", promise=TRIAL)
    next_version(amended_, two, Amendment(20, join=(party(amended_, "f").card,)))
    with running(calm, seed=seed) as others, running(amended_, 0.3, seed) as parties:
        parties.start("v1.toml", *names)
        others.start("v1.toml", *names)  # in the pauses of the first
        parties.until("c", step=3)
        parties.kill(*names)
        parties.start("v2.toml", *names)
        for name in "ade":  # on both sides of the switch
            parties.until(name, round=9 + "ade".index(name))
            parties.kill(name)
            parties.start("v2.toml", name)
        parties.wait("c", seconds=300)
        parties.until("b", version=2, step=12)
        parties.kill(*"abde")
        parties.start("v3.toml", *"abdef")
        parties.until("b", round=20)
        parties.kill("b", "f")
        parties.pause = 0.0
        parties.start("v3.toml", "b", "f")
        parties.wait(*"abdef", seconds=300)
        others.wait(seconds=300)
    _check_ledgers(amended_)
    scores = [
        [summary_of(root, name)["accuracy_node_mean"] for name in stayed]
        for root, stayed in ((calm, "abde"), (amended_, "abdef"))
    ]
    return statistics.mean(scores[0]), statistics.mean(scores[1])


def _check_ledgers(root: Path) -> None:
    """Every step of every party once, and the eps that `dpcsgp account` finds."""
    made = {name: steps_of(root, name) for name in "abcdef"}
    stayed = {name: list(range(30)) for name in "abde"}
    assert made == {**stayed, "c": list(range(10)), "f": list(range(20, 30))}
    for name in "abcdef":
        told = json.loads(run("account", latest_place(party(root, name)), "--json").stdout)
        assert told["epsilon"] == pytest.approx(summary_of(root, name)["epsilon"])
        assert told["epsilon"] <= TRIAL.epsilon
