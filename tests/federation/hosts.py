"""Hosts in network namespaces, and between them a network that delays, loses, reorders and cuts.

Each host is a namespace with one interface (TUN). What leaves it is read here, packet by packet,
and written to the interface of the host that it is meant for, if and when the weather allows. So
TCP meets real loss and real reordering, without help of the kernel (many have no netem). Needs
Linux, root, iproute2 and /dev/net/tun; no packet leaves the namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TCP, SYN, ACK = 6, 0x02, 0x10
PORT = 7400


@dataclass
class Weather:
    """What happens to packets now; may be changed at any moment.

    Attributes:
        delay: seconds from host to host.
        spread: up to so many seconds more, packet by packet: later ones overtake.
        loss: share of packets that vanish.
        apart: hosts that cannot reach, or be reached by, those outside of this set.
        closed: hosts behind a firewall that drops every connection from outside.
    """

    delay: float = 0.0
    spread: float = 0.0
    loss: float = 0.0
    apart: frozenset[int] = frozenset()
    closed: frozenset[int] = frozenset()


@dataclass
class Hosts:
    """The hosts and the network between them.

    Attributes:
        names: of the namespaces.
        weather: what happens to packets now.
        heard: what went over each TCP connection and direction, if `listening`.
        listening: whether to keep what passes.
        counts: packets that were forwarded, lost, cut off and refused.
    """

    names: list[str]
    weather: Weather = field(default_factory=Weather)
    heard: dict[bytes, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    listening: bool = False
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def address(self, host: int, port: int = PORT) -> str:
        """Return where a host listens."""
        return f"10.78.0.{host + 1}:{port}"

    def limit_rate(self, host: int, rate: str) -> None:
        """Limit what leaves a host, for example to "4mbit"."""
        words = f"qdisc replace dev net0 root tbf rate {rate} burst 16kb latency 400ms"
        subprocess.run(["tc", "-n", self.names[host], *words.split()], check=True)


@contextmanager
def hosts(count: int, seed: int = 0) -> Iterator[Hosts]:
    """Make hosts inside of a block, or skip the test where that is impossible."""
    made = Hosts([f"dpcsgp-{os.getpid()}-{host}" for host in range(count)])
    with ExitStack() as stack:
        try:
            wires = [stack.enter_context(_host(name, host)) for host, name in enumerate(made.names)]
        except OSError as error:
            pytest.skip(f"no hosts in network namespaces: {error}")
        ending = threading.Event()
        network = threading.Thread(target=_carry, args=(made, wires, random.Random(seed), ending))
        network.start()
        stack.callback(network.join)
        stack.callback(ending.set)
        yield made


def enter(namespace: str) -> None:
    """Move this thread, and the threads that it will start, into a namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns {namespace}: {os.strerror(number)}")


def can_call(namespace: str, address: str, seconds: float = 2.0) -> bool:
    """Try to open a TCP connection from a host."""
    found: list[bool] = []

    def call() -> None:
        enter(namespace)
        host, port = address.split(":")
        try:
            socket.create_connection((host, int(port)), seconds).close()
        except OSError:
            found.append(False)
        else:
            found.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def _host(name: str, number: int) -> Iterator[int]:
    """Make a namespace with one interface; yield the other end of its wire."""
    if sys.platform != "linux" or os.getuid() != 0 or not Path("/dev/net/tun").exists():
        raise OSError("needs Linux, root and /dev/net/tun")
    _ip(f"netns add {name}")
    try:
        wire = _in_namespace(name)
        try:
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} address add 10.78.0.{number + 1}/24 dev net0")
            _ip(f"-n {name} link set net0 up")
            yield wire
        finally:
            os.close(wire)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {words}: {done.stderr.strip()}")


def _in_namespace(name: str) -> int:
    """Open an interface `net0` in a namespace, in a thread that nothing else runs in."""
    found: list[int | OSError] = []

    def open_wire() -> None:
        try:
            enter(name)
            wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH", b"net0", IFF_TUN | IFF_NO_PI))
            found.append(wire)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=open_wire)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _carry(made: Hosts, wires: list[int], chance: random.Random, ending: threading.Event) -> None:
    """Be the network until told to end."""
    due: list[tuple[float, int, int, bytes]] = []  # when, number, to which host, packet
    number, host_of = 0, {wire: host for host, wire in enumerate(wires)}
    while not ending.is_set():
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, to, packet = heapq.heappop(due)
            with suppress(BlockingIOError, OSError):
                os.write(wires[to], packet)
        pause = min(0.2, due[0][0] - now) if due else 0.2
        for wire in select.select(wires, [], [], max(pause, 0.0))[0]:
            for packet in _packets(wire):
                to = _destination(made, host_of[wire], packet, chance)
                if to is None:
                    continue
                weather = made.weather
                when = time.monotonic() + weather.delay + chance.uniform(0, weather.spread)
                number += 1
                heapq.heappush(due, (when, number, to, packet))


def _packets(wire: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        while True:
            yield os.read(wire, 65535)


def _destination(made: Hosts, sender: int, packet: bytes, chance: random.Random) -> int | None:
    """Return where a packet goes; None: nowhere."""
    weather = made.weather
    if packet[0] >> 4 != 4 or packet[16:19] != bytes([10, 78, 0]):
        return None
    to = packet[19] - 1
    if not 0 <= to < len(made.names):
        return None
    if (sender in weather.apart) != (to in weather.apart):
        fate = "cut off"
    elif to in weather.closed and _calls(packet):
        fate = "refused"
    elif chance.random() < weather.loss:
        fate = "lost"
    else:
        fate = "forwarded"
    made.counts[fate] += 1
    if fate != "forwarded":
        return None
    if made.listening:
        _listen(made, packet)
    return to


def _calls(packet: bytes) -> bool:
    """Tell whether a packet asks for a new TCP connection."""
    flags = packet[4 * (packet[0] & 15) + 13]
    return packet[9] == TCP and flags & SYN > 0 and not flags & ACK


def _listen(made: Hosts, packet: bytes) -> None:
    start = 4 * (packet[0] & 15)
    if packet[9] == TCP:
        head = 4 * (packet[start + 12] >> 4)
        made.heard[packet[12:20] + packet[start : start + 4]] += packet[start + head :]
