"""The answering side: who may call, and what for. It listens on one address and nowhere else.

A caller shows its certificate in the TLS handshake; without the one of a neighbour it gets no
further. Then its node follows from that certificate, byte by byte, never from what it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from dpcsgp.errors import ConfigError, JournalError, WireError
from dpcsgp.federation.peers import Method, Peer, Self
from dpcsgp.federation.transport_ends import (
    Desk,
    LineClosedError,
    first_to_end,
    greet,
    receive_frames,
    send_frames,
)
from dpcsgp.federation.transport_grpc import SERVICE, GrpcLine, der_of, grpc, server_options

_MOST_CALLS: Final = 6  # of one peer at a time; honest ones have at most two, and a hello
_TLS: Final = b"TLSv1.3"
_LOG = logging.getLogger(__name__)


class Reception:
    """Answers the calls of neighbours.

    Args:
        own: this party, with an address to listen on.
        desk: what all lines share.
    """

    def __init__(self, own: Self, desk: Desk) -> None:
        self._own, self._desk = own, desk
        self._peer_of = {der_of(p.certificate_pem, p.name): p for p in desk.neighbours.all()}
        self._calls: Counter[int] = Counter()
        # (peer, method) -> set when a newer call takes the place of the one that is open
        self._replaced: dict[tuple[int, Method], asyncio.Event] = {}
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
        options = server_options(self._desk.timing.hello, len(self._peer_of))
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        # Only neighbours' certificates are roots: others fail in the handshake.
        roots = b"".join(peer.certificate_pem for peer in self._desk.neighbours.all())
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
                peer = self._caller(context, method)
            except WireError as error:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
                return
            self._calls[peer.node] += 1
            try:
                await self._serve(GrpcLine(context), peer, method)
            except (WireError, JournalError) as error:
                if self._desk.status.trouble(peer.node, str(error)):
                    _LOG.warning("call %s of %s refused: %s", method.value, peer, error)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except LineClosedError as error:
                _LOG.info("line with %s closed: %s", peer, error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            finally:
                self._calls[peer.node] -= 1

        return answer

    def _caller(self, context: Any, method: Method) -> Peer:
        """Return who calls, by its certificate; refuse what it may not ask for."""
        auth = context.auth_context()
        try:
            peer = self._peer_of.get(der_of(auth.get("x509_pem_cert", [b""])[0], "caller"))
        except ConfigError:
            peer = None
        if peer is None:
            # A neighbour could sign another certificate with its own: the chain is valid, the
            # certificate is not the pinned one.
            raise WireError("this certificate is not on the roster")
        if auth.get("ssl_tls_version") != [_TLS]:
            raise WireError("TLS 1.3 is required")
        if self._calls[peer.node] >= _MOST_CALLS:
            raise WireError(f"{peer} has {_MOST_CALLS} calls open already")
        neighbours = self._desk.neighbours
        allowed = {
            Method.HELLO: True,
            Method.PUSH: peer.node in neighbours.senders,
            Method.FETCH: peer.node in neighbours.receivers,
        }
        if not allowed[method]:
            raise WireError(
                f"{peer} may not {method.value} here: the graph has no such edge with node "
                f"{self._desk.node}"
            )
        return peer

    async def _serve(self, line: GrpcLine, peer: Peer, method: Method) -> None:
        await greet(line, self._desk.facts(peer), self._desk.timing.hello, calling=False)
        self._desk.knocks[peer.node].set()
        if method is Method.HELLO:
            return
        # A peer that lost its connection calls again before the loss is noticed here.
        if older := self._replaced.get((peer.node, method)):
            older.set()
        replaced = self._replaced[peer.node, method] = asyncio.Event()
        end = receive_frames if method is Method.PUSH else send_frames
        self._desk.status.opened(peer.node)
        _LOG.info("%s is connected (%s)", peer, method.value)
        try:
            await first_to_end(end(line, self._desk, peer), _until(replaced), _until(self._closing))
        finally:
            self._desk.status.closed(peer.node)
            if self._replaced.get((peer.node, method)) is replaced:
                del self._replaced[peer.node, method]


async def _until(event: asyncio.Event) -> None:
    await event.wait()
