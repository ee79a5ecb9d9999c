"""Consent: a party's signed word that it takes part in exactly this roster.

It is kept beside the party's keys, one file per fingerprint. Without it nothing runs; a roster that
differs in one field has another fingerprint and needs another consent. Deleting the file takes the
consent back for every later start.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.errors import ConfigError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.differences import Difference
from dpcsgp.federation.files import Fields, parse_table, read_text, toml_lines
from dpcsgp.federation.identity import is_signed, sign
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.records.files import write_atomically

FORMAT: Final = 1
_LARGEST: Final = 4 * 1024  # bytes
_TIME: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@final
@dataclass(frozen=True)
class Consent:
    """What a party agreed to, and when (UTC)."""

    fingerprint: str
    federation: str
    version: int
    promise: Promise
    time: str

    def content(self) -> dict[str, Any]:
        """Return the fields that are signed, as plain values."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "federation": self.federation,
            "version": self.version,
            **vars(self.promise),
            "time": self.time,
        }


def approve(folder: PartyFolder, roster: Roster) -> Consent:
    """Record that this party takes part in this roster.

    Raises:
        ConfigError: the roster has expired, or its card of this party is not the party's own.
    """
    check_own_card(folder, roster)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    consent = Consent(roster.fingerprint, roster.id, roster.version, folder.card.promised, now)
    content = consent.content()
    signature = sign(folder.key(), "consent", content)
    lines = [*toml_lines(content), f'signature = "{signature}"']
    folder.consents.mkdir(mode=0o700, exist_ok=True)
    write_atomically(_file(folder, roster.fingerprint), "\n".join([*lines, ""]).encode())
    return consent


def require_consent(folder: PartyFolder, roster: Roster) -> Consent:
    """Return this party's consent to exactly this roster.

    Raises:
        ConfigError: there is none, it was changed, or the roster has expired or holds another
            card of this party.
    """
    check_own_card(folder, roster)
    path = _file(folder, roster.fingerprint)
    if not path.exists():
        raise ConfigError(
            f"{folder.name} has not approved this roster ({roster.words}); look at it and approve "
            "it with `dpcsgp party approve`"
        )
    consent = _read(folder, path)
    if consent.fingerprint != roster.fingerprint:
        raise ConfigError(f"consent {path} is for another roster; approve this one anew")
    return consent


def given_consents(folder: PartyFolder) -> list[Consent]:
    """Return all consents of a party, the oldest first."""
    found = [_read(folder, path) for path in folder.consents.glob("*.toml")]
    return sorted(found, key=lambda consent: consent.time)


def check_own_card(folder: PartyFolder, roster: Roster) -> None:
    """Refuse a roster that is over, or that holds another card than the party's own."""
    if roster.expired():
        raise ConfigError(
            f"roster {roster.id}: it ended on {roster.ends}; have a new one made with a later end"
        )
    names = [card.name for card in roster.parties]
    if folder.name not in names and roster.history and folder.name in roster.history[-1].parties:
        raise ConfigError(
            f"{folder.name} is not on the roster; on it are {', '.join(names)}. It leaves at round "
            f"{roster.history[-1].rounds}: run this version (`dpcsgp party run`) without "
            "approving it"
        )
    mine = folder.card.content()
    theirs = roster.parties[roster.node_of(folder.name)].content()
    for field in {**mine, **theirs}:
        if mine.get(field) != theirs.get(field):
            raise ConfigError(
                f"the card of {folder.name} in the roster is not the one in {folder.path}: "
                f"{Difference(field, theirs.get(field), mine.get(field))} (roster / own); have "
                "the roster made with the own card"
            )


def _file(folder: PartyFolder, fingerprint: str) -> Path:
    return folder.consents / f"{fingerprint}.toml"


def _read(folder: PartyFolder, path: Path) -> Consent:
    """Read a consent, and refuse one that this party did not sign."""
    where = f"consent {path}"
    fields = Fields(parse_table(read_text(path, "consent", _LARGEST), where), where)
    fields.format(FORMAT)
    consent = Consent(
        fields.text("fingerprint", "[0-9a-f]{64}", "64 hexadecimal digits"),
        fields.text("federation", "[0-9a-f]{16}", "16 hexadecimal digits"),
        fields.whole("version", 1, 2**31),
        Promise.take(fields),
        fields.text("time", _TIME, "a time such as 2030-12-31T12:00:00Z"),
    )
    signature = fields.text("signature", "([0-9a-f]{2}){8,80}", "hexadecimal digits")
    fields.end()
    if not is_signed(folder.card.certificate, "consent", consent.content(), signature):
        raise ConfigError(
            f"{where} was not signed by {folder.name}, or changed afterwards; delete it and "
            "approve again"
        )
    return consent
