"""The journal of a party: its own frames until everybody has them, others' until they are used.

| box | written | kept until |
|---|---|---|
| outbox | before the first byte leaves | all receivers have it safely, and a checkpoint the state |
| inbox, one per sender | before it is acknowledged | a checkpoint holds the state that used it |

A receiver says what it has as a `Holding`: a number of rounds and the chain over their bytes. So a
sender that was restored from an older backup is recognised before it releases anything: others
hold rounds that it does not know, or other bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dpcsgp.errors import (
    DiskError,
    JournalError,
    JournalInUseError,
    RestoredBackupError,
    WireError,
)
from dpcsgp.federation.frame_log import FrameLog
from dpcsgp.federation.peers import Peer
from dpcsgp.records.files import write_atomically

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_FORMAT = 1
_SETTLED, _CONFIRMED = "acknowledged.json", "confirmed.json"


class Holding(NamedTuple):
    """What a receiver has from one sender: rounds 0 to `rounds` - 1, and the chain over them."""

    rounds: int
    chain: bytes


class Journal:
    """Frames on disk of one party and one roster; any thread may call.

    Args:
        folder: made if missing; one process at a time may use it.
        roster_digest: digest of the roster; another roster needs another folder.
        node: this party's node.
        senders: nodes that are heard here, without this one.
        receivers: parties that hear this one.
        end: own rounds from this one on are of no use to anybody any more; None: there is no such.

    Raises:
        JournalError: the folder is damaged, or of another roster or node.
        JournalInUseError: another process has it.
    """

    def __init__(
        self,
        folder: Path,
        roster_digest: bytes,
        node: int,
        senders: Iterable[int],
        receivers: Iterable[Peer],
        end: int | None = None,
    ) -> None:
        self.changed = threading.Condition()  # notified when frames arrive or are acknowledged
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(folder)
        try:
            _check_identity(folder, roster_digest, node)
            self._outbox = FrameLog(folder / "outbox", _origin(roster_digest, node))
            self._inbox = {
                sender: FrameLog(folder / f"inbox-{sender}", _origin(roster_digest, sender))
                for sender in senders
            }
        except BaseException:
            os.close(self._lock_file)
            raise
        self._receivers = {peer.node: peer for peer in receivers}
        self._acknowledged: dict[int, int] = {}  # receivers that have spoken since this start
        self._settled = _read_counts(folder / _SETTLED)  # as it was when `settle` wrote it
        self._settling = threading.Lock()
        self._answered: dict[int, int] = {}  # receivers that were told that they were heard
        self._confirmed = _read_counts(folder / _CONFIRMED)  # as it was when `settle` wrote it
        self._told = dict(self._confirmed)  # senders that have confirmed a holding
        self._folder, self._end = folder, end
        self._used = 0  # rounds before this one are in a checkpoint

    # Own frames.

    @property
    def released(self) -> int:
        """Number of own rounds that are safe on disk and may be sent."""
        safe = self._outbox.safe
        return safe if self._end is None else min(safe, self._end)

    @property
    def written(self) -> int:
        """Number of own rounds that may ever have been sent, those after the end included."""
        return self._outbox.next

    def release(self, round_: int, frame: bytes) -> None:
        """Bring the own frame of a round to the disk; a frame that is there must be the same.

        Raises:
            JournalError: another frame was released for this round, or it is not the next one.
        """
        if round_ > self._outbox.next:
            raise JournalError(
                f"round {round_}: the next own frame is that of round {self._outbox.next}; the "
                "checkpoint is newer than the journal, restore both from one copy"
            )
        if round_ == self._outbox.next:
            self._outbox.append(frame)
        elif self._outbox.read(round_) != frame:
            raise JournalError(
                f"round {round_}: the frame computed now differs from the one that was released; "
                "nothing is sent. Resume with the data, settings, release and machine type of "
                "the first start"
            )
        self._outbox.sync()
        self._notify()

    def piece(self, round_: int, start: int, size: int) -> bytes:
        """Return a piece of an own frame that is safe on disk."""
        assert round_ < self._outbox.safe
        return self._outbox.read(round_, start, size)

    def own_size(self, round_: int) -> int:
        """Return the size of an own frame in bytes."""
        return self._outbox.size_of(round_)

    def own_chain(self, rounds: int) -> bytes | None:
        """Return the chain over the first own rounds; None if it is no longer known."""
        return self._outbox.chain_before(rounds)

    def hear_holding(self, receiver: int, holding: Holding) -> int:
        """Take note of what a receiver has on its disk; return the round that it needs next.

        Raises:
            RestoredBackupError: at its first word since this start it holds what is unknown here.
            WireError: later; then it contradicts what it said before.
        """
        fault = self._fault(self._receivers[receiver], holding)
        if fault is not None:
            # Once it has agreed with this journal, what it holds can only come from here.
            raise WireError(fault) if receiver in self._acknowledged else RestoredBackupError(fault)
        if holding.rounds < self._outbox.first:
            raise WireError(
                f"{self._receivers[receiver]} asks for round {holding.rounds}, which it had "
                f"acknowledged; rounds before {self._outbox.first} are no longer kept. Was it "
                "restored from an older backup? Then the federation has to be amended"
            )
        self._acknowledged[receiver] = max(self._acknowledged.get(receiver, 0), holding.rounds)
        self._forget()
        self._notify()
        return holding.rounds

    def unheard(self) -> list[Peer]:
        """Return the receivers that have not said since this start what they have."""
        return [peer for node, peer in self._receivers.items() if node not in self._acknowledged]

    def unacknowledged(self) -> list[Peer]:
        """Return the receivers that lack some own frame."""
        return [
            peer
            for node, peer in self._receivers.items()
            if self._acknowledged.get(node, self._settled.get(node, -1)) < self.released
        ]

    def acknowledged(self, receiver: int) -> int:
        """Return how many own rounds a receiver has said since this start that it has."""
        return self._acknowledged.get(receiver, 0)

    def answered(self, receiver: int, rounds: int) -> None:
        """Take note that a receiver was told that its word about these rounds was heard."""
        self._answered[receiver] = rounds
        self._notify()

    def unanswered(self) -> list[Peer]:
        """Return the receivers that have not been told since this start that all was heard."""
        return [
            peer
            for node, peer in self._receivers.items()
            if self._answered.get(node, -1) < self.released
        ]

    def settle(self) -> None:
        """Keep on disk what receivers have acknowledged and senders confirmed, if it is news.

        Call it when one of them has it all, and now and then: others may leave, or end a version
        of the roster before its plan, and a party that starts again would ask them in vain.
        """
        with self._settling:  # any thread may call
            settled, told = {**self._settled, **self._acknowledged}, dict(self._told)
            if settled != self._settled:
                _write_counts(self._folder / _SETTLED, settled)
                self._settled = settled
            if told != self._confirmed:
                _write_counts(self._folder / _CONFIRMED, told)
                self._confirmed = told

    # Others' frames.

    def holding(self, sender: int) -> Holding:
        """Return what is safe here from a sender."""
        rounds = self._inbox[sender].safe
        chain = self._inbox[sender].chain_before(rounds)
        assert chain is not None
        return Holding(rounds, chain)

    def awaited(self, sender: int) -> Holding:
        """Return which round of a sender comes next, and the chain before it."""
        rounds = self._inbox[sender].next
        chain = self._inbox[sender].chain_before(rounds)
        assert chain is not None
        return Holding(rounds, chain)

    def receive(self, sender: int, round_: int, frame: bytes | memoryview, chain: bytes) -> None:
        """Take the next frame of a sender; it may be used now, it is safe after `secure`.

        Args:
            sender: whose frame it is.
            round_: must be the awaited one.
            frame: its bytes.
            chain: over all its frames up to this one, as announced.

        Raises:
            WireError: another round is awaited, or the bytes are not the announced ones.
        """
        log = self._inbox[sender]
        with self.changed:
            if round_ != log.next:
                raise WireError(f"round {round_} of node {sender}: expected round {log.next}")
            log.append(frame, expected=chain)
            self.changed.notify_all()

    def secure(self, sender: int) -> Holding:
        """Bring what came from a sender to the disk; return what may be acknowledged."""
        self._inbox[sender].sync()
        return self.holding(sender)

    def hear_confirmation(self, sender: int, rounds: int, is_last: bool) -> None:
        """Take note that a sender knows that these rounds are safe here.

        Args:
            sender: who says so.
            rounds: that it has heard of.
            is_last: there are no more: then it may leave, and the disk keeps that it knows.

        Raises:
            WireError: it was never told of so many.
        """
        safe = self._inbox[sender].safe
        if rounds > safe:
            raise WireError(f"node {sender} confirms {rounds} rounds, only {safe} are safe here")
        is_news = rounds > self._told.get(sender, -1)
        self._told[sender] = max(rounds, self._told.get(sender, -1))
        if is_last and is_news:
            self.settle()
        self._notify()

    def untold(self) -> list[int]:
        """Return the senders that have not confirmed that all their frames are safe here."""
        return [node for node, log in self._inbox.items() if self._told.get(node, -1) < log.next]

    def has(self, sender: int, round_: int) -> bool:
        """Tell whether a frame has come."""
        return round_ < self._inbox[sender].next

    def frame_of(self, sender: int, round_: int) -> bytes:
        """Return a frame that has come."""
        return self._inbox[sender].read(round_)

    def forget_before(self, round_: int) -> None:
        """Drop frames of rounds before this one: a checkpoint holds the state after them.

        Call it with the oldest round from which this party may ever resume.
        """
        self._used = max(self._used, round_)
        self.settle()
        for log in self._inbox.values():
            log.forget_before(self._used)
        self._forget()

    def close(self) -> None:
        """Close all files and let another process use the folder."""
        with contextlib.suppress(DiskError):  # others say it again
            self.settle()
        for log in (self._outbox, *self._inbox.values()):
            log.close()
        os.close(self._lock_file)

    def _fault(self, receiver: Peer, holding: Holding) -> str | None:
        """Say how a receiver's holding contradicts this journal, or None."""
        known = self._outbox.next
        remedy = (
            "This folder is older than what this party has released, or was used in two places; "
            "restore its newest copy, or have the federation amended. Nothing was released"
        )
        if holding.rounds > known:
            return (
                f"{receiver} holds {holding.rounds} rounds from this party, the journal here has "
                f"{known}. {remedy}"
            )
        chain = self._outbox.chain_before(holding.rounds)
        if chain is not None and chain != holding.chain:
            return (
                f"{receiver} holds other bytes than the journal here, in round "
                f"{holding.rounds - 1} or before. {remedy}"
            )
        return None

    def _forget(self) -> None:
        """Drop own frames that everybody has, if no resume can need them either."""
        if not self.unheard():
            self._outbox.forget_before(min(self._used, *self._acknowledged.values()))

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _origin(roster_digest: bytes, sender: int) -> bytes:
    text = sender.to_bytes(8, "little") + roster_digest
    return hashlib.blake2b(text, digest_size=32, person=b"dpcsgp origin").digest()


def _lock(folder: Path) -> int:
    """Take the folder for this process; the right ends with the process."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise JournalInUseError(
            f"journal {folder} is in use by another process of this party, or cannot be locked "
            f"({error.strerror}); stop the other one, or use a local disk"
        ) from error
    return descriptor


def _write_counts(path: Path, counts: dict[int, int]) -> None:
    text = json.dumps({str(node): rounds for node, rounds in counts.items()})
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}); free space") from error


def _read_counts(path: Path) -> dict[int, int]:
    if not path.exists():
        return {}
    try:
        return {int(node): int(rounds) for node, rounds in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError(f"{path} cannot be read; delete it, others say it again") from error


def _check_identity(folder: Path, roster_digest: bytes, node: int) -> None:
    """Write whose journal this is, or refuse a folder of another roster or node."""
    mine = {"format": _FORMAT, "roster": roster_digest.hex(), "node": node}
    path = folder / "journal.json"
    if not path.exists():
        write_atomically(path, json.dumps(mine).encode())
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = "not readable"
    if found != mine:
        raise JournalError(f"journal {folder} belongs to {found}, this run is {mine}")
