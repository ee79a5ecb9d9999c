"""Who contributed to a party's model, in which rounds: what can be told from its own place.

In step, the message of round t of a party at distance d is in this party's model after round
t + d - 1; with `network.max_lag` = k every edge may add k rounds, until polish rounds, which are in
step, have brought it. A version that another one follows ends without them: what those that are
heard directly have sent is taken first, unless nobody waits. Whether a message carried a new
gradient is told only where `network.late_gradients` is "skip": there every message says how many
its sender has put in.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        gradients: how many it has put in, by its own word; None: it is not heard directly, or
            gradients are never late.
    """

    party: str
    node: int
    distance: int
    first_round: int
    last_round: int
    rounds: int
    gradients: int | None = None

    @property
    def text(self) -> str:
        """The rounds in words."""
        if self.last_round < 0:
            return "none"
        text = f"{self.first_round} to {self.last_round} of {self.rounds}"
        return text if self.gradients is None else f"{text}, {self.gradients} gradients"


def contributions(
    roster: Roster,
    node: int,
    done: int,
    planned: int,
    first: int = 0,
    gradients: Mapping[int, int] | None = None,
    polished: bool = True,
    settled: bool = True,
) -> list[Contribution]:
    """Return everybody's part in the model of a node that has made `done` rounds of `planned`.

    Args:
        roster: what all agreed on.
        node: whose model it is.
        done: rounds that are made.
        planned: rounds of the plan.
        first: the round with which this version of the roster began.
        gradients: how many gradients some nodes have put in, as far as they have said so here.
        polished: whether the last rounds of the plan are polish rounds.
        settled: whether everything that was sent to this node is taken at the end.
    """
    distance, heard = distances(roster.topology, node), gradients or {}
    settings = roster.config
    # With lag an edge may be late; that ends once so many polish rounds are over.
    polishing = settings.algorithm.polish_rounds if polished else 0
    in_step = done == planned and polishing >= max(distance.values()) - 1
    per_edge = 1 if in_step and settled else 1 + settings.network.max_lag
    return [
        Contribution(
            card.name,
            other,
            away,
            first,
            _last_round(away, done, done == planned and settled, per_edge, first),
            planned,
            heard.get(other),
        )
        for other, card in enumerate(roster.parties)
        for away in [distance[other]]
    ]


def _last_round(away: int, done: int, ended: bool, per_edge: int, first: int) -> int:
    """Return the last round of a node so far away whose message is in the model; -1: none."""
    last = done - 1 if away <= 1 and ended else done - max(away, 1) * per_edge
    return last if last >= first else -1


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
