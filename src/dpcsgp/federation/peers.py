"""Who the neighbours are, which end of an edge dials, and what is known of each of them.

An edge has a direction, a connection has another: the sender pushes to a receiver that can be
reached; where only the sender can be reached, the receiver fetches.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from dpcsgp.errors import ConfigError
from dpcsgp.graphs import Topology

_MOST_SAID: Final = 20  # log lines about one line of messages before it works again


@dataclass(frozen=True)
class Peer:
    """Another party as the roster has it.

    Attributes:
        node: its node of the graph.
        name: its name; also the name in its certificate.
        certificate_pem: its self-signed certificate; no other is taken for it.
        address: HOST:PORT where it listens; None: it can only call out.
    """

    node: int
    name: str
    certificate_pem: bytes
    address: str | None

    def __str__(self) -> str:
        return f"party '{self.name}' (node {self.node})"


@dataclass(frozen=True)
class Self:
    """This party.

    Attributes:
        node: its node of the graph.
        name: its name.
        key_pem: its private key, PEM without a password; it stays in this process.
        certificate_pem: its certificate, as the roster has it.
        listen: HOST:PORT to listen on, and nowhere else; None: this party only calls out.
        hint: what may be wrong where a neighbour that was never heard closes a line; "": nothing
            that is known.
    """

    node: int
    name: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    listen: str | None
    hint: str = ""


class Method(Enum):
    """What a caller may ask for; the values are the names of the calls."""

    HELLO = "hello"
    PUSH = "push"  # the caller sends
    FETCH = "fetch"  # the caller receives


@dataclass(frozen=True)
class Neighbours:
    """The peers that share an edge with this party, by node.

    Attributes:
        listens: whether this party can be reached.
        senders: who is heard here.
        receivers: who hears this party.
    """

    listens: bool
    senders: Mapping[int, Peer]
    receivers: Mapping[int, Peer]

    @classmethod
    def of(cls, own: Self, peers: Iterable[Peer], topology: Topology) -> Neighbours:
        """Pick the neighbours from the roster's peers.

        Raises:
            ConfigError: a neighbour is missing, or neither end of an edge can be reached.
        """
        known = {peer.node: peer for peer in peers if peer.node != own.node}
        senders = [node for node in topology.senders_to(own.node) if node != own.node]
        receivers = [node for node in topology.receivers_from(own.node) if node != own.node]
        if missing := sorted({*senders, *receivers} - set(known)):
            raise ConfigError(
                f"peers: nodes {missing} share an edge with node {own.node} but are not on the "
                "roster; the roster needs one party per node of its graph"
            )
        found = cls(
            own.listen is not None,
            {node: known[node] for node in senders},
            {node: known[node] for node in receivers},
        )
        for peer in found.all():
            if peer.address is None and own.listen is None:
                raise ConfigError(
                    f"address of {peer} and of '{own.name}': neither can be reached, so the edge "
                    "between them cannot be used; give one of them an address or change the graph"
                )
        return found

    def all(self) -> list[Peer]:
        """Return every neighbour once, by ascending node."""
        return [peer for _, peer in sorted({**self.senders, **self.receivers}.items())]

    def calls(self) -> list[tuple[Peer, Method]]:
        """Return the calls that this party makes: one per edge of which it is the dialling end."""
        pushes = [(peer, Method.PUSH) for peer in self.receivers.values() if peer.address]
        # A party that listens is pushed to; one that does not has to ask for its frames.
        senders = [] if self.listens else self.senders.values()
        return pushes + [(peer, Method.FETCH) for peer in senders]


@dataclass(frozen=True)
class PeerStatus:
    """What is known of one peer at one moment: public facts for a status page.

    Attributes:
        lines: open calls with it; 0: not connected.
        last_heard: seconds since the epoch, None: never.
        received: rounds received from it.
        acknowledged: rounds of ours that it has said are safe on its disk.
        bytes_in: bytes that came from it since the start of this process.
        bytes_out: bytes that went to it since the start of this process.
        problem: what went wrong last, "" once all is well again.
        waits_for: parties that keep it waiting, as it says.
    """

    lines: int = 0
    last_heard: float | None = None
    received: int = 0
    acknowledged: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    problem: str = ""
    waits_for: tuple[str, ...] = ()

    @property
    def connected(self) -> bool:
        """Tell whether any call with it is open."""
        return self.lines > 0


class StatusBoard:
    """The status of every neighbour; any thread may read or write.

    Args:
        nodes: the neighbours.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        self._status = {node: PeerStatus() for node in nodes}
        # Silence is measured by a clock that nobody sets.
        self._heard_at: dict[int, float] = {}
        # What was logged of each line since it last worked.
        self._said: dict[tuple[int, Method], set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def of(self, node: int) -> PeerStatus:
        """Return what is known of a neighbour now."""
        with self._lock:
            return self._status[node]

    def all(self) -> dict[int, PeerStatus]:
        """Return what is known of every neighbour now."""
        with self._lock:
            return dict(self._status)

    def silent_since(self, node: int) -> float:
        """Return when this neighbour was last heard, by `time.monotonic`; 0: never."""
        with self._lock:
            return self._heard_at.get(node, 0.0)

    def opened(self, node: int) -> None:
        """Note that a call with this neighbour has passed its hello."""
        with self._lock:
            now = self._status[node]
            self._status[node] = replace(now, lines=now.lines + 1)

    def closed(self, node: int, lasted: bool = True) -> None:
        """Note that such a call has ended; one that lasted has worked."""
        with self._lock:
            now = self._status[node]
            self._status[node] = replace(now, lines=now.lines - 1, waits_for=())
            if lasted:
                self._forget_said(node)

    def heard(self, node: int, size: int) -> None:
        """Note that bytes came from this neighbour."""
        with self._lock:
            now, self._heard_at[node] = self._status[node], time.monotonic()
            self._status[node] = replace(now, last_heard=time.time(), bytes_in=now.bytes_in + size)

    def sent(self, node: int, size: int) -> None:
        """Note that bytes went to this neighbour."""
        with self._lock:
            now = self._status[node]
            self._status[node] = replace(now, bytes_out=now.bytes_out + size)

    def reached(self, node: int, received: int = 0, acknowledged: int = 0) -> None:
        """Note how many rounds came from this neighbour, or were acknowledged by it.

        Whatever the problem was, it is over.
        """
        with self._lock:
            now = self._status[node]
            if received > now.received or acknowledged > now.acknowledged:
                self._forget_said(node)
            if received > now.received:  # it goes on
                now = replace(now, waits_for=())
            self._status[node] = replace(
                now,
                received=max(now.received, received),
                acknowledged=max(now.acknowledged, acknowledged),
                problem="",
            )

    def waits(self, node: int, names: tuple[str, ...]) -> None:
        """Note whom this neighbour waits for, as it says."""
        with self._lock:
            self._status[node] = replace(self._status[node], waits_for=names)

    def trouble(self, node: int, text: str, line: Method = Method.HELLO) -> bool:
        """Note what went wrong with this neighbour; return whether that is to be logged."""
        with self._lock:
            self._status[node] = replace(self._status[node], problem=text)
        return self.is_news(node, text, line)

    def is_news(self, node: int, text: str, line: Method) -> bool:
        """Say whether this is to be logged: not yet said of a line since it last worked.

        A line that is dialled and refused again and again would fill a log.
        """
        with self._lock:
            said = self._said[node, line]
            # Texts may come from the other end: their number has a limit.
            if text in said or len(said) >= _MOST_SAID:
                return False
            said.add(text)
            return True

    def _forget_said(self, node: int) -> None:
        for line in Method:
            self._said.pop((node, line), None)


def missing_in_the_end(
    waited_for: Iterable[str], known: Mapping[str, PeerStatus], own: str
) -> tuple[str, ...]:
    """Return whom those that are waited for wait for, and themselves where they do not.

    Args:
        waited_for: names of parties, neighbours or not.
        known: what each neighbour has said.
        own: the name of this party, which waits for itself least of all.
    """
    found = dict[str, None]()
    for name in waited_for:
        behind = known[name].waits_for if name in known else ()
        found.update(dict.fromkeys(each for each in behind or (name,) if each != own))
    return tuple(found)
