"""The calling side: dials a neighbour, again and again until the party is closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dpcsgp.errors import WireError
from dpcsgp.federation.peers import Method, Peer, Self
from dpcsgp.federation.transport_ends import (
    Desk,
    LineClosedError,
    Timing,
    first_to_end,
    greet,
    receive_frames,
    send_frames,
)
from dpcsgp.federation.transport_grpc import GrpcLine, client_options, grpc, path_of
from dpcsgp.federation.transport_messages import Facts, refusal

_FAREWELL_SECONDS = 1.0  # for the last messages to get through when this party leaves
_LEAST_PAUSE = 0.05  # between two attempts, however often a neighbour calls
_LOG = logging.getLogger(__name__)


async def keep_calling(
    own: Self, desk: Desk, peer: Peer, method: Method, closing: asyncio.Event
) -> None:
    """Hold a line with a neighbour until the party is closed; whatever ends it, dial again."""
    pauses = Pauses(desk.timing)
    while not closing.is_set() and not _is_settled(desk, peer, method):
        try:
            await _call_once(own, desk, peer, method, closing, pauses)
        except Exception as error:  # whatever it is, it ends this attempt and not the next
            text = str(error)
            if own.hint and isinstance(error, LineClosedError) and _is_unheard(desk, peer):
                text = f"{text}; {own.hint}"
            if desk.status.trouble(peer.node, text, method):
                _LOG.warning("no line with %s (%s): %s", peer, method.value, text)
        if not closing.is_set():
            await _pause(desk, peer, closing, pauses)


def _is_unheard(desk: Desk, peer: Peer) -> bool:
    return desk.status.of(peer.node).last_heard is None


async def knock(own: Self, desk: Desk, peer: Peer) -> None:
    """Tell a neighbour that dials this party that it is there; who is away is not told."""
    with contextlib.suppress(WireError, LineClosedError):
        await say_hello(own, peer, desk.roster_digest, desk.timing.hello)


async def _pause(desk: Desk, peer: Peer, closing: asyncio.Event, pauses: Pauses) -> None:
    """Wait before the next attempt; a neighbour that has just called is dialled soon."""
    knocked = desk.knocks[peer.node]
    await asyncio.sleep(_LEAST_PAUSE)
    await first_to_end(_until(closing), _until(knocked), asyncio.sleep(pauses.next()))
    if knocked.is_set():
        knocked.clear()
        pauses.start_over()


def _is_settled(desk: Desk, peer: Peer, method: Method) -> bool:
    """Say whether a version that ended before its plan needs no further call for this edge."""
    if not desk.ended:
        return False
    journal = desk.journal
    if method is Method.PUSH:
        all_made = desk.size_of_round(journal.released) == 0
        return all_made and peer not in journal.unacknowledged()
    all_there = desk.size_of_round(journal.awaited(peer.node).rounds) == 0
    return all_there and peer.node not in journal.untold()


async def say_hello(own: Self, peer: Peer, roster_digest: bytes, seconds: float) -> None:
    """Call a neighbour once and compare what both must agree on.

    Raises:
        WireError: something differs; the text names it.
        LineClosedError: it cannot be reached, is another party, or refused; the text says which.
    """
    mine = Facts.now(roster_digest, own.node, peer.node)
    async with _dialled(own, peer, Method.HELLO) as line:
        await greet(line, mine, seconds)


class Pauses:
    """How long to wait before the next attempt: doubling, up to a limit, and never in step."""

    def __init__(self, timing: Timing) -> None:
        self._timing, self._pause = timing, timing.first_pause

    def next(self) -> float:
        """Return the next pause in seconds."""
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, self._timing.longest_pause)
        return pause

    def start_over(self) -> None:
        """Begin with short pauses again: an attempt succeeded."""
        self._pause = self._timing.first_pause


async def _call_once(
    own: Self, desk: Desk, peer: Peer, method: Method, closing: asyncio.Event, pauses: Pauses
) -> None:
    end = send_frames if method is Method.PUSH else receive_frames
    async with _dialled(own, peer, method) as line:
        await greet(line, desk.facts(peer), desk.timing.hello, desk.over)
        greeted = time.monotonic()
        desk.status.opened(peer.node)
        if desk.status.is_news(peer.node, "connected", method):
            _LOG.info("connected to %s (%s)", peer, method.value)
        try:
            await first_to_end(end(line, desk, peer), _until(closing))
            await line.finish(_FAREWELL_SECONDS)
        except WireError as error:
            await line.refuse(refusal(str(error)), _FAREWELL_SECONDS)
            raise
        finally:
            # A line that is refused right after its hello is not dialled without end.
            lasted = time.monotonic() - greeted > desk.timing.beat
            if lasted:
                pauses.start_over()
            desk.status.closed(peer.node, lasted)


@asynccontextmanager
async def _dialled(own: Self, peer: Peer, method: Method) -> AsyncIterator[GrpcLine]:
    """Open a connection of its own for one call."""
    assert peer.address is not None
    # The peer's certificate is the only root: nobody else can answer in its name.
    credentials = grpc.ssl_channel_credentials(
        peer.certificate_pem, own.key_pem, own.certificate_pem
    )
    options = client_options()
    async with grpc.aio.secure_channel(peer.address, credentials, options=options) as channel:
        call: Any = channel.stream_stream(path_of(method))()
        try:
            yield GrpcLine(call)
        finally:
            call.cancel()


async def _until(event: asyncio.Event) -> None:
    await event.wait()
