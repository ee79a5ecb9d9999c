"""The answering side: who may call, and what for. It listens on one address and nowhere else.

A caller shows its certificate in the TLS handshake; without the one of a neighbour it gets no
further. Then its node follows from that certificate, byte by byte, never from what it says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from dpcsgp.errors import ConfigError, JournalError, WireError
from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.peers import Method, Peer, Self
from dpcsgp.federation.transport_ends import (
    Desk,
    LineClosedError,
    first_to_end,
    receive_frames,
    send_frames,
)
from dpcsgp.federation.transport_grpc import SERVICE, GrpcLine, der_of, grpc, server_options

_MOST_CALLS: Final = 6  # of one peer at a time; honest ones have at most two, and a hello
_MOST_REASONS: Final = 50
_TLS: Final = b"TLSv1.3"
_LOG = logging.getLogger(__name__)


class Reception:
    """Answers the calls of neighbours.

    Args:
        own: this party, with an address to listen on.
        desks: what all lines share, one per version of the roster; the newest first.
    """

    def __init__(self, own: Self, desks: Sequence[Desk]) -> None:
        self._own, self._desk, self._desks = own, desks[0], desks
        # certificate -> its owner, as each version that it is a neighbour in has it
        self._known: dict[bytes, list[tuple[Desk, Peer]]] = {}
        for desk in desks:
            for peer in desk.neighbours.all():
                der = der_of(peer.certificate_pem, peer.name)
                self._known.setdefault(der, []).append((desk, peer))
        self._calls: Counter[str] = Counter()
        # (roster, peer, method) -> set when a newer call takes the place of the one that is open
        self._replaced: dict[tuple[bytes, int, Method], asyncio.Event] = {}
        self._refused: set[str] = set()  # reasons that were logged
        self._closing = asyncio.Event()
        self._server: Any = None

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        assert self._own.listen is not None
        handlers = {
            method.value: grpc.stream_stream_rpc_method_handler(self._handler(method))
            for method in Method
        }
        options = server_options(self._desk.timing.hello, len(self._known))
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        # Only neighbours' certificates are roots: others fail in the handshake.
        certificates = {p.certificate_pem for owners in self._known.values() for _, p in owners}
        roots = b"".join(sorted(certificates))
        pair = (self._own.key_pem, self._own.certificate_pem)
        credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)
        try:
            self._server.add_secure_port(self._own.listen, credentials)
            await self._server.start()
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"listen = '{self._own.listen}': this address cannot be listened on; is the port "
                "in use, or does the address belong to another machine?"
            ) from error
        _LOG.info("'%s' listens on %s", self._own.name, self._own.listen)

    async def close(self, seconds: float) -> None:
        """End all calls and stop listening."""
        self._closing.set()
        await self._server.stop(seconds)

    def _handler(self, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        async def answer(_: Any, context: Any) -> None:
            # What is aborted here ends this call; no other notices.
            try:
                owners = self._caller(context, method)
            except WireError as error:
                self._say_refused(str(error))
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
                return
            desk, peer = owners[0]
            self._calls[peer.name] += 1
            try:
                line = GrpcLine(context)
                desk, peer = await self._greeted(line, owners)
                await self._serve(line, desk, peer, method)
            except (WireError, JournalError) as error:
                if desk.status.trouble(peer.node, str(error), method):
                    _LOG.warning("call %s of %s refused: %s", method.value, peer, error)
                if desk is not self._desk:
                    self._tell_newest(peer, str(error))
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except LineClosedError as error:
                if desk.status.is_news(peer.node, f"closed: {error}", method):
                    _LOG.info("line with %s closed: %s", peer, error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            finally:
                self._calls[peer.name] -= 1

        return answer

    def _tell_newest(self, caller: Peer, text: str) -> None:
        """Show beside a party that is waited for that it still runs an earlier version."""
        for peer in self._desk.neighbours.all():
            if peer.name == caller.name:
                told = f"it still runs an earlier version of the roster, and was told: {text}"
                self._desk.status.trouble(peer.node, told)

    def _say_refused(self, text: str) -> None:
        """Log a refused call; each reason once, so that nobody can fill the log."""
        if text not in self._refused and len(self._refused) < _MOST_REASONS:
            self._refused.add(text)
            _LOG.warning("a call was refused: %s", text)

    def _caller(self, context: Any, method: Method) -> list[tuple[Desk, Peer]]:
        """Return who calls, by its certificate, in each version where it may ask for this."""
        auth = context.auth_context()
        try:
            found = self._known.get(der_of(auth.get("x509_pem_cert", [b""])[0], "caller"))
        except ConfigError:
            found = None
        if found is None:
            # A neighbour could sign another certificate with its own: the chain is valid, the
            # certificate is not the pinned one.
            raise WireError("this certificate is not on the roster")
        if auth.get("ssl_tls_version") != [_TLS]:
            raise WireError("TLS 1.3 is required")
        desk, peer = found[0]
        if self._calls[peer.name] >= _MOST_CALLS * len(self._desks):
            raise WireError(f"{peer} has {self._calls[peer.name]} calls open already")
        allowed = [owner for owner in found if _may(*owner, method)]
        if not allowed:
            raise WireError(
                f"{peer} may not {method.value} here: the graph has no such edge with node "
                f"{desk.node}"
            )
        return allowed

    async def _greeted(
        self, line: GrpcLine, owners: Sequence[tuple[Desk, Peer]]
    ) -> tuple[Desk, Peer]:
        """Exchange hellos; return the version of the roster that the caller speaks of."""
        seconds = self._desk.timing.hello
        message = await line.receive(seconds)
        digest = messages.roster_of(message)
        meant = [owner for owner in owners if owner[0].roster_digest.hex() == digest]
        # Whoever speaks of another roster is told about the newest one here.
        desk, peer = meant[0] if meant else owners[0]
        mine = desk.facts(peer)
        messages.check_hello(message, mine, self._desk.over if not meant else None)
        await line.send(messages.hello(mine), seconds)
        return desk, peer

    async def _serve(self, line: GrpcLine, desk: Desk, peer: Peer, method: Method) -> None:
        desk.knocks[peer.node].set()
        if method is Method.HELLO:
            return
        # A peer that lost its connection calls again before the loss is noticed here.
        place = (desk.roster_digest, peer.node, method)
        if older := self._replaced.get(place):
            older.set()
        replaced = self._replaced[place] = asyncio.Event()
        end = receive_frames if method is Method.PUSH else send_frames
        desk.status.opened(peer.node)
        if desk.status.is_news(peer.node, "connected", method):
            _LOG.info("%s is connected (%s)", peer, method.value)
        greeted = time.monotonic()
        try:
            await first_to_end(end(line, desk, peer), _hang_up(replaced), _until(self._closing))
        finally:
            desk.status.closed(peer.node, time.monotonic() - greeted > desk.timing.beat)
            if self._replaced.get(place) is replaced:
                del self._replaced[place]


def _may(desk: Desk, peer: Peer, method: Method) -> bool:
    """Say whether a graph has the edge that a peer wants to use."""
    edges = {
        Method.HELLO: True,
        Method.PUSH: peer.node in desk.neighbours.senders,
        Method.FETCH: peer.node in desk.neighbours.receivers,
    }
    return edges[method]


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _hang_up(replaced: asyncio.Event) -> None:
    """End a line with its reason once another has taken its place; not as one that went well."""
    await replaced.wait()
    raise LineClosedError("the same party has called again since")
