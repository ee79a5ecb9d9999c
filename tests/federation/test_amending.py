"""The next version of a roster: who may be in it, what it must say, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from amended import PLAN, first_version, new_party, next_version, party, request_of, run, write

from dpcsgp.config import change_config
from dpcsgp.errors import ConfigError
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.amending import Amendment, amend, check_succession
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.differences import differences
from dpcsgp.federation.history import Chapter, spent_by
from dpcsgp.federation.party_run import open_network, prepare_party, results_folder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.run_place import home_of
from dpcsgp.federation.succession import check_own_history, refuse_later_frames
from dpcsgp.privacy import composed_epsilon
from dpcsgp.privacy.ledger import LedgerBook


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


def test_a_version_goes_on_from_the_one_before(one: Roster, two: Roster) -> None:
    assert (two.id, two.version, two.initial_model) == (one.id, 2, one.initial_model)
    (chapter,) = two.history
    assert chapter.fingerprint == one.fingerprint and (chapter.rounds, chapter.steps) == (4, 4)
    assert chapter.parties == ("a", "b", "c") and not chapter.cut
    assert [card.name for card in two.parties] == ["a", "c"]
    assert Roster.parse(two.text()) == two
    assert "history of version 1, rounds" in {each.field for each in differences(one, two)}
    assert "party b, name" in {each.field for each in differences(one, two)}


def test_models_are_handed_over_where_few_rounds_are_left(one: Roster, two: Roster) -> None:
    """The roster says so, in its fingerprint; one that does not is run as it was begun."""
    late = amend(one, Amendment(11, leave=("b",)))
    assert late.roster.hands_over and not two.hands_over
    assert "hand_over = true" in late.roster.text() and "hand_over" not in two.text()
    assert Roster.parse(late.roster.text()) == late.roster
    before = replace(late.roster, history=(replace(late.roster.history[0], hand_over=False),))
    check_succession(examine(one), before)
    assert before.fingerprint != late.roster.fingerprint
    # One message more: a model of 14 coordinates of 4 bytes.
    assert late.bytes_per_edge - examine(before).bytes_per_edge == 4 * late.design.dim
    assert Rounds(late.roster, late.design).size_of_frame(0) == 4 * late.design.dim
    assert Rounds(before, late.design).shift == 11 and Rounds(late.roster, late.design).shift == 10
    uncompressed = amend(one, Amendment(11, settings=("compression.spec=none",)))
    assert not uncompressed.roster.hands_over


def test_budgets_pay_for_all_versions(one: Roster, two: Roster, root: Path) -> None:
    """Promises are about all releases together, whatever the version."""
    before, after = examine(one), examine(two)
    assert after.costs[0].epsilon_of_plan <= 4.0
    # Nothing changed for a: its noise stays. The newcomer has fewer steps to pay for.
    assert after.costs[0].noise_multiplier == before.costs[0].noise_multiplier
    new_party(root, "d")
    three = amend(two, Amendment(8, join=(party(root, "d").card,)))
    joined, stayed = three.costs[2], three.costs[0]
    assert joined.noise_multiplier < stayed.noise_multiplier
    assert joined.epsilon_before == 0 and 3.9 < joined.epsilon_of_plan <= 4.0
    # a: 8 steps of the first two versions and 4 of the third.
    noise = [(event, count) for event, count in spent_by(three.roster.history, "a")]
    assert sum(count for _, count in noise) == 8
    assert stayed.epsilon_before == pytest.approx(composed_epsilon(noise, 1e-3))
    # More steps need more noise; a larger promise needs less.
    longer = amend(one, Amendment(4, settings=("algorithm.steps=40",)))
    assert longer.costs[0].noise_multiplier > before.costs[0].noise_multiplier
    assert 3.9 < longer.costs[0].epsilon_of_plan <= 4.0


def test_a_promise_may_change_but_not_below_what_was_spent(one: Roster, root: Path) -> None:
    new_party(root, "g")
    stingy = party(root, "a").promise(Promise(60, 1.0, 1e-3)).card
    with pytest.raises(ConfigError, match=r"party a: .*not reachable"):
        amend(one, Amendment(6, replace=(stingy,)))
    richer = party(root, "a").promise(Promise(60, 8.0, 1e-3)).card
    found = amend(one, Amendment(6, replace=(richer,)))
    assert found.costs[0].noise_multiplier < found.costs[1].noise_multiplier
    other = party(root, "a").promise(Promise(60, 4.0, 1e-4)).card
    with pytest.raises(ConfigError, match=r"party a, delta: 0.001 / 0.0001"):
        amend(one, Amendment(6, replace=(other,)))
    party(root, "a").promise(Promise(60, 4.0, 1e-3))


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Amendment(12), "--at-round 12: expected a round from 0"),
        (Amendment(-1), "--at-round -1"),
        (Amendment(4, leave=("x",)), "--leave x: expected a party of the roster"),
        (Amendment(4, leave=("a", "b")), "1 card: a federation needs at least 2"),
        (Amendment(4, leave=("a",), rejoin=("a",)), "leaves or stays"),
        (Amendment(4, settings=("task.model=mlp:4",)), "is the same in all versions"),
        (Amendment(4, settings=("run.seed=4",)), "is the same in all versions"),
        (Amendment(4, settings=("privacy.epsilon=40",)), "is on the cards"),
        (Amendment(4, settings=("privacy.seed=4",)), "each machine's own"),
        (Amendment(4, settings=("algorithm.steps=4",)), "before the last step"),
        (Amendment(4, settings=("algorithm.mixing_rate=1", "compression.spec=gsgd:2")), "grow"),
        (Amendment(4, settings=("algorithm.stepz=4",)), "stepz"),
        (Amendment(4, settings=("network.late_gradients=skip",)), "set network.max_lag = 3"),
    ],
)
def test_what_cannot_work_is_refused(one: Roster, wanted: Amendment, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        amend(one, wanted)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("v1.toml --at-round 4 --gone x", r"--gone x: .* on it are a, b, c"),
        ("v1.toml --at-round 4 --rejoin x", r"--rejoin x: .* on it are a, b, c"),
        ("v1.toml --at-round 4 --replace {e}", r"--replace e: .* on it are a, b, c"),
        ("v1.toml --at-round 4 --replace v1.toml", r"card .*v1\.toml: name is missing"),
        ("v1.toml --at-round 4 --replace no.toml", r"card .*no\.toml: there is no such file"),
        ("v1.toml --at-round 4 --leave b --gone b", r"--leave and --gone b: .*one of the two"),
        ("v1.toml --at-round 4 --gone b --rejoin b", "b: a party leaves or stays"),
        ("v1.toml --at-round 4 --gone b --replace {b}", "b: a party leaves or stays"),
        ("v1.toml --at-round 4 --rejoin b --rejoin b", "--rejoin b: .* once"),
        ("v1.toml --at-round 4 --join {b}", r"--join b: on the roster already; --replace"),
        ("v1.toml --at-round 4 --leave b --join {b}", r"--join b: on the roster already"),
        ("v2.toml --at-round 3 --rejoin c", "--at-round 3: .* from 4, where version 2 began"),
        ("v2.toml --at-round 5 --rejoin b", r"--rejoin b: .* on it are a, c"),
        ("no.toml --at-round 4 --gone b", r"no\.toml: there is no such file"),
    ],
)
def test_lines_that_cannot_work_end_with_one_sentence_and_code_2(
    root: Path, two: Roster, tmp_path: Path, line: str, problem: str
) -> None:
    if not (root / "e").exists():
        new_party(root, "e")
    write(root, two, approved=False)
    cards = {name: root / name / f"{name}.card.toml" for name in "be"}
    words = [
        root / word if word.endswith(".toml") else word for word in line.format(**cards).split()
    ]
    out = tmp_path / "new.toml"
    with pytest.raises(ConfigError, match=problem) as caught:
        run("federation", "amend", *words, "--out", out)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not out.exists()


def test_a_version_after_one_that_nobody_approved_is_refused(root: Path, two: Roster) -> None:
    three = amend(two, Amendment(6, settings=("algorithm.learning_rate=0.5",))).roster
    write(root, three, approved=False)
    with pytest.raises(ConfigError, match=r"a was in version 2 .* not begun here yet") as caught:
        run("party", "approve", root / "v3.toml", "--folder", root / "a", "--yes")
    assert caught.value.exit_code == 2


def test_shares_of_a_common_data_set_do_not_change_hands(tmp_path: Path) -> None:
    text = PLAN.replace('name = "own"', 'name = "digits"').replace(
        "[data]\ninput_shape = [6]\nnum_classes = 2\n", ""
    )
    digits = first_version(tmp_path, "ab", plan=text)
    with pytest.raises(ConfigError, match="examples would change hands"):
        amend(digits, Amendment(2, join=(new_party(tmp_path, "c").card,)))
    assert amend(digits, Amendment(2, settings=("algorithm.steps=30",))).roster.version == 2


def _understated(chapter: Chapter) -> Chapter:
    louder = replace(chapter.releases[0], noise_multiplier=50.0)
    return replace(chapter, releases=(louder, *chapter.releases[1:]))


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (_understated, "history of version 1, noise_multipliers"),
        (lambda c: replace(c, fingerprint="0" * 64), "history of version 1, fingerprint"),
        (
            lambda c: replace(c, parties=("a", "x", "c")),
            "history of version 1, parties",
        ),
    ],
)
def test_whoever_was_there_refuses_another_history(
    one: Roster, two: Roster, spoil: Callable[[Chapter], Chapter], field: str
) -> None:
    forged = replace(two, history=(spoil(two.history[0]),))
    with pytest.raises(ConfigError, match=field):
        check_succession(examine(one), forged)


def test_a_history_that_does_not_add_up_is_no_roster(one: Roster, two: Roster) -> None:
    for history, version in (((), 2), (two.history, 3), (two.history, 1)):
        with pytest.raises(ConfigError, match="the history has"):
            replace(two, history=history, version=version)
    late = replace(two.history[0], steps=5)
    with pytest.raises(ConfigError, match="stated is step 5"):
        replace(two, history=(late,))
    with pytest.raises(ConfigError, match="is missing"):
        Roster.parse(one.text().replace("version = 1", "version = 2"))
    with pytest.raises(ConfigError, match="unknown field"):
        Roster.parse(two.text().replace("version = 2", "version = 1"))


def test_the_commands_show_what_changes(tmp_path: Path) -> None:
    one = first_version(tmp_path, "abc")
    results_folder(request_of(tmp_path, "a", "v1.toml"))
    out = tmp_path / "v2.toml"
    words = ("federation", "amend", tmp_path / "v1.toml", "--at-round", "4", "--out", out)
    said = run(*words, "--leave", "b", "--set", "algorithm.learning_rate=0.5").stdout
    assert "settings.algorithm.learning_rate: 1.0 / 0.5" in said and "versions" in said
    with pytest.raises(ConfigError, match="it exists already"):
        run(*words)
    shown = run("federation", "show", out).stdout
    assert "left" in shown and one.words.split()[0] in shown
    told = run("party", "approve", out, "--folder", tmp_path / "a", "--yes").stdout
    assert "fields change from version 1" in told and "spent by then" in told
    assert "settings.algorithm.learning_rate: 1.0 / 0.5" in told
    # c has no copy of version 1 to hold it against; b is not in it.
    with pytest.raises(ConfigError, match="its run of it is not in") as caught:
        run("party", "approve", out, "--folder", tmp_path / "c", "--yes")
    text = str(caught.value)
    assert text.index("not begun here yet") < text.index("restore that") < text.index("--rejoin c")
    assert "books every step" in text
    with pytest.raises(ConfigError, match=r"b is not on the roster.*leaves at round 4.*without"):
        run("party", "approve", out, "--folder", tmp_path / "b", "--yes")


def test_all_versions_have_one_results_folder(tmp_path: Path) -> None:
    one = first_version(tmp_path, "abc")
    place = results_folder(request_of(tmp_path, "c", "v1.toml"))
    two = next_version(tmp_path, one, Amendment(4, leave=("b",)))
    request = request_of(tmp_path, "c", "v2.toml")
    prepare_party(request)
    later = results_folder(request)
    assert (later.path, later.run_id) == (place.path, place.run_id)
    # c was node 2 and is node 1: its ledger keeps its name.
    assert later.ledger_nodes([1]) == (2,)
    assert home_of(later.path, two) == place.path / "version-2"
    # Another version 2, with nothing released under the first one, takes its place.
    other = amend(one, Amendment(6, leave=("b",))).roster
    write(tmp_path, other, name="other.toml")
    results_folder(request_of(tmp_path, "c", "other.toml"))
    assert Roster.load(place.path / "version-2" / "federation.toml") == other
    # Without the folder of the first version nothing begins anew, but for who is said to be so.
    moved = place.path.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is gone, and with it the ledger"):
        results_folder(request)
    assert results_folder(replace(request, out=moved)).path == moved
    write(tmp_path, two, name="again.toml")
    with pytest.raises(ConfigError, match=r"without its ledger nobody knows .* --rejoin a"):
        prepare_party(replace(request_of(tmp_path, "a", "v2.toml"), party=party(tmp_path, "a")))


@pytest.mark.parametrize("later", ["2", "all"])
def test_a_promise_against_more_colluders_is_not_made_afterwards(
    tmp_path: Path, later: str
) -> None:
    """What the first version released does not keep it."""
    plan = PLAN.replace("[privacy]", "[privacy]\nmax_colluders = 1")
    one = first_version(tmp_path, "abcd", plan=plan)
    with pytest.raises(ConfigError, match=r"privacy\.max_colluders is the same in all versions"):
        amend(one, Amendment(4, settings=(f"privacy.max_colluders={later}",)))
    two = amend(one, Amendment(4)).roster
    other = change_config(two.config, {"privacy.max_colluders": 2 if later == "2" else "all"})
    with pytest.raises(ConfigError, match=r"privacy\.max_colluders"):
        check_succession(examine(one), replace(two, config=other))


def test_a_release_that_was_under_way_between_versions_is_no_understatement(tmp_path: Path) -> None:
    """Two steps of the second version were released at the price of the first, which is higher."""
    one = first_version(tmp_path, "abc")
    two = amend(one, Amendment(4, settings=("algorithm.steps=40",))).roster
    three = amend(two, Amendment(8, settings=("algorithm.learning_rate=0.5",))).roster
    old, new = (chapter.releases[0] for chapter in three.history)
    assert old.noise_multiplier < new.noise_multiplier
    folder = results_folder(request_of(tmp_path, "a", "v1.toml"))
    book = LedgerBook(folder.path / "ledger", [0], folder.run_id, deltas=[1e-3], events=[old])
    for step in range(8):
        book.record(step, 0, {0: old if step < 6 else new})
    book.close()
    check_own_history(folder.path, three, "a")
    # One more release than steps, or one of a price that nobody stated, is another matter.
    book = LedgerBook(folder.path / "ledger", [0], folder.run_id, deltas=[1e-3], events=[old])
    book.record(0, 1, {0: old})
    book.close()
    with pytest.raises(ConfigError, match="The history is understated"):
        check_own_history(folder.path, three, "a")


@pytest.mark.parametrize(
    ("name", "ahead", "lag"), [("a", 1, 0), ("c", 2, 0), ("a", 2, 1), ("c", 4, 1)]
)
def test_a_round_that_a_restored_party_may_have_passed_is_refused(
    tmp_path: Path, name: str, ahead: int, lag: int
) -> None:
    """b may have sent frames that only somebody who is gone holds: they are paid for, too."""
    plan = f"{PLAN}\n[network]\nmax_lag = {lag}\n"
    one = first_version(tmp_path, "abc", plan=plan)  # a -> b -> c -> a
    two = next_version(tmp_path, one, Amendment(5, rejoin=("b",)))
    prepared = prepare_party(request_of(tmp_path, name, "v1.toml"))
    request = replace(prepared.request, until=two, cut=True)
    prepared = replace(prepared, request=request)
    with closing(open_network(prepared, results_folder(request).path)) as network:
        for round_ in range(5 - ahead):
            network._journal.release(round_, bytes(prepared.rounds.size_of_frame(round_)))
        refuse_later_frames(network, prepared.rounds)
        frame = bytes(prepared.rounds.size_of_frame(5 - ahead))
        network._journal.release(5 - ahead, frame)
        with pytest.raises(ConfigError, match=r"b may have sent .* 6 rounds .* --at-round 6 or"):
            refuse_later_frames(network, prepared.rounds)
