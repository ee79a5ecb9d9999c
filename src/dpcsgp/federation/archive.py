"""Earlier versions of a roster that still answer: late is not lost, across versions too.

A party that has made all rounds of a version goes on with the next one. Others may still lack its
frames of the old one, or wait for its word that theirs have arrived: both come from the journal of
that version, which stays open beside the present one. No round is added to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

from dpcsgp.errors import JournalError
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.peers import Neighbours, Peer, Self, StatusBoard
from dpcsgp.federation.transport_ends import Desk, Timing
from dpcsgp.graphs import Topology

_LOG = logging.getLogger(__name__)


class Ended(NamedTuple):
    """Why a version of a roster ends before its plan, and how many frames it has."""

    text: str
    frames: int


@final
@dataclass(frozen=True)
class Archive:
    """A version of a roster whose rounds are all made here.

    Attributes:
        node: this party's node in it.
        peers: all its parties.
        topology: its graph.
        roster_digest: its digest.
        folder: its journal.
        size_of_round: the size of its frames by round; 0 from the round on where it ended.
        ended: where it ended, and what to say to those who want more rounds of it.
        notices: everybody's starts in it, if its parties shared noise.
    """

    node: int
    peers: Sequence[Peer]
    topology: Topology
    roster_digest: bytes
    folder: Path
    size_of_round: Callable[[int], int]
    ended: Ended
    notices: NoticeBoard | None = None

    def open(self, own: Self, timing: Timing) -> Desk:
        """Open its journal, and return what its lines share; close the journal afterwards."""
        neighbours = Neighbours.of(replace(own, node=self.node), self.peers, self.topology)
        journal = Journal(
            self.folder,
            self.roster_digest,
            self.node,
            neighbours.senders,
            neighbours.receivers.values(),
            self.ended.frames,
        )
        return Desk(
            self.node,
            self.roster_digest,
            neighbours,
            journal,
            StatusBoard(peer.node for peer in neighbours.all()),
            self.size_of_round,
            window=self.topology.num_nodes,
            fail=_note,
            timing=timing,
            notices=self.notices,
            ended=self.ended.text,
        )


def _note(error: JournalError) -> None:
    """Nothing is released in a version that has ended: the present one goes on."""
    _LOG.warning("an earlier version of the roster: %s", error)
