"""The transport of a party: one thread in which all its lines live, called or answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from dpcsgp.errors import WireError
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.federation.transport_client import keep_calling, knock, say_hello
from dpcsgp.federation.transport_ends import Desk, LineClosedError
from dpcsgp.federation.transport_server import Reception

_T = TypeVar("_T")


def check_peer(own: Self, peer: Peer, roster_digest: bytes, seconds: float = 10.0) -> None:
    """Call a peer once, exchange hellos, and hang up.

    Args:
        own: this party; it need not listen.
        peer: whom to call; it has an address.
        roster_digest: of the roster here.
        seconds: limit for each of the two messages.

    Raises:
        WireError: the peer cannot be reached, is somebody else, refuses, or differs; says which.
    """
    try:
        asyncio.run(say_hello(own, peer, roster_digest, seconds))
    except LineClosedError as error:
        raise WireError(f"{peer} at {peer.address}: {error}") from error


class Transport:
    """Answers neighbours' calls, dials those that are to be dialled, and keeps on doing so.

    Args:
        own: this party.
        desk: what all lines share.
        archives: desks of earlier versions of the roster, from which others may lack frames.

    Raises:
        ConfigError: the address to listen on cannot be used.
    """

    def __init__(self, own: Self, desk: Desk, archives: Sequence[Desk] = ()) -> None:
        self._own, self._desk, self._desks = own, desk, (desk, *archives)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"transport of {own.name}", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._open()).result()
        except BaseException:
            self._end_loop()
            raise

    def wake(self) -> None:
        """Tell all sending ends that there is something to send."""
        self._loop.call_soon_threadsafe(self._desk.wake)

    def close(self, seconds: float = 2.0) -> None:
        """End all lines; what is under way has so many seconds."""
        self._run(self._close(seconds)).result()
        self._end_loop()

    async def _open(self) -> None:
        self._closing = asyncio.Event()
        self._reception = None
        if self._own.listen is not None:
            self._reception = Reception(self._own, self._desks)
            await self._reception.open()
        self._callers = [
            asyncio.ensure_future(keep_calling(self._own, desk, peer, method, self._closing))
            for desk in self._desks
            for peer, method in desk.neighbours.calls()
        ]
        called = {peer.node for peer, _ in self._desk.neighbours.calls()}
        self._callers += [
            asyncio.ensure_future(knock(self._own, self._desk, peer))
            for peer in self._desk.neighbours.all()
            if peer.address is not None and peer.node not in called
        ]

    async def _close(self, seconds: float) -> None:
        self._closing.set()
        if self._reception is not None:
            await self._reception.close(seconds)
        if self._callers:
            await asyncio.wait(self._callers, timeout=seconds)
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
