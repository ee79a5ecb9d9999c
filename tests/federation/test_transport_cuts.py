"""Connections that are cut at any byte lose nothing, and who listens in learns nothing."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forwarder import Forwarder
from parties import ROSTER, federation, open_network
from test_party_network import RING, SIZE, at_once, frame_of, play


def through_forwarders(folder: Path, rounds: int, cut_after: int | None) -> list[Forwarder]:
    """Let three parties exchange frames through forwarders; return these."""
    selves, peers = federation(3)
    wires = [Forwarder(own.listen or "", cut_after, seed) for seed, own in enumerate(selves)]
    seen = [replace(peer, address=wire.address) for peer, wire in zip(peers, wires, strict=True)]
    with ExitStack() as stack:
        for wire in wires:
            stack.callback(wire.close)
        parties = [
            stack.enter_context(closing(open_network(own, seen, RING, folder, SIZE)))
            for own in selves
        ]
        at_once([lambda n=n: play(n, range(rounds)) for n in parties])
        at_once([n.finish for n in parties])
    return wires


@pytest.mark.slow
def test_connections_cut_at_random_bytes_lose_no_frame(tmp_path: Path) -> None:
    wires = through_forwarders(tmp_path, rounds=300, cut_after=12_000)
    assert sum(wire.cuts for wire in wires) > 5


@pytest.mark.slow
def test_after_a_partition_that_nobody_is_told_of_the_parties_go_on_within_five_seconds(
    tmp_path: Path,
) -> None:
    selves, peers = federation(3)
    wires = [Forwarder(own.listen or "") for own in selves]
    seen = [replace(peer, address=wire.address) for peer, wire in zip(peers, wires, strict=True)]
    parties = [open_network(own, seen, RING, tmp_path, SIZE) for own in selves]
    at_once([lambda n=n: play(n, range(5)) for n in parties])
    with ThreadPoolExecutor(3) as pool:
        for wire in wires:
            wire.flowing.clear()
        running = [pool.submit(play, network, range(5, 10)) for network in parties]
        time.sleep(6.0)  # three times as long as a line may be silent
        cut_off = not any(future.done() for future in running)
        unconnected = not any(s.connected for n in parties for s in n.status().values())
        healed = time.monotonic()
        for wire in wires:
            wire.flowing.set()
        for future in running:
            future.result(30)
    assert cut_off and unconnected and time.monotonic() - healed < 5.0
    for network, wire in zip(parties, wires, strict=True):
        network.close()
        wire.close()


@pytest.mark.slow
def test_nobody_leaves_before_its_last_word_was_heard(tmp_path: Path) -> None:
    """All that bert says is lost: anna does not know that he has her last frame."""
    selves, peers = federation(3)
    wires = [Forwarder(own.listen or "") for own in selves]
    seen = [replace(peer, address=wire.address) for peer, wire in zip(peers, wires, strict=True)]
    parties = [open_network(own, seen, RING, tmp_path, SIZE) for own in selves]
    at_once([lambda n=n: play(n, range(2)) for n in parties])
    wires[1].answering.clear()
    at_once([lambda n=n: play(n, range(2, 3)) for n in parties])
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(network.finish) for network in parties]
        ends[2].result(15)
        time.sleep(2.0)
        assert not ends[0].done() and parties[0].waiting_for == ("bert",)
        assert not ends[1].done() and parties[1].waiting_for == ("anna",)
        wires[1].answering.set()
        for end in ends:
            end.result(15)
    for network, wire in zip(parties, wires, strict=True):
        network.close()
        wire.close()


def test_who_listens_in_sees_neither_frames_nor_what_is_agreed_on(tmp_path: Path) -> None:
    wires = through_forwarders(tmp_path, rounds=3, cut_after=None)
    for wire in wires:
        assert len(wire.captured) > 3 * SIZE
        secrets = [frame_of(node, t).numpy().tobytes()[:16] for node in range(3) for t in range(3)]
        secrets += [ROSTER.hex().encode(), b"roster", b"release", b"dpcsgp"]
        assert not [text for text in secrets if text in wire.captured]
