"""Which connections a roster needs: what IT has to open, and nothing else.

Either end of an edge may dial, so the direction of a connection is not that of the messages. It
follows from who can be reached: the same rule as in `peers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpcsgp.federation.party_run import peers_of
from dpcsgp.federation.peers import Method, Neighbours, Self
from dpcsgp.federation.roster import Roster


@final
@dataclass(frozen=True)
class Connection:
    """One connection that a firewall has to let through: TCP, kept open for the whole run.

    Attributes:
        caller: party that opens it.
        called: party that accepts it.
        host: where it is called.
        port: the port there.
        carries: "sends", "fetches" or both: what the caller uses it for.
    """

    caller: str
    called: str
    host: str
    port: int
    carries: str


def connections(roster: Roster) -> list[Connection]:
    """Return every connection of a roster once, by caller and called party."""
    words = {Method.PUSH: "sends", Method.FETCH: "fetches"}
    found: dict[tuple[int, int], list[str]] = {}
    for node, card in enumerate(roster.parties):
        own = Self(node, card.name, b"", card.certificate_pem.encode(), card.address)
        calls = Neighbours.of(own, peers_of(roster), roster.topology).calls()
        for peer, method in calls:
            found.setdefault((node, peer.node), []).append(words[method])
    return [
        _connection(roster, caller, called, " and ".join(sorted(uses, reverse=True)))
        for (caller, called), uses in sorted(found.items())
    ]


def _connection(roster: Roster, caller: int, called: int, carries: str) -> Connection:
    address = roster.parties[called].address
    assert address is not None  # nobody dials a party that cannot be reached
    host, _, port = address.rpartition(":")
    names = roster.parties[caller].name, roster.parties[called].name
    return Connection(*names, host, int(port), carries)
