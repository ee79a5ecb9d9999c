"""Who contributed to a party's model, in which rounds: what can be told from its own place.

In step, the message of round t of a party at distance d is in this party's model after round
t + d - 1. Whether a message carried a new gradient is its sender's secret and not told here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpcsgp.federation.roster import Roster
from dpcsgp.graphs import Topology


@final
@dataclass(frozen=True)
class Contribution:
    """One party's part in the model of another.

    Attributes:
        party: its name.
        node: its node.
        distance: edges from it to here; 0: this party itself.
        first_round: of its messages that this model has heard, directly or through others.
        last_round: the last of them; -1: none.
        rounds: how many the plan has.
    """

    party: str
    node: int
    distance: int
    first_round: int
    last_round: int
    rounds: int

    @property
    def text(self) -> str:
        """The rounds in words."""
        if self.last_round < 0:
            return "none"
        return f"{self.first_round} to {self.last_round} of {self.rounds}"


def contributions(
    roster: Roster, node: int, done: int, planned: int, first: int = 0
) -> list[Contribution]:
    """Return everybody's part in the model of a node that has made `done` rounds of `planned`.

    `first` is the round with which this version of the roster began.
    """
    distance = distances(roster.topology, node)
    heard = {other: done - max(away, 1) for other, away in distance.items()}
    return [
        Contribution(
            card.name,
            other,
            distance[other],
            first,
            heard[other] if heard[other] >= first else -1,
            planned,
        )
        for other, card in enumerate(roster.parties)
    ]


def distances(topology: Topology, node: int) -> dict[int, int]:
    """Return the number of edges from every node to this one."""
    found, edge_of_known = {node: 0}, [node]
    while edge_of_known:
        nearer = {
            sender: found[known] + 1
            for known in edge_of_known
            for sender in topology.senders_to(known)
            if sender not in found
        }
        found |= nearer
        edge_of_known = list(nearer)
    return found
