"""A caller that says whatever a test wants, over real TLS: gRPC's blocking client, none of ours."""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

import grpc
from parties import ROSTER, pair

from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.frame_log import chain_after
from dpcsgp.federation.journal import Holding
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.graphs import from_edges

# Anna sends to Bert, Bert to Carla, Carla to Dora, Dora to Anna: Dora has no edge with Bert.
RING = from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)])
SIZE = 1000


def channel_to(server: Peer, identity: tuple[bytes, bytes] | None, options: Any = ()) -> Any:
    """Return a connection to a party, with a certificate or without."""
    key, certificate = identity or (None, None)
    credentials = grpc.ssl_channel_credentials(server.certificate_pem, key, certificate)
    assert server.address is not None
    override = ("grpc.ssl_target_name_override", server.name)
    return grpc.secure_channel(server.address, credentials, options=[override, *options])


class RawCaller:
    """One call to a party.

    Args:
        server: whom to call.
        method: "hello", "push" or "fetch".
        node: as which node, in the hello.
        identity: key and certificate; None: without a certificate.
        options: of the channel.
        channel: to use instead of an own one.
    """

    def __init__(
        self,
        server: Peer,
        method: str,
        node: int,
        identity: tuple[bytes, bytes] | None,
        options: Any = (),
        channel: Any = None,
    ) -> None:
        self._shared = channel is not None
        self._channel = channel or channel_to(server, identity, options)
        self._server, self._node = server, node
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(f"/dpcsgp.Party/{method}")
        self.call: Any = call(iter(self._said.get, None), timeout=30)

    def __enter__(self) -> RawCaller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.call.cancel()
        self._said.put(None)
        if not self._shared:
            self._channel.close()

    def say(self, *said: bytes) -> RawCaller:
        """Send messages."""
        for message in said:
            self._said.put(message)
        return self

    def hear(self) -> bytes:
        """Return the next message."""
        return next(self.call)

    def greet(self, **changes: Any) -> RawCaller:
        """Say hello, with other facts if wanted, and hear the answer."""
        facts = messages.Facts.now(ROSTER, self._node, self._server.node)
        self.say(messages.hello(messages.Facts(**{**vars(facts), **changes})))
        messages.check_hello(self.hear(), facts)
        return self

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Read until the call ends; return how it was ended."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


def framed(round_: int, content: bytes, chain: bytes, **changes: Any) -> bytes:
    """Return a frame in one message, with a right head unless changed."""
    head = messages.FrameHead(round_, len(content), chain, chain_after(chain, round_, content))
    return messages.frame(head._replace(**changes), content)


def pushed(caller: RawCaller, rounds: int, size: int) -> Holding:
    """Push right frames of the next rounds; return what the receiver has then."""
    held = messages.parsed_holding(caller.hear())
    for _ in range(rounds):
        content = bytes([held.rounds % 256]) * size
        caller.say(framed(held.rounds, content, held.chain))
        message = caller.hear()
        while messages.parsed_beat(message) is not None:
            message = caller.hear()
        held = messages.parsed_holding(message)
    return held


class Scene(NamedTuple):
    """Bert's network is open; the test plays all others."""

    bert: PartyNetwork
    peer: Peer
    selves: list[Self]

    def anna(self, method: str = "push", **options: Any) -> RawCaller:
        return RawCaller(self.peer, method, 0, pair("anna"), **options)

    def received(self) -> int:
        return self.bert._journal.awaited(0).rounds
