"""A network of one hosted node whose neighbours are other parties.

An exchange of round t journals the own frame, offers it to the receivers and waits for the senders'
frames of round t, without a limit unless one is set. Frames that are on disk already are not asked
for again: after a crash the rounds since the checkpoint are replayed from the journal.

Legend: N hosted nodes (here one), S senders heard, B bytes of a frame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpcsgp.errors import ConfigError, JournalError, WaitStoppedError
from dpcsgp.federation.archive import Archive, Ended
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.peers import (
    Neighbours,
    Peer,
    PeerStatus,
    Self,
    StatusBoard,
    missing_in_the_end,
)
from dpcsgp.federation.transport import Transport
from dpcsgp.federation.transport_ends import Desk, Timing
from dpcsgp.graphs import Topology
from dpcsgp.network.health import SilentPeerError
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic
from dpcsgp.runtime.memory import return_freed_memory

_GLANCE_SECONDS = 1.0  # between looks at patience and at a request to stop, while waiting
_FAREWELL_SECONDS = 10.0  # for receivers that may still ask whether their last word was heard
_ABSENT_SECONDS = 120.0  # without a sign of life of a sender that is to hear the last word
_COURTESY_SECONDS = 300.0  # in all, also for senders that speak and do not confirm it
_SAY_SECONDS = 60.0  # between log lines about one wait
_FAREWELL = (
    "this party's part is done; {} may not know that all messages have come, and is waited for a "
    "few minutes at most. Ctrl-C ends this now, and nothing is lost"
)
_LOG = logging.getLogger(__name__)


class PartyNetwork(Mixer):
    """The network as one party sees it. It is open from its construction to `close`.

    Args:
        own: this party.
        peers: the other parties of the roster.
        topology: the graph.
        roster_digest: digest of the roster; neighbours with another one are refused.
        folder: of the journal; one per roster, kept with the checkpoints.
        size_of_round: the public size of every frame of a round in bytes; 0: no such round.
        steps: the public number of gradient steps that the roster plans.
        patience: seconds without a sign of life after which a wait fails; None: wait for ever.
        timing: limits of a line.
        notices: everybody's starts, if parties share noise.
        archives: earlier versions of the roster, which still answer.
        over: what to say to those who have an older version of the roster, by its digest (hex).
        ended: where and why the rounds end before those of the plan, if they do.

    Raises:
        ConfigError: a neighbour is missing or cannot be reached by design, or the address to
            listen on cannot be used.
        JournalError: the journal is damaged, in use, or of another roster.
    """

    max_lag = 0  # rounds that this party may be ahead of those it hears

    def __init__(
        self,
        own: Self,
        peers: Iterable[Peer],
        topology: Topology,
        roster_digest: bytes,
        folder: Path,
        size_of_round: Callable[[int], int],
        steps: int,
        patience: float | None = None,
        timing: Timing = Timing(),
        notices: NoticeBoard | None = None,
        archives: Sequence[Archive] = (),
        over: Mapping[str, str] | None = None,
        ended: Ended | None = None,
    ) -> None:
        super().__init__(topology, [own.node])
        self.topology = topology
        self.key: bytes | None = None  # TLS vouches for every byte
        self.traffic = Traffic.of(topology, self.nodes)
        self._own, self._steps, self._patience = own, steps, patience
        self._size_of_round = size_of_round
        known = list(peers)
        self._neighbours = Neighbours.of(own, known, topology)
        self._status = StatusBoard(peer.node for peer in self._neighbours.all())
        self._failure: JournalError | None = None
        self._stopped = False
        self._opened = time.monotonic()
        self._waited, self._waiting_since = 0.0, 0.0  # seconds of all waits; 0: no wait now
        self.waiting_for: tuple[str, ...] = ()  # names of the parties that a wait is for
        self._journal = Journal(
            folder,
            roster_digest,
            own.node,
            self._neighbours.senders,
            self._neighbours.receivers.values(),
            None if ended is None else ended.frames,
        )
        for sender in self._neighbours.senders:
            self._status.reached(sender, received=self._journal.holding(sender).rounds)
        desk = Desk(
            own.node,
            roster_digest,
            self._neighbours,
            self._journal,
            self._status,
            size_of_round,
            # a frame needs ours of as many rounds ago as there are hops, each with its lag
            window=topology.num_nodes * (1 + self.max_lag),
            fail=self._fail,
            timing=timing,
            notices=notices,
            over=over or {},
            ended="" if ended is None else ended.text,
            waiting=lambda: missing_in_the_end(self.waiting_for, self.status(), own.name),
            names=frozenset(peer.name for peer in known),
        )
        self._archived: list[Desk] = []
        try:
            self._archived += (archive.open(own, timing) for archive in archives)
            self._transport = Transport(own, desk, self._archived)
        except BaseException:
            self._close_journals()
            raise

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send the hosted node's frame to its receivers, and wait for those of its senders.

        The round is the number of exchanges before this one, those before a resume included.

        Args:
            frames_NB: uint8 (1, B).

        Returns:
            uint8 (S, B): the frames of `senders`.

        Raises:
            RestoredBackupError: others hold frames that this journal does not know.
            JournalError: another frame was released for this round, or the disk does not take it.
            SilentPeerError: patience is over; names the party.
            WaitStoppedError: `stop` was called.
        """
        round_ = self.traffic.rounds
        frame = self._checked(round_, frames_NB)
        # A frame that was released before goes out again as it is; a new one leaves only after
        # every receiver has shown that it holds nothing that is unknown here.
        if round_ >= self._journal.released:
            self.meet_receivers()
        self._release(round_, frame)
        # Not everything at once: who is missing is said by name.
        self._wait(lambda: self._missing(round_), f"round {round_}")
        rows = [
            frame if sender == self._own.node else self._journal.frame_of(sender, round_)
            for sender in self.senders
        ]
        self.traffic.count(len(frame))
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)

    def _checked(self, round_: int, frames_NB: Tensor) -> bytes:
        """Return the own frame, or refuse one of another size than the plan says."""
        frame = frames_NB.cpu().contiguous().numpy().tobytes()
        expected = self._size_of_round(round_)
        if frames_NB.shape[0] != 1 or len(frame) != expected:
            raise ConfigError(
                f"round {round_}: the own frame has {len(frame)} bytes, the plan says {expected}; "
                "were settings changed after the roster was approved?"
            )
        return frame

    def _release(self, round_: int, frame: bytes) -> None:
        """Bring the own frame to the disk and offer it."""
        self._journal.release(round_, frame)
        self._transport.wake()

    def meet_receivers(self) -> None:
        """Wait until every receiver has said since this start what it has.

        Call it before the first private gradient: a party that was restored from an older backup
        is recognised here, before it spends anything. If one receiver were left out, it might
        hold an earlier release of a round that another one is about to get anew.

        Raises:
            RestoredBackupError: others hold frames that this journal does not know.
            SilentPeerError: patience is over; names the party.
            WaitStoppedError: `stop` was called.
        """
        self._wait(self._journal.unheard, "word of what has arrived")

    def pass_on(self) -> None:
        """Tell the neighbours what is new on the notice board."""
        self._transport.wake()

    def wait_for(self, missing: Callable[[], list[Peer]], what: str) -> None:
        """Wait until none of these parties is missing; they need not be neighbours.

        Raises:
            SilentPeerError: patience is over; names the party.
            WaitStoppedError: `stop` was called.
        """
        self._wait(missing, what)

    def finish(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Wait until every receiver has all own frames on its disk; then this party may leave.

        It also stays until its senders have confirmed that theirs are safe here: whoever is not
        told waits for this party in vain. Who gives no sign of life for two minutes may have left
        because it knows, and who does not confirm within five is not waited for either.

        Args:
            say: told once how to end a wait that is not short. A party that was killed before the
                last acknowledgement came may ask those who have ended, and nobody answers.

        Raises:
            SilentPeerError: patience is over; names the party.
            WaitStoppedError: `stop` was called.
        """
        self._wait(self._journal.unacknowledged, "the last acknowledgement", say)
        started, told = time.monotonic(), False
        with self._journal.changed:
            # A stop ends this wait at once: the own part is done.
            while (unsure := self._unsure(started)) and not self._stopped:
                self.waiting_for = tuple(peer.name for peer in unsure)
                if not told and time.monotonic() - started > _FAREWELL_SECONDS:
                    told = True
                    say(_FAREWELL.format(", ".join(self.waiting_for)))
                self._journal.changed.wait(_GLANCE_SECONDS)
        self.waiting_for = ()

    def _unsure(self, started: float) -> list[Peer]:
        """Return the neighbours of whom it is not sure that they know all and may still ask."""
        now, limit = time.monotonic(), min(_ABSENT_SECONDS, self._patience or _ABSENT_SECONDS)
        if now - started > _COURTESY_SECONDS:
            return []
        senders = [
            self._neighbours.senders[node]
            for node in self._journal.untold()
            if now - max(started, self._status.silent_since(node)) < limit
        ]
        # After a restart the disk may know more than the receivers do.
        receivers = self._journal.unanswered() if now - started < _FAREWELL_SECONDS else []
        return [*senders, *receivers]

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """Return what this party can know of everybody's values without a common store.

        Values of other parties are theirs. What all must agree on is public instead: the roster
        fixes the number of steps, and it was refused if a budget could not pay for them. So
        "remaining releases" is answered by the planned steps, the same number everywhere. If it
        were answered by the own budget, a party whose budget ends early would leave the others
        waiting for its frames; this way it goes on to gossip and releases nothing. For any other
        name the own value stands alone: a party resumes from its own newest checkpoint, whatever
        the others do, since all that they sent since then is in the journal.
        """
        return [self._steps if name == "remaining releases" else value]

    def forget_before(self, round_: int) -> None:
        """Drop journaled frames of rounds before this one.

        Call it after a checkpoint, with the round of the oldest one that is kept.
        """
        self._journal.forget_before(round_)

    def status(self) -> dict[str, PeerStatus]:
        """Return what is known of every neighbour now, by name; any thread may call it."""
        found = self._status.all()
        return {peer.name: found[peer.node] for peer in self._neighbours.all()}

    def seconds_waited(self) -> float:
        """Return how long this start has waited for others in all; any thread may call it."""
        since = self._waiting_since
        return self._waited + (time.monotonic() - since if since else 0.0)

    @property
    def written(self) -> int:
        """Number of own frames that may ever have been sent."""
        return self._journal.written

    @property
    def waiting_share(self) -> float:
        """Share of this start's time that was spent waiting for others."""
        return min(self.seconds_waited() / max(time.monotonic() - self._opened, 1e-3), 1.0)

    def stop(self) -> None:
        """End the present wait and all later ones within a second; a signal handler may call it.

        An exchange for which everything is there goes on.
        """
        # No lock and no notification: a handler may interrupt the very thread that holds the lock.
        self._stopped = True

    def close(self) -> None:
        """End all lines and close the journal."""
        self._transport.close()
        self._close_journals()

    def _close_journals(self) -> None:
        for journal in (self._journal, *(desk.journal for desk in self._archived)):
            journal.close()

    def _fail(self, error: JournalError) -> None:
        """Make every wait end with this error; called by the transport's thread."""
        self._failure = error
        with self._journal.changed:
            self._journal.changed.notify_all()

    def _missing(self, round_: int) -> list[Peer]:
        """Return the senders whose frame of a round has not come."""
        return [
            peer
            for node, peer in self._neighbours.senders.items()
            if not self._journal.has(node, round_)
        ]

    def _wait(
        self,
        missing: Callable[[], list[Peer]],
        what: str,
        advise: Callable[[str], None] | None = None,
    ) -> None:
        """Sleep until nobody is missing; say for whom, and give up only where asked to.

        `advise` is told once how the last of all waits can be ended.
        """
        started = said = kept = self._waiting_since = time.monotonic()
        returned = False
        with self._journal.changed:
            while absent := missing():
                self.waiting_for = tuple(peer.name for peer in absent)
                self._raise_if_stopped(f"{what} of {', '.join(self.waiting_for)}")
                self._check_patience(absent, started, what)
                if advise is not None and time.monotonic() - started > _FAREWELL_SECONDS:
                    _advise(advise, self.waiting_for)
                    advise = None
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    _LOG.info("waiting for %s of %s", what, ", ".join(self.waiting_for))
                idle = not self._journal.changed.wait(_GLANCE_SECONDS)
                if time.monotonic() - kept > _GLANCE_SECONDS:
                    kept = time.monotonic()
                    self._journal.settle()  # who is waited for may have ended, or this one may
                if idle and not returned:
                    return_freed_memory()
                    returned = True
        self.waiting_for = ()
        self._waited, self._waiting_since = self.seconds_waited(), 0.0
        self._raise_failure()

    def _raise_if_stopped(self, what: str) -> None:
        self._raise_failure()
        if self._stopped:
            raise WaitStoppedError(f"stopped while {what} was awaited; start again to go on")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_patience(self, absent: list[Peer], started: float, what: str) -> None:
        """Give up on a party without a sign of life; one that only takes long is waited for."""
        if self._patience is None:
            return
        for peer in absent:
            silent = time.monotonic() - max(started, self._status.silent_since(peer.node))
            if silent > self._patience:
                known = self._status.all().get(peer.node)  # None: it is no neighbour
                problem = known.problem if known else ""
                raise SilentPeerError(
                    f"{peer} has given no sign of life for {silent:.0f} s (--patience "
                    f"{self._patience:g}) while {what} was awaited"
                    + (f"; last: {problem}" if problem else "")
                )


def _advise(say: Callable[[str], None], names: tuple[str, ...]) -> None:
    """Say who has not confirmed the last messages, and when not to wait for it."""
    text = (
        f"{', '.join(names)} has not confirmed this party's last messages. Who has ended, or has "
        "begun a later version of the roster (`dpcsgp party status` there), holds them: then stop "
        "this party with Ctrl-C, its model and ledger are complete. Otherwise let it run, or start "
        "it again later"
    )
    _LOG.warning("%s", text)
    say(text)
