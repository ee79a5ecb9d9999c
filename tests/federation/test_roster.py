"""A roster holds what all agreed on: what cannot work is refused, and no change goes unnoticed."""

from __future__ import annotations

import datetime
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parties import PLAN, PROMISE, cards_of, federation, make_parties, plan_of

from dpcsgp.config import change_config, make_config
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.federation import identity
from dpcsgp.federation.agreement import Agreement, examine
from dpcsgp.federation.cards import Card, Promise, signed_card
from dpcsgp.federation.differences import differences
from dpcsgp.federation.files import toml_lines, toml_value
from dpcsgp.federation.founding import found
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.runs.design import build_topology, design_run
from dpcsgp.runs.facts import declared_facts

DIGITS = '[task]\nname = "digits"\nmodel = "mlp:8"\n[algorithm]\nsteps = 3\n'


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Agreement:
    """Three labs on a ring, one of which only calls out."""
    return federation(tmp_path_factory.mktemp("agreed"), closed="c")


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> list[PartyFolder]:
    """Four labs; c and d only call out."""
    return make_parties(tmp_path_factory.mktemp("parties"), closed="cd", names="abcd")


def changed(plan: str, **values: Any) -> str:
    """Return the plan with keys added to sections: section__key=value."""
    sections = tomllib.loads(plan)
    for name, value in values.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    lines = (line for name, table in sections.items() for line in (f"[{name}]", *toml_lines(table)))
    return "\n".join(lines)


def test_a_roster_reads_back_as_it_was_written(agreed: Agreement) -> None:
    text = agreed.roster.text()
    again = Roster.parse(text)
    assert again == agreed.roster
    assert again.text() == text
    assert again.fingerprint == agreed.roster.fingerprint
    assert again.topology == agreed.design.topology
    assert examine(again).answer() == agreed.answer()


def test_the_budgets_are_those_of_the_cards_and_pay_for_all_steps(agreed: Agreement) -> None:
    config = agreed.roster.config
    assert config.privacy.epsilon == [2.0] * 3 and config.privacy.delta == [1e-3] * 3
    assert agreed.design.mechanism.num_examples == (90,) * 3
    for cost in agreed.costs:
        assert 0.99 * cost.epsilon < cost.epsilon_of_plan <= cost.epsilon
    assert agreed.costs[0].heard_by == ("lab-b",) and agreed.costs[0].hears == ("lab-c",)
    assert agreed.costs[0].bytes_sent == agreed.bytes_per_edge > 0


@pytest.mark.parametrize(
    "graph", ["directed_exponential", "directed_ring", "undirected_ring", "complete", "star"]
)
@pytest.mark.parametrize("method", ["dp-csgp", "dp2sgd"])
def test_listed_edges_give_the_weights_of_the_named_graph(
    graph: str, method: str, tmp_path: Path
) -> None:
    plan = changed(PLAN, graph__name=graph, algorithm__name=method)
    roster = found(plan_of(tmp_path, plan), cards_of(make_parties(tmp_path, names="abcde"))).roster
    assert roster.topology == build_topology(roster.config)


def test_a_built_in_task_starts_from_the_model_of_an_ordinary_run(tmp_path: Path) -> None:
    agreement = found(plan_of(tmp_path, DIGITS), cards_of(make_parties(tmp_path)))
    config = make_config(
        {
            "task": {"name": "digits", "model": "mlp:8"},
            "algorithm": {"steps": 3},
            "graph": {"num_nodes": 3},
            "privacy": {"epsilon": [2.0] * 3, "delta": [1e-3] * 3},
        }
    )
    assert agreement.roster.config == config
    ordinary = design_run(config, declared_facts(config, 90))
    assert agreement.design.anchor_D.equal(ordinary.anchor_D)
    assert agreement.design.mechanism == ordinary.mechanism
    assert agreement.bytes_per_edge == ordinary.bytes_per_edge()


def test_nothing_of_a_machine_enters_the_roster(tmp_path: Path) -> None:
    (tmp_path / "secret-name.txt").write_text("0 1\n1 2\n2 0\n")
    plan = changed(
        PLAN,
        graph__name="edges",
        graph__edges_file=str(tmp_path / "secret-name.txt"),
        network__key_file="/keys/private",
        run__device="cuda:7",
    )
    roster = found(plan_of(tmp_path, plan), cards_of(make_parties(tmp_path))).roster
    for word in ("secret-name", "/keys", "cuda", str(tmp_path)):
        assert word not in roster.text()
    (tmp_path / "secret-name.txt").unlink()
    assert Roster.parse(roster.text()) == roster


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"graph__num_nodes": 5}, r"graph.num_nodes = 5: there are 3 cards"),
        ({"privacy__seed": 3}, r"privacy.seed: whoever knows"),
        ({"algorithm__name": "local"}, "nothing is sent"),
        ({"algorithm__name": "antigravity:GO"}, "package's own methods only"),
        ({"privacy__noise": "none"}, r"party lab-a: .* costs inf"),
        ({"privacy__noise": "paper"}, r"party lab-a: its card promises eps 2"),
        ({"privacy__noise": "paper", "privacy__c2": 1e300}, r"privacy.c2 = 1e\+300: expected"),
        ({"privacy__expected_batch_size": [30, 30, 91]}, "party lab-c: .*91"),
        ({"privacy__expected_batch_size": [30, 30]}, "2 values"),
        ({"task__features": "hog:8"}, "task.features"),
        ({"task__name": "digits"}, r"\[data\]"),
        ({"task__model": "mlp:99999999"}, "choose a smaller model"),
        ({"task__model": "mlp:" + "9" * 40}, "choose a smaller model"),
        ({"data__num_classes": 1}, "num_classes = 1"),
        ({"data__input_shape": []}, "input_shape"),
        ({"algorithm__stepz": 3}, "did you mean 'steps'"),
        ({"graph__name": "rong"}, "graph.name = 'rong'"),
    ],
)
def test_plans_that_cannot_work_are_refused(
    values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    cards = cards_of(make_parties(tmp_path))
    with pytest.raises(ConfigError, match=problem):
        found(plan_of(tmp_path, changed(PLAN, **values)), cards)


def test_gossip_that_would_diverge_is_refused(tmp_path: Path) -> None:
    plan = changed(PLAN, compression__spec="rand:0.1", algorithm__mixing_rate=1.0)
    with pytest.raises(UnstableError) as caught:
        found(plan_of(tmp_path, plan), cards_of(make_parties(tmp_path)))
    assert "--allow-divergence" not in str(caught.value)


@pytest.mark.parametrize("promise", [Promise(90, 1e-9, 1e-12), Promise(90, 1e6, 1e-3)])
def test_a_promise_that_no_noise_keeps_or_that_protects_nobody_names_its_party(
    tmp_path: Path, promise: Promise
) -> None:
    *others, last = make_parties(tmp_path)
    with pytest.raises(ConfigError, match=r"party lab-c: .*epsilon"):
        found(plan_of(tmp_path), cards_of([*others, last.promise(promise)]))


def test_an_edge_that_nobody_can_dial_is_refused_and_the_proposal_works(
    tmp_path: Path, parties: list[PartyFolder]
) -> None:
    """On the complete graph the two edges between c and d can be dropped."""
    plan = changed(PLAN, graph__name="complete")
    with pytest.raises(ConfigError) as caught:
        found(plan_of(tmp_path, plan), cards_of(parties))
    message = str(caught.value)
    assert "lab-c -> lab-d, lab-d -> lab-c." in message
    lines = re.findall(r"^\d+ \d+$", message, re.MULTILINE)
    assert len(lines) == 10
    (tmp_path / "edges.txt").write_text("\n".join(lines))
    path = str(tmp_path / "edges.txt")
    proposed = changed(PLAN, graph__name="edges", graph__edges_file=path)
    assert found(plan_of(tmp_path, proposed), cards_of(parties)).doctor.healthy


def test_where_edges_cannot_be_dropped_a_star_is_proposed_and_works(
    tmp_path: Path, parties: list[PartyFolder]
) -> None:
    a, b, c, d = parties
    # On the ring d sends to c. What is stated per party differs, and moves with it.
    cards = cards_of([d, c, b.promise(Promise(80, 3.0, 1e-4)), a])
    plan = changed(PLAN, privacy__expected_batch_size=[10, 20, 30, 40])
    with pytest.raises(ConfigError, match=r'"star" .* card of lab-b, who can be called, first'):
        found(plan_of(tmp_path, plan), cards)
    proposed = changed(PLAN, graph__name="star")
    order = [cards[2], cards[0], cards[1], cards[3]]
    assert found(plan_of(tmp_path, proposed), order).doctor.healthy


def test_no_roster_has_an_edge_that_nobody_can_dial(tmp_path: Path) -> None:
    """Whoever wrote the file: the check is the roster's own."""
    parties = make_parties(tmp_path)
    roster = found(plan_of(tmp_path), cards_of(parties)).roster
    closed = [
        signed_card(party.key(), party.name, party.certificate_pem, None, key, PROMISE)
        for party in parties[:2]
        for key in [party.card.noise_key]
    ]
    text = roster.text()
    for old, new in zip(roster.parties, closed, strict=False):
        text = text.replace("\n".join(old.lines()), "\n".join(new.lines()))
    with pytest.raises(ConfigError, match="edge lab-a -> lab-b: both only call out"):
        Roster.parse(text)


def test_parties_of_whom_none_can_be_called_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one needs an address"):
        federation(tmp_path, closed="abc")


def copied(card: Card, party: PartyFolder, **values: Any) -> Card:
    """A card that `party` signs with fields of another."""
    own = party.card
    fields = {
        "name": own.name, "certificate_pem": own.certificate_pem, "address": own.address,
        "noise_key": own.noise_key, "promise": own.promise,
    } | {key: getattr(card, key) for key in values}  # fmt: skip
    return signed_card(party.key(), **fields)


@pytest.mark.parametrize("field", ["address", "noise_key"])
def test_what_two_parties_share_is_refused(
    tmp_path: Path, parties: list[PartyFolder], field: str
) -> None:
    a, b = parties[:2]
    with pytest.raises(ConfigError, match=f"lab-a and lab-b have the same {field}"):
        found(plan_of(tmp_path), [a.card, copied(a.card, b, **{field: True})])


def test_a_card_given_twice_and_a_single_card_are_refused(
    tmp_path: Path, parties: list[PartyFolder]
) -> None:
    a = parties[0].card
    with pytest.raises(ConfigError, match="same name"):
        found(plan_of(tmp_path), [a, a])
    with pytest.raises(ConfigError, match="at least 2"):
        found(plan_of(tmp_path), [a])


def short_lived(party: PartyFolder, first: str, last: str) -> Card:
    """A card of the party whose certificate is valid between two days."""
    key = party.key()
    old = identity.new_certificate(key, party.name)
    begin, end = (datetime.datetime.fromisoformat(day) for day in (first, last))
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        old.serial_number,
        begin,
        end,
        list(old.extensions),
    )
    pem = identity.certificate_text(builder.sign(key, hashes.SHA256()))
    return signed_card(key, party.name, pem, None, party.card.noise_key, PROMISE)


@pytest.mark.parametrize("days", [("2020-01-01", "2021-01-01"), ("2098-01-01", "2099-01-01")])
def test_a_certificate_that_is_not_valid_all_the_time_is_refused(
    tmp_path: Path, parties: list[PartyFolder], days: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match=f"card of lab-b: its certificate is valid .* {days[1]}"):
        found(plan_of(tmp_path), [parties[0].card, short_lived(parties[1], *days)])


def test_end_dates_are_in_the_future_and_kept(tmp_path: Path, parties: list[PartyFolder]) -> None:
    cards, today = cards_of(parties[:2]), datetime.datetime.now(datetime.UTC).date()
    with pytest.raises(ConfigError, match="--ends"):
        found(plan_of(tmp_path), cards, today - datetime.timedelta(days=1))
    roster = found(plan_of(tmp_path), cards, today).roster
    assert not roster.expired(today)
    assert roster.expired(today + datetime.timedelta(days=1))


# What one changes in a roster: a pattern and what takes its place.
EDITS = {
    "unknown field": (r"\[data\]", "surprise = 1\n[data]"),
    "format = 2, this release reads format 1": (r"\Aformat = 1|\nformat = 1", "\nformat = 2"),
    "changed by hand": (r'  \["lab-b", "lab-c"\],', '  ["lab-b", "lab-a"],\n  ["lab-b", "lab-c"],'),
    "steps is missing": (r"steps = 5\n", ""),
    "unknown key|unknown field": (r"steps = 5", "steps = 5\nstepz = 6"),
    "algorithm.steps": (r"steps = 5", 'steps = "five"'),
    "own methods": (r'name = "dp-csgp"', 'name = "antigravity:GO"'),
    "own methods only": (r'name = "dp-csgp"', 'name = ["dp-csgp"]'),
    "signature does not fit": (r"epsilon = 2.0", "epsilon = 3.0"),
    "edges": (r'\["lab-a", "lab-b"\]', '["lab-a", "lab-z"]'),
    "ends": (r"ends = [0-9-]+", "ends = 2030-01-01T00:00:00"),
    "version": (r"version = 1", "version = true"),
    "initial_model": (r'initial_model = "..', 'initial_model = "'),
    "parties": (r"\[\[parties\]\](.|\n)*", "[parties]\n"),
    "clip_norm = inf: expected a number from": (r"clip_norm = 1.0", "clip_norm = inf"),
    "at most 1,000,000": (r"polish_rounds = 3", "polish_rounds = 1000000000"),
    "task.features": (r'features = "none"', 'features = "hog:8"'),
    "is damaged": (r"steps = 5", "steps = 5" + "0" * 5000),
}


@pytest.mark.parametrize("problem", EDITS)
def test_a_roster_that_was_changed_by_hand_is_refused(agreed: Agreement, problem: str) -> None:
    pattern, new = EDITS[problem]
    text = re.sub(pattern, lambda _: new, agreed.roster.text(), count=1)
    assert text != agreed.roster.text()
    with pytest.raises(ConfigError, match=problem):
        Roster.parse(text)


def test_a_built_in_task_has_its_own_shape(tmp_path: Path) -> None:
    roster = found(plan_of(tmp_path, DIGITS), cards_of(make_parties(tmp_path))).roster
    text = roster.text().replace("num_classes = 10", "num_classes = 11")
    with pytest.raises(ConfigError, match=r"is not the shape of task.name = 'digits'"):
        examine(Roster.parse(text))


def test_another_initial_model_is_found_by_everybody(agreed: Agreement) -> None:
    forged = replace(agreed.roster, initial_model="0" * 64)
    with pytest.raises(ConfigError, match="initial_model"):
        examine(Roster.parse(forged.text()))


@pytest.mark.parametrize(
    "text",
    [
        "a." * 900_000 + "a=1",
        "\n".join("a." * 9000 + f"a{line}=1" for line in range(100)),
        "a=" + "[" * 500_000,
        "a=1\n" * 2,
        "\x00",
        "",
        "[[parties]]\n" * 9,
    ],
)
def test_hostile_texts_are_refused_at_once(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError):
        Roster.parse(text)
    assert time.monotonic() - start < 5


def test_files_that_are_too_large_or_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"#\n" * 1_500_000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, problem in {
        "large": "more than 2,097,152 bytes", "binary": "is no text",
        "missing": "no such file", ".": "no such file",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"roster .*{problem}"):
            Roster.load(tmp_path / name)
    with pytest.raises(ConfigError, match="no such file"):
        Roster.load(Path("/dev/zero"))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_roster_is_an_error_or_has_another_fingerprint(
    agreed: Agreement, data: st.DataObject
) -> None:
    text = agreed.roster.text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 60)))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[end:]
    try:
        roster = Roster.parse(damaged)
    except ConfigError:
        return
    equal = roster.content() == agreed.roster.content()
    assert (roster.fingerprint == agreed.roster.fingerprint) == equal
    assert (not differences(roster, agreed.roster)) == equal


VALUES = st.one_of(
    st.none().map(lambda _: {}), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(),
    st.lists(st.integers(), max_size=2), st.dates(), st.just(10**400),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_wrong_types_anywhere_are_errors(agreed: Agreement, data: st.DataObject) -> None:
    """Any value in the place of any line's value: refused, or read as another roster."""
    lines = agreed.roster.text().splitlines()
    places = [n for n, line in enumerate(lines) if re.match(r"\w+ = [^\[]", line)]
    place, value = data.draw(st.sampled_from(places)), data.draw(VALUES)
    if isinstance(value, float) and not abs(value) < 1e308:
        text = "nan" if value != value else "inf"
    else:
        text = "{}" if isinstance(value, dict) else toml_value(value)
    lines[place] = f"{lines[place].split(' = ')[0]} = {text}"
    try:
        roster = Roster.parse("\n".join(lines))
    except ConfigError:
        return
    assert len(roster.fingerprint) == 64
    assert Roster.parse(roster.text()) == roster


def test_every_field_that_differs_is_named(agreed: Agreement, tmp_path: Path) -> None:
    one = agreed.roster
    assert differences(one, Roster.parse(one.text())) == ()
    config = change_config(one.config, {"algorithm.steps": 6, "run.seed": 1})
    later = replace(one, config=config, id="0" * 16, ends=one.ends + datetime.timedelta(days=1))
    found_fields = {each.field: (each.first, each.second) for each in differences(one, later)}
    assert found_fields == {
        "id": (one.id, "0" * 16),
        "ends": (one.ends.isoformat(), later.ends.isoformat()),
        "settings.algorithm.steps": (5, 6),
        "settings.run.seed": (0, 1),
    }
    assert later.fingerprint != one.fingerprint and later.words != one.words


def test_differences_name_parties_edges_and_order(agreed: Agreement, tmp_path: Path) -> None:
    one = agreed.roster
    other = federation(tmp_path, names="abd").roster
    fields = {each.field for each in differences(one, other)}
    assert {"id", "order of parties", "edge lab-b -> lab-c", "edge lab-b -> lab-d"} <= fields
    assert {"party lab-a, certificate", "party lab-c, name", "party lab-d, address"} <= fields
    assert "edge lab-a -> lab-b" not in fields and "party lab-a, epsilon" not in fields


def test_a_card_that_is_signed_again_says_the_same(tmp_path: Path) -> None:
    parties = make_parties(tmp_path)
    one = found(plan_of(tmp_path), cards_of(parties)).roster
    again = [party.promise(PROMISE) for party in parties]
    two = replace(one, parties=tuple(cards_of(again)))
    assert two.text() != one.text()
    assert two.fingerprint == one.fingerprint
    assert isinstance(parties[0].key(), ec.EllipticCurvePrivateKey)
