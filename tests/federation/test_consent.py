"""Consent is a party's own word for exactly one roster; without it nothing may run."""

from __future__ import annotations

import datetime
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parties import cards_of, make_parties, plan_of

from dpcsgp.config import change_config
from dpcsgp.errors import ConfigError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve, given_consents, require_consent
from dpcsgp.federation.founding import found
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster


@pytest.fixture
def parties(tmp_path: Path) -> list[PartyFolder]:
    return make_parties(tmp_path)


@pytest.fixture
def roster(tmp_path: Path, parties: list[PartyFolder]) -> Roster:
    return found(plan_of(tmp_path), cards_of(parties)).roster


def consent_file(party: PartyFolder) -> Path:
    (path,) = party.consents.glob("*.toml")
    return path


def test_without_consent_nothing_runs_and_with_it_it_does(
    parties: list[PartyFolder], roster: Roster
) -> None:
    with pytest.raises(ConfigError, match="lab-a has not approved this roster"):
        require_consent(parties[0], roster)
    made = approve(parties[0], roster)
    assert require_consent(PartyFolder.open(parties[0].path), roster) == made
    assert given_consents(parties[0]) == [made]
    with pytest.raises(ConfigError, match="lab-b has not approved"):
        require_consent(parties[1], roster)


def test_consent_holds_for_exactly_one_roster(parties: list[PartyFolder], roster: Roster) -> None:
    approve(parties[0], roster)
    others = [
        replace(roster, id="0" * 16),
        replace(roster, ends=roster.ends + datetime.timedelta(days=1)),
        replace(roster, config=change_config(roster.config, {"algorithm.steps": 6})),
    ]
    for other in others:
        with pytest.raises(ConfigError, match="has not approved"):
            require_consent(parties[0], other)
        # A consent that is renamed to fit another roster is found out.
        shutil.copy(consent_file(parties[0]), parties[0].consents / f"{other.fingerprint}.toml")
        with pytest.raises(ConfigError, match="for another roster"):
            require_consent(parties[0], other)
        (parties[0].consents / f"{other.fingerprint}.toml").unlink()


def test_consent_of_another_party_does_not_count(
    parties: list[PartyFolder], roster: Roster
) -> None:
    approve(parties[0], roster)
    shutil.copy(consent_file(parties[0]), parties[1].consents)
    with pytest.raises(ConfigError, match="was not signed by lab-b"):
        require_consent(parties[1], roster)


def test_a_roster_with_another_card_names_the_field(
    parties: list[PartyFolder], roster: Roster
) -> None:
    changed = parties[0].promise(Promise(90, 1.0, 1e-3))
    for act in (approve, require_consent):
        with pytest.raises(ConfigError, match=r"epsilon: 2\.0 / 1\.0 \(roster / own\)"):
            act(changed, roster)


def test_an_impostor_of_the_same_name_is_named_by_its_certificate(
    tmp_path: Path, roster: Roster
) -> None:
    (impostor,) = make_parties(tmp_path / "elsewhere", names="a")
    with pytest.raises(ConfigError, match=r"noise_key|certificate"):
        approve(impostor, roster)
    (stranger,) = make_parties(tmp_path / "elsewhere", names="z")
    with pytest.raises(ConfigError, match="lab-z is not on the roster"):
        approve(stranger, roster)


def test_an_expired_roster_is_neither_approved_nor_run(
    parties: list[PartyFolder], roster: Roster
) -> None:
    over = replace(roster, ends=datetime.date(2020, 1, 1))
    for act in (approve, require_consent):
        with pytest.raises(ConfigError, match="ended on 2020-01-01"):
            act(parties[0], over)


@pytest.fixture(scope="module")
def approved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PartyFolder, Roster, str]:
    root = tmp_path_factory.mktemp("approved")
    parties = make_parties(root)
    roster = found(plan_of(root), cards_of(parties)).roster
    approve(parties[0], roster)
    return parties[0], roster, consent_file(parties[0]).read_text()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_consent_is_no_consent(
    approved: tuple[PartyFolder, Roster, str], data: st.DataObject
) -> None:
    party, roster, text = approved
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = text[:start] + data.draw(st.text(max_size=10)) + text[end:]
    consent_file(party).write_bytes(damaged.encode("utf-8", "surrogatepass"))
    try:
        consent = require_consent(party, roster)
    except ConfigError:
        return
    finally:
        consent_file(party).write_text(text)
    assert consent == require_consent(party, roster)
