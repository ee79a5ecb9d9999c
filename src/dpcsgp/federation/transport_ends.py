"""The two ends of an edge, whoever dialled: one sends frames in order, the other says what it has.

Nothing here knows how messages travel: a `Line` carries them. Whatever the other end does wrong is
a `WireError` and closes this line; the dialling end then tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dpcsgp.errors import JournalError, RestoredBackupError, WireError
from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.peers import Neighbours, Peer, StatusBoard

_CANCEL_SECONDS = 1.0  # before a work that goes on is cancelled again


class LineClosedError(Exception):
    """The line is gone: the other end left, fell silent, or refused; the text says which."""


class Line(Protocol):
    """Carries messages of at most 1 MB between two parties, in order."""

    async def receive(self, seconds: float) -> bytes:
        """Return the next message, or raise LineClosedError."""
        ...

    async def send(self, message: bytes, seconds: float) -> None:
        """Hand over a message; waits while the other end does not read."""
        ...


@dataclass(frozen=True)
class Timing:
    """Limits of a line, in seconds; none of them limits how long a training step may take.

    Attributes:
        hello: until the first messages have been exchanged.
        beat: between two signs of life.
        silence: without any message, or with one that does not get through, a line is closed.
        sync: at least between two syncs of what came from one sender; until then it keeps them.
        first_pause: before a second attempt to dial; doubles from one to the next.
        longest_pause: between attempts.
    """

    hello: float = 15.0
    beat: float = 5.0
    silence: float = 30.0
    sync: float = 0.5
    first_pause: float = 0.1
    longest_pause: float = 3.0


@dataclass(frozen=True)
class Desk:
    """What all lines of a party share.

    Attributes:
        node: this party's node.
        roster_digest: of the roster that this party has approved.
        neighbours: who may speak, and on which edges.
        journal: frames on disk.
        status: what is known of each neighbour.
        size_of_round: the public size of every frame of a round in bytes; 0: no such round.
        window: how many rounds a sender can be ahead of this party's own frames.
        fail: is told when this party must not go on.
        timing: limits of a line.
        wakers: one event per end, set when there is something to send.
        notices: everybody's starts, if parties share noise.
        over: what to say to those who have an older version of the roster, by its digest (hex).
        ended: why the rounds end before those of the plan, if they do; "": they do not. Then
            nobody is dialled any more who has them all.
        knocks: one event per neighbour, set when it has called: it is there, and can be dialled.
        waiting: returns the names of the parties that keep this one waiting.
        names: of all parties; others that a beat names are not shown to anybody.
    """

    node: int
    roster_digest: bytes
    neighbours: Neighbours
    journal: Journal
    status: StatusBoard
    size_of_round: Callable[[int], int]
    window: int
    fail: Callable[[JournalError], None]
    timing: Timing = Timing()
    wakers: set[asyncio.Event] = field(default_factory=set)
    notices: NoticeBoard | None = None
    over: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    knocks: dict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    waiting: Callable[[], tuple[str, ...]] = tuple
    names: frozenset[str] = frozenset()

    def wake(self) -> None:
        """Tell all ends that there is something to send."""
        for waker in self.wakers:
            waker.set()

    def on_roster(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those that are names of parties: any other text would reach people unasked."""
        return tuple(dict.fromkeys(name for name in names if name in self.names))

    def facts(self, peer: Peer) -> messages.Facts:
        """Return what this party says to a peer in a hello now."""
        return messages.Facts.now(self.roster_digest, self.node, peer.node)


async def greet(
    line: Line, mine: messages.Facts, seconds: float, over: Mapping[str, str] | None = None
) -> None:
    """Exchange hellos as the caller, who begins; `over` is that of the desk.

    Raises:
        WireError: something differs between the two parties; names it.
    """
    await line.send(messages.hello(mine), seconds)
    messages.check_hello(await line.receive(seconds), mine, over)


async def send_frames(line: Line, desk: Desk, peer: Peer) -> None:
    """Be the sending end until the line closes."""
    waker = asyncio.Event()
    desk.wakers.add(waker)
    try:
        # First the receiver says what it has: nothing leaves before that fits this journal.
        next_round = _heard(desk, peer, await _received(line, desk, peer, desk.timing.hello))
        await first_to_end(
            _hear_holdings(line, desk, peer, waker), _offer(line, desk, peer, next_round, waker)
        )
    finally:
        desk.wakers.discard(waker)


async def receive_frames(line: Line, desk: Desk, peer: Peer) -> None:
    """Be the receiving end until the line closes."""
    # An earlier line may have left frames that are not safe yet.
    await _acknowledge(line, desk, peer)
    arrived = asyncio.Event()
    if desk.notices is not None:
        desk.wakers.add(arrived)  # notices travel against the edges too
    try:
        await first_to_end(
            _take_frames(line, desk, peer, arrived), _keep_acknowledging(line, desk, peer, arrived)
        )
    finally:
        desk.wakers.discard(arrived)


async def first_to_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run several works until one ends; cancel the others and pass on its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end_all(tasks)


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel works until they have ended; a library may swallow a cancellation that comes late."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)  # their errors have been looked at


# The sending end.


async def _hear_holdings(line: Line, desk: Desk, peer: Peer, waker: asyncio.Event) -> None:
    while True:
        message = await _received(line, desk, peer, desk.timing.silence)
        if (notice := messages.parsed_notice(message)) is not None:
            await _take_notice(desk, notice)
        elif (names := messages.parsed_beat(message)) is not None:
            desk.status.waits(peer.node, desk.on_roster(names))
        else:
            _heard(desk, peer, message)
            waker.set()  # it is told that it was heard


def _heard(desk: Desk, peer: Peer, message: bytes) -> int:
    """Take note of what the receiver has; return the round that it needs next."""
    try:
        rounds = desk.journal.hear_holding(peer.node, messages.parsed_holding(message))
    except RestoredBackupError as error:
        # This party must not go on, and the other one should know why.
        desk.fail(error)
        raise WireError(str(error)) from error
    if desk.size_of_round(rounds) == 0:
        desk.journal.settle()  # it has all rounds of the plan, and may leave
    desk.status.reached(peer.node, acknowledged=rounds)
    return rounds


async def _offer(line: Line, desk: Desk, peer: Peer, next_round: int, waker: asyncio.Event) -> None:
    """Send every own frame from a round on as soon as it is released; beat in between.

    What was known when a frame was made goes before it: so notices travel with causes. And the
    receiver is told how much of what it said was heard: only then may it leave.
    """
    told, answered = 0, -1
    while True:
        waker.clear()  # before looking, so that no release is missed
        due = True
        while due:
            # First a look at what is released: a notice that comes in between is sent too soon
            # rather than too late.
            due = next_round < desk.journal.released
            told = await _send_notices(line, desk, peer, told)
            answered = await _answer(line, desk, peer, answered)
            if due:
                await _send_frame(line, desk, peer, next_round)
                next_round += 1
        if not await _is_set_within(waker, desk.timing.beat):
            await _send(line, desk, peer, messages.beat(desk.waiting()))


async def _answer(line: Line, desk: Desk, peer: Peer, answered: int) -> int:
    """Say how many rounds the receiver is known to have, if that is news on this line."""
    rounds = desk.journal.acknowledged(peer.node)
    if rounds > answered:
        await _send(line, desk, peer, messages.heard(rounds))
        desk.journal.answered(peer.node, rounds)
    return max(rounds, answered)


async def _send_notices(line: Line, desk: Desk, peer: Peer, told: int) -> int:
    """Pass on what came after a place of the board; return the place of the last of it."""
    if desk.notices is None:
        return told
    told, news = desk.notices.after(told)
    for notice in news:
        await _send(line, desk, peer, messages.notice(notice))
    return told


async def _send_frame(line: Line, desk: Desk, peer: Peer, round_: int) -> None:
    journal, step = desk.journal, messages.PIECE_BYTES
    size = journal.own_size(round_)
    before, after = journal.own_chain(round_), journal.own_chain(round_ + 1)
    assert before is not None and after is not None
    head = messages.FrameHead(round_, size, before, after)
    await _send(line, desk, peer, messages.frame(head, journal.piece(round_, 0, step)))
    for start in range(step, size, step):
        await _send(line, desk, peer, messages.piece(journal.piece(round_, start, step)))


# The receiving end.


async def _take_frames(line: Line, desk: Desk, peer: Peer, arrived: asyncio.Event) -> None:
    while True:
        message = await _received(line, desk, peer, desk.timing.silence)
        if (names := messages.parsed_beat(message)) is not None:
            desk.status.reached(peer.node)
            desk.status.waits(peer.node, desk.on_roster(names))
            continue
        if (notice := messages.parsed_notice(message)) is not None:
            await _take_notice(desk, notice)
            continue
        if (rounds := messages.parsed_heard(message)) is not None:
            is_last = desk.size_of_round(rounds) == 0
            desk.journal.hear_confirmation(peer.node, rounds, is_last)
            continue
        # The head is judged before anything else is read.
        head, piece = messages.parsed_frame(message)
        _check_head(head, desk, peer)
        frame = await _assembled(line, desk, peer, head, piece)
        # In a thread: the disk may be slow, and other lines must beat.
        await asyncio.to_thread(
            desk.journal.receive, peer.node, head.round, memoryview(frame), head.after
        )
        desk.status.reached(peer.node, received=head.round + 1)
        arrived.set()


async def _take_notice(desk: Desk, body: bytes) -> None:
    """Keep a notice and pass it on."""
    board = desk.notices
    if board is None:
        raise WireError("a notice of a start, but parties of this roster share no noise")
    try:
        news = await asyncio.to_thread(board.accept, body)
    except RestoredBackupError as error:
        desk.fail(error)  # this party must not go on
        raise WireError(str(error)) from error
    if news is not None:
        desk.wake()
        with desk.journal.changed:
            desk.journal.changed.notify_all()


async def _keep_acknowledging(line: Line, desk: Desk, peer: Peer, arrived: asyncio.Event) -> None:
    """Bring to the disk what has come and say so; not for each frame, a sync is costly."""
    told = said = 0
    while True:
        told = await _send_notices(line, desk, peer, told)
        if not await _is_set_within(arrived, desk.timing.beat):
            await _send(line, desk, peer, messages.beat(desk.waiting()))
            continue
        arrived.clear()
        if desk.journal.awaited(peer.node).rounds > said:
            said = await _acknowledge(line, desk, peer)
            await asyncio.sleep(desk.timing.sync)


async def _acknowledge(line: Line, desk: Desk, peer: Peer) -> int:
    held = await asyncio.to_thread(desk.journal.secure, peer.node)
    await _send(line, desk, peer, messages.holding(held))
    return held.rounds


def _check_head(head: messages.FrameHead, desk: Desk, peer: Peer) -> None:
    """Refuse a frame that is not the one that its sender has to send next."""
    awaited = desk.journal.awaited(peer.node)
    expected = desk.size_of_round(head.round)
    fault = None
    if head.round != awaited.rounds:
        when = "replayed" if head.round < awaited.rounds else "some before it are missing"
        fault = f"round {awaited.rounds} is awaited ({when})"
    elif head.before != awaited.chain:
        fault = (
            "its frames of earlier rounds have other bytes than those received here: it was "
            "restored from a backup or runs twice"
        )
    elif expected == 0:
        fault = desk.ended or "the plan has no such round"
    elif head.size != expected:
        fault = f"{head.size} bytes announced, every frame of this round has {expected}"
    elif head.round >= desk.journal.released + desk.window:
        fault = "it is further ahead than its graph allows"
    if fault is not None:
        raise WireError(f"frame of {peer} in round {head.round}: {fault}")


async def _assembled(
    line: Line, desk: Desk, peer: Peer, head: messages.FrameHead, piece: memoryview
) -> bytearray:
    """Gather the pieces of a frame; each but the last is full, so none can trickle in."""
    frame = bytearray()
    while True:
        expected = min(messages.PIECE_BYTES, head.size - len(frame))
        if len(piece) != expected:
            raise WireError(
                f"frame of {peer} in round {head.round}: a piece of {len(piece)} bytes, "
                f"expected {expected}"
            )
        frame += piece
        if len(frame) == head.size:
            return frame
        piece = messages.parsed_piece(await _received(line, desk, peer, desk.timing.silence))


# Both ends.


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _received(line: Line, desk: Desk, peer: Peer, seconds: float) -> bytes:
    message = await line.receive(seconds)
    desk.status.heard(peer.node, len(message))
    messages.check_no_refusal(message)
    return message


async def _send(line: Line, desk: Desk, peer: Peer, message: bytes) -> None:
    await line.send(message, desk.timing.silence)
    desk.status.sent(peer.node, len(message))
