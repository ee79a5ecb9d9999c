"""Notices: what a party tells all others at every start, so that every pair can agree on a key.

A notice holds a fresh public key and a nonce (see `privacy.pair_keys`) and the step from which on
they count. It is signed with the key of the party's certificate, so whoever passes it on can
neither change it nor make one up, and it names the roster, so it is of no use in another one. It
travels along the lines between neighbours, from one to the next, until everybody has it.

`start` counts a party's starts under one roster. The first notice counts from step 0 on: nobody
draws noise before it has heard everybody's first. A later one counts from the step on that others
reach only after they have heard it (`known_everywhere_from`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from dpcsgp.errors import WireError
from dpcsgp.federation.contributions import distances
from dpcsgp.federation.identity import is_signed, sign
from dpcsgp.federation.roster import Roster
from dpcsgp.graphs import Topology
from dpcsgp.privacy.pair_keys import PublicHalf

MOST_NOTICE: Final = 1024  # bytes
_PURPOSE: Final = "notice of a start"
_MOST_STARTS: Final = 2**48
_MOST_STEPS: Final = 2**48
_SIGNATURE: Final = re.compile("[0-9a-f]{16,160}")
_FIELDS: Final = {"roster", "node", "start", "valid_from", "half", "seeded", "signature"}


@final
@dataclass(frozen=True)
class Notice:
    """One start of one party.

    Attributes:
        node: the party's node.
        start: number of the start, from 1 on.
        valid_from: first step in which others use it.
        half: fresh public key and nonce.
        seeded: the party's secrets come from a seed: it plays, and hides nothing.
        signature: of the party, hexadecimal.
    """

    node: int
    start: int
    valid_from: int
    half: PublicHalf
    seeded: bool
    signature: str

    def says(self) -> tuple[Any, ...]:
        """Return what is told; one text can have several valid signatures."""
        return (self.node, self.start, self.valid_from, self.half, self.seeded)

    def content(self, roster: Roster) -> dict[str, Any]:
        """Return the fields that are signed, as plain values."""
        return {
            "roster": roster.fingerprint,
            "node": self.node,
            "start": self.start,
            "valid_from": self.valid_from,
            "half": self.half.as_json(),
            "seeded": self.seeded,
        }

    def text(self, roster: Roster) -> bytes:
        """Return the notice as it travels."""
        return json.dumps({**self.content(roster), "signature": self.signature}).encode()


def signed_notice(
    key: ec.EllipticCurvePrivateKey,
    roster: Roster,
    node: int,
    start: int,
    valid_from: int,
    half: PublicHalf,
    seeded: bool,
) -> Notice:
    """Return a notice of the party that owns this key."""
    draft = Notice(node, start, valid_from, half, seeded, "")
    signature = sign(key, _PURPOSE, draft.content(roster))
    return Notice(node, start, valid_from, half, seeded, signature)


def read_notice(body: bytes, roster: Roster) -> Notice:
    """Return a notice that came over the network; its form alone is checked.

    Raises:
        WireError: it is none, or of another roster.
    """
    try:
        found: Any = json.loads(body) if len(body) <= MOST_NOTICE else None
        if not isinstance(found, dict) or found.keys() != _FIELDS:
            raise ValueError
        node = _whole(found["node"], 0, len(roster.parties) - 1)
        notice = Notice(
            node,
            _whole(found["start"], 1, _MOST_STARTS),
            _whole(found["valid_from"], 0, _MOST_STEPS),
            PublicHalf.from_json(node, found["half"]),
            found["seeded"],
            found["signature"],
        )
        if type(notice.seeded) is not bool or not _SIGNATURE.fullmatch(notice.signature):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise WireError("a notice cannot be read: another release?") from None
    if found["roster"] != roster.fingerprint:
        raise WireError(f"a notice of node {node} is of another roster")
    return notice


def check_notice(notice: Notice, roster: Roster) -> None:
    """Refuse a notice that its party did not sign, or whose key everybody would know.

    Raises:
        WireError: says which; whoever passed it on should have refused it too.
    """
    card = roster.parties[notice.node]
    if not is_signed(card.certificate, _PURPOSE, notice.content(roster), notice.signature):
        raise WireError(f"a notice in the name of {card.name} is not signed by it")
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(notice.half.public))
    except ValueError:
        raise WireError(f"a notice of {card.name} holds a key that gives no secret") from None


def known_everywhere_from(
    topology: Topology, node: int, first_step: int, gossip_every: int, max_lag: int = 0
) -> int:
    """Return the first step that nobody makes before it has heard a notice of this node.

    The notice goes before the first message that is made after it, in round first_step //
    gossip_every. A party d edges away then has it before the step that follows d rounds later. With
    a lag every edge may take so many rounds more, and the last step one: it comes before its round
    waits for what is late.

    Args:
        topology: the graph.
        node: who gives the notice.
        first_step: the first step that it makes after it.
        gossip_every: gradient steps per round.
        max_lag: by how many rounds senders may be behind.
    """
    farthest = max(distances(topology, other)[node] for other in range(topology.num_nodes))
    rounds = farthest * (1 + max_lag) + (max_lag > 0)
    return (first_step // gossip_every + rounds) * gossip_every


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError
    return value
