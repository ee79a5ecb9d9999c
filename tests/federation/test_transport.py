"""Nothing hostile gets further than an error, and closes its own call and nothing else."""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import contextlib

from parties import QUICK, ROSTER, certificate, federation, open_network, pair
from raw_caller import RING, SIZE, RawCaller, Scene, channel_to, framed, pushed

from dpcsgp.errors import WireError
from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.journal import Holding
from dpcsgp.federation.peers import Peer
from dpcsgp.federation.transport import check_peer

REFUSED, DENIED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("who", ["nobody", "unknown", "same name", "Dora, without an edge"])
def test_who_is_not_a_neighbour_gets_no_byte_of_protocol(scene: Scene, who: str) -> None:
    identity = {
        "nobody": None,
        "unknown": certificate("mallory"),
        "same name": certificate("anna"),
        "Dora, without an edge": pair("dora"),
    }[who]
    with RawCaller(scene.peer, "hello", 0, identity) as caller:
        facts = messages.Facts.now(ROSTER, 0, 1)
        code, _ = caller.say(messages.hello(facts)).refusal()
    assert code is grpc.StatusCode.UNAVAILABLE  # the handshake failed
    assert scene.bert.status()["anna"].bytes_in == 0


def test_a_certificate_that_a_neighbour_signed_is_not_its_own(scene: Scene) -> None:
    # The chain is valid: Carla's certificate is a root, as self-signed ones have to be.
    key, signed = certificate("anna", issuer=pair("carla"))
    with RawCaller(scene.peer, "push", 0, (key, signed)) as caller:
        code, text = caller.refusal()
    assert (code, text) == (DENIED, "this certificate is not on the roster")


@pytest.mark.parametrize(("name", "node", "method"), [("carla", 2, "push"), ("anna", 0, "fetch")])
def test_a_neighbour_speaks_on_its_own_edges_only(
    scene: Scene, name: str, node: int, method: str
) -> None:
    with RawCaller(scene.peer, method, node, pair(name)) as caller:
        code, text = caller.refusal()
    assert code is DENIED and f"may not {method} here" in text


def test_a_neighbour_speaks_in_its_own_name_only(scene: Scene) -> None:
    # Carla may fetch; what she says of herself does not count, her certificate does.
    with RawCaller(scene.peer, "fetch", 2, pair("carla")) as caller:
        facts = messages.Facts.now(ROSTER, 0, 1)
        code, text = caller.say(messages.hello(facts)).refusal()
    assert code is REFUSED and "speaks as node 0 to node 1, but its certificate is that" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"roster": "00"}, "roster '00' there"),
        ({"release": "0.0.1"}, "release '0.0.1' there"),
        ({"protocol": 99}, "protocol 99 there, 2 here"),
        ({"clock": 1.0}, "clock 1 there"),
        ({"clock": float("nan")}, "clock nan there"),
        ({"roster": 3}, "the hello's roster is no str"),
        ({"roster": "00", "release": "9"}, "release '9' there"),
    ],
)
def test_a_hello_that_differs_is_told_what_differs(
    scene: Scene, changes: dict[str, Any], expected: str
) -> None:
    facts = vars(messages.Facts.now(ROSTER, 0, 1))
    with scene.anna("hello") as caller:
        code, text = caller.say(messages.hello(messages.Facts(**{**facts, **changes}))).refusal()
    assert code is REFUSED and expected in text


@pytest.mark.parametrize("body", [b"", b"h", b"h[]", b"h" + b"[" * 4000, b"h{}", b"h" * 5000])
def test_a_hello_that_cannot_be_read_is_refused(scene: Scene, body: bytes) -> None:
    with scene.anna("hello") as caller:
        assert caller.say(body).refusal()[0] is REFUSED


def wrong_frames() -> dict[str, tuple[str, Any]]:
    """Name -> part of the refusal, and the wrong messages after two right frames."""
    good = bytes([2]) * SIZE

    def with_head(**changes: Any) -> Any:
        return lambda held: [framed(held.rounds, good, held.chain, **changes)]

    def mutated(held: Holding) -> list[bytes]:
        message = bytearray(framed(held.rounds, good, held.chain))
        message[-5] ^= 1
        return [bytes(message)]

    return {
        "replayed": ("(replayed)", with_head(round=0)),
        "ahead": ("some before it are missing", with_head(round=3)),
        "another past": ("other bytes than those received here", with_head(before=bytes(32))),
        "oversized": ("1000000000000 bytes announced, every frame", with_head(size=10**12)),
        "too short": ("999 bytes announced", with_head(size=999)),
        "mutated": ("damaged on the way", mutated),
        "too long": (
            "a piece of 1001 bytes, expected 1000",
            lambda held: [framed(held.rounds, good, held.chain) + b"x"],
        ),
        "endless": (
            "expected a frame, got 65537 bytes",
            lambda held: [
                framed(held.rounds, good, held.chain),
                *[messages.piece(bytes(2**16))] * 50,
            ],
        ),
        "trickling": (
            "a piece of 1 bytes, expected 1000",
            lambda held: [framed(held.rounds, good, held.chain)[:-999]],
        ),
        "no frame": ("expected a frame, got 3 bytes", lambda held: [b"xyz"]),
        "empty": ("expected a frame, got 0 bytes", lambda held: [b""]),
        "a holding": ("expected a frame", lambda held: [messages.holding(held)]),
    }


@pytest.mark.parametrize("kind", wrong_frames())
def test_a_wrong_frame_is_refused_by_name_and_not_kept(scene: Scene, kind: str) -> None:
    expected, wrong = wrong_frames()[kind]
    with scene.anna() as caller:
        held = pushed(caller.greet(), 2, SIZE)
        code, text = caller.say(*wrong(held)).refusal()
    assert code is REFUSED and expected in text
    assert scene.received() == (3 if kind == "endless" else 2)
    assert expected in scene.bert.status()["anna"].problem


def test_a_sender_cannot_fill_the_disk_with_rounds_to_come(scene: Scene) -> None:
    with scene.anna() as caller:
        held = pushed(caller.greet(), RING.num_nodes - 1, SIZE)
        pushed_last = framed(held.rounds, bytes(SIZE), held.chain)
        caller.say(pushed_last)
        while messages.parsed_beat(message := caller.hear()) is not None:
            pass
        held = messages.parsed_holding(message)
        code, text = caller.say(framed(held.rounds, bytes(SIZE), held.chain)).refusal()
    assert code is REFUSED and "further ahead than its graph allows" in text
    scene.bert._journal.release(0, bytes(SIZE))  # Bert's own round: there is room for one more


def test_a_message_above_a_megabyte_is_not_read(scene: Scene) -> None:
    with scene.anna(options=[("grpc.max_send_message_length", -1)]) as caller:
        caller.greet()
        code, _ = caller.say(bytes(2**20 + 1)).refusal()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_not_unpacked(scene: Scene) -> None:
    options = [("grpc.default_compression_algorithm", grpc.Compression.Gzip.value)]
    with scene.anna(options=options) as caller:
        facts = messages.Facts.now(ROSTER, 0, 1)
        code, _ = caller.say(messages.hello(facts)).refusal()
    assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("moment", ["before the hello", "after the hello", "within a frame"])
def test_who_falls_silent_loses_its_line(
    scene: Scene, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene.anna() as caller:
        if moment != "before the hello":
            caller.greet()
        if moment == "within a frame":
            held = pushed(caller, 1, SIZE)
            monkeypatch.setattr(messages, "PIECE_BYTES", SIZE - 10)
            caller.say(framed(held.rounds, bytes(SIZE), held.chain)[:-10])
        started = time.monotonic()
        code, text = caller.refusal()
        monkeypatch.undo()
    assert code is grpc.StatusCode.UNAVAILABLE and "nothing was heard for" in text
    assert time.monotonic() - started < QUICK.hello + 2


def test_a_reader_that_does_not_read_costs_one_line_and_little_memory(tmp_path: Path) -> None:
    size, rounds = 2**20, 40
    selves, peers = federation(4)
    bert = open_network(selves[1], peers, RING, tmp_path, size)
    for round_ in range(rounds):
        bert._journal.release(round_, os.urandom(size))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    caller = RawCaller(peers[1], "fetch", 2, pair("carla")).greet()
    chain = bert._journal.own_chain(0)
    assert chain is not None
    caller.say(messages.holding(Holding(0, chain)))
    deadline = time.monotonic() + 10
    while bert.status()["carla"].connected and time.monotonic() < deadline:
        caller.say(messages.beat())  # alive, but it reads nothing
        time.sleep(0.1)
    status = bert.status()["carla"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    caller.__exit__()
    bert.close()
    assert not status.connected
    assert status.bytes_out < 16 * 2**20 and grown < 32 * 2**10  # KiB


def test_one_neighbour_cannot_open_calls_without_end(scene: Scene) -> None:
    callers = [scene.anna("hello") for _ in range(40)]
    time.sleep(1.0)
    codes = [c.call.code() for c in callers if not c.call.is_active()]
    assert codes.count(DENIED) == 40 - 6
    with RawCaller(scene.peer, "fetch", 2, pair("carla")) as carla:
        carla.greet()  # others are not concerned
    for caller in callers:
        caller.__exit__()
    time.sleep(0.3)


def test_the_newest_line_of_an_edge_counts(scene: Scene) -> None:
    with scene.anna() as older, scene.anna() as newer:
        pushed(older.greet(), 1, SIZE)
        held = messages.parsed_holding(newer.greet().hear())
        # Not as one that went well: whatever it said last may not have been read.
        code, why = older.refusal()
        assert code is grpc.StatusCode.UNAVAILABLE and "has called again" in why
        newer.say(framed(held.rounds, bytes(SIZE), held.chain))
        assert messages.parsed_holding(newer.hear()).rounds == 2


def test_idle_connections_disturb_nobody_and_are_closed(scene: Scene) -> None:
    host, port = (scene.peer.address or "").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    for connection in idle[:100]:
        connection.send(b"GET / HTTP/1.1\r\n")
    with scene.anna() as caller:
        assert pushed(caller.greet(), 3, SIZE).rounds == 3
    deadline = time.monotonic() + QUICK.hello + 5
    for connection in idle:
        connection.settimeout(max(deadline - time.monotonic(), 0.1))
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass
        connection.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of open files")
def test_strangers_cannot_use_up_the_files_that_a_party_may_open(scene: Scene) -> None:
    host, port = (scene.peer.address or "").split(":")
    before = len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection((host, int(port))) for _ in range(400)]
    time.sleep(0.5)
    assert len(os.listdir("/proc/self/fd")) < before + 400 + 300  # both ends are in this process
    # They are shown the door when their handshake takes too long, and neighbours get in again.
    time.sleep(QUICK.hello)
    with scene.anna() as caller:
        assert pushed(caller.greet(), 1, SIZE).rounds == 1
    for connection in idle:
        connection.close()


def listening_addresses(port: int) -> set[str]:
    """Return the addresses on which this machine listens at a port, as the kernel writes them."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        words[1].split(":")[0]
        for words in lines
        if words[3] == "0A" and int(words[1].split(":")[1], 16) == port
    }


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's table of sockets")
def test_a_party_listens_where_it_was_told_to_and_nowhere_else(scene: Scene) -> None:
    port = int((scene.peer.address or "").split(":")[1])
    found = listening_addresses(port)
    # 127.0.0.1, or the same as an address of version 6
    assert len(found) == 1 and found < {"0100007F", "0000000000000000FFFF00000100007F"}


def test_noise_of_a_neighbour_is_refused_message_by_message(scene: Scene) -> None:
    chance = random.Random(1)
    for _ in range(60):
        with scene.anna(chance.choice(["push", "hello"])) as caller:
            if chance.random() < 0.5:
                caller.greet()
            noise = [chance.randbytes(chance.randrange(200)) for _ in range(5)]
            starts = [bytes([chance.choice(b"hafpbrx")]) + body for body in noise]
            code, _ = caller.say(*starts).refusal()
            assert code in (REFUSED, grpc.StatusCode.OK)
    assert scene.received() == 0


def mutated(message: bytes, chance: random.Random) -> bytes:
    """Return a message with some bytes changed, cut off, added or repeated."""
    body = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(body))
        kind = chance.randrange(4)
        if kind == 0:
            body[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del body[max(place, 1) :]
        elif kind == 2:
            body += chance.randbytes(chance.randrange(1, 50))
        else:
            body[place:place] = body[: chance.randrange(1, 50)]
    return bytes(body)


@pytest.mark.parametrize(
    "count", [200, pytest.param(100_000, marks=[pytest.mark.stress, pytest.mark.timeout(3600)])]
)
def test_mutated_and_replayed_frames_are_refused_each_time(scene: Scene, count: int) -> None:
    chance, channel = random.Random(2), channel_to(scene.peer, pair("anna"))
    lost: list[str] = []
    with scene.anna(channel=channel) as caller:
        first = messages.parsed_holding(caller.greet().hear())
        right = framed(0, bytes(SIZE), first.chain)
        held = messages.parsed_holding(caller.say(right).hear())
        next_right = framed(1, bytes(SIZE), held.chain)
    for _ in range(count):
        wrong = chance.choice([right, mutated(right, chance), mutated(next_right, chance)])
        if wrong in (next_right, messages.beat()):
            continue
        code, text = refusal_of(scene, channel, wrong)
        if code is grpc.StatusCode.UNAVAILABLE:  # a busy machine: the connection fell silent
            lost.append(text)
            code, text = refusal_of(scene, channel, wrong)
        assert code is REFUSED, text
    assert scene.received() == 1 and len(lost) <= 1 + count / 1000, lost
    channel.close()


def refusal_of(scene: Scene, channel: Any, wrong: bytes) -> tuple[grpc.StatusCode, str]:
    """Send a wrong frame in a new call; return how the call was ended."""
    with scene.anna(channel=channel) as caller:
        with contextlib.suppress(grpc.RpcError):
            caller.greet().say(wrong)
        return caller.refusal()


def test_an_address_that_swallows_packets_is_given_up_soon() -> None:
    selves, peers = federation(4)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = deaf.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for knock in waiting:  # fill its queue: further packets are dropped
            knock.setblocking(False)
            knock.connect_ex(address)
        peer = Peer(1, "bert", peers[1].certificate_pem, f"127.0.0.1:{address[1]}")
        started = time.monotonic()
        with pytest.raises(WireError, match="party 'bert'"):
            check_peer(selves[0], peer, ROSTER, seconds=15.0)
        assert time.monotonic() - started < 6.0
        for knock in waiting:
            knock.close()


def test_a_party_is_checked_by_one_call(scene: Scene) -> None:
    anna = scene.selves[0]
    check_peer(anna, scene.peer, ROSTER)
    with pytest.raises(WireError, match="roster"):
        check_peer(anna, scene.peer, b"another roster")
    with pytest.raises(WireError, match=r"party 'bert' .* at 127\.0\.0\.1:1: .*nobody listens"):
        check_peer(anna, Peer(1, "bert", scene.peer.certificate_pem, "127.0.0.1:1"), ROSTER, 2.0)
    # Somebody else answers at that address.
    impostor = Peer(1, "bert", certificate("bert")[1], scene.peer.address)
    with pytest.raises(WireError, match="certificate is not the one in the roster"):
        check_peer(anna, impostor, ROSTER, 2.0)
    # A program that is no party.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_plainly, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(WireError, match="what answers there speaks no TLS"):
            check_peer(anna, Peer(1, "bert", scene.peer.certificate_pem, address), ROSTER, 2.0)


def _answer_plainly(listener: socket.socket) -> None:
    """Be a web server without TLS until nobody listens any more."""
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_beat_says_who_is_waited_for() -> None:
    assert messages.parsed_beat(messages.beat()) == ()
    assert messages.parsed_beat(messages.beat(["north", "west"])) == ("north", "west")
    many = [f"party-{number}" for number in range(500)]
    found = messages.parsed_beat(messages.beat(many))
    assert found is not None and 100 < len(found) < 500 and list(found) == many[: len(found)]
    assert messages.parsed_beat(messages.heard(3)) is None


@pytest.mark.parametrize(
    "message", [b"b\xff", b"b\x00", b"b\n", b"bnorth\n", b"b" + 1025 * b"x", b"b\x1b[2J"]
)
def test_a_beat_holds_names_or_is_refused(message: bytes) -> None:
    with pytest.raises(WireError, match="a beat cannot be read"):
        messages.parsed_beat(message)
