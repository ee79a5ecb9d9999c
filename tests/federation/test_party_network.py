"""A network of parties gives what the simulator gives, whoever dials, stops or comes back."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from parties import QUICK, federation, networks, open_network

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import frames
from dpcsgp.compression.parsing import parse_compressor
from dpcsgp.errors import ConfigError, JournalError, RestoredBackupError
from dpcsgp.federation import party_network
from dpcsgp.federation.party_network import PartyNetwork, WaitStoppedError
from dpcsgp.federation.transport_ends import Timing
from dpcsgp.graphs import Topology, directed_ring, from_edges
from dpcsgp.network import Simulator
from dpcsgp.network.health import SilentPeerError
from dpcsgp.randomness import PublicRandomness
from dpcsgp.training import TrainingNetwork

RING = directed_ring(3)  # 0 -> 1 -> 2 -> 0
BOTH_WAYS = from_edges(3, [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)])
SIZE = 100


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run works in threads of their own; return what they return."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(60) for future in [pool.submit(work) for work in works]]


def frame_of(node: int, round_: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * node + round_)
    return torch.randint(0, 256, (1, SIZE), dtype=torch.uint8, generator=generator)


def play(network: PartyNetwork, rounds: range) -> None:
    """Exchange made-up frames and check what comes."""
    for round_ in rounds:
        received = network.exchange(frame_of(network.nodes[0], round_))
        expected = torch.cat([frame_of(sender, round_) for sender in network.senders])
        assert torch.equal(received, expected), round_


def resume_at(network: PartyNetwork, round_: int) -> PartyNetwork:
    network.traffic.restore(bytes_per_edge=0, rounds=round_, bytes_sent=[0])
    return network


def train(
    network: TrainingNetwork, topology: Topology, spec: str, steps: int = 12, dim: int = 300
) -> Any:
    """Train on made-up quadratic losses, one per node; return the last state."""
    targets_AD = torch.randn(topology.num_nodes, dim, generator=torch.Generator().manual_seed(1))
    method = DPCSGP(parse_compressor(spec), learning_rate=0.1, mixing_rate=0.3)
    random = PublicRandomness(0, network.nodes)
    state = method.init(torch.zeros(len(network.nodes), dim))
    for _ in range(steps):
        gradient_ND = method.model(state) - targets_AD[list(network.nodes)]
        state = method.step(state, gradient_ND, network, random)
    return state


@pytest.mark.parametrize("outbound_only", [(), (0,), (2,)])
@pytest.mark.parametrize("spec", ["rot:1", "top:0.1"])
@pytest.mark.parametrize("topology", [RING, BOTH_WAYS], ids=["ring", "both ways"])
def test_three_parties_are_the_simulator_to_the_last_bit(
    topology: Topology, spec: str, outbound_only: Sequence[int], tmp_path: Path
) -> None:
    simulator = Simulator(topology)
    expected = train(simulator, topology, spec)
    size = frames.frame_bytes(parse_compressor(spec).num_bytes(300))
    with networks(topology, tmp_path, size, outbound_only) as parties:
        states = at_once([lambda n=n: train(n, topology, spec) for n in parties])
        for name in ("x_ND", "x_hat_ND", "pull_ND", "y_N1"):
            real = torch.cat([getattr(state, name) for state in states])
            assert torch.equal(real, getattr(expected, name)), name
        sent = [network.traffic.bytes_sent[0] for network in parties]
    assert sent == simulator.traffic.bytes_sent


def test_frames_of_many_pieces_arrive_whole(tmp_path: Path) -> None:
    size = 5 * 2**18 + 17
    with networks(RING, tmp_path, size) as parties:
        content = [torch.randint(0, 256, (1, size), dtype=torch.uint8) for _ in parties]
        received = at_once([lambda n=n: n.exchange(content[n.nodes[0]]) for n in parties])
        for network, got in zip(parties, received, strict=True):
            assert torch.equal(got, torch.cat([content[sender] for sender in network.senders]))


def test_parties_start_in_any_order_and_on_any_day(tmp_path: Path) -> None:
    selves, peers = federation(3)

    def late(node: int) -> None:
        time.sleep(0.8 * node)
        with closing(open_network(selves[node], peers, RING, tmp_path, SIZE)) as network:
            play(network, range(3))
            network.finish()

    at_once([lambda node=node: late(node) for node in range(3)])


def test_a_replay_needs_no_network(tmp_path: Path) -> None:
    selves, peers = federation(3)
    with networks(RING, tmp_path, SIZE) as parties:
        at_once([lambda n=n: play(n, range(6)) for n in parties])
        at_once([n.finish for n in parties])
    # The others are away: what they sent is on the disk, from the checkpoint's round on.
    with closing(open_network(selves[1], peers, RING, tmp_path, SIZE, patience=0.5)) as alone:
        play(resume_at(alone, 2), range(2, 6))
        with pytest.raises(SilentPeerError, match="party 'carla'"):
            alone.exchange(frame_of(1, 6))


def test_a_replay_with_another_frame_is_refused_and_sends_nothing(tmp_path: Path) -> None:
    selves, peers = federation(3)
    with networks(RING, tmp_path, SIZE) as parties:
        at_once([lambda n=n: play(n, range(3)) for n in parties])
    with closing(open_network(selves[1], peers, RING, tmp_path, SIZE)) as again:
        resume_at(again, 2)
        with pytest.raises(JournalError, match="round 2: the frame computed now differs"):
            again.exchange(frame_of(1, 9))


@pytest.mark.slow
def test_a_party_comes_back_and_the_others_go_on_within_five_seconds(tmp_path: Path) -> None:
    selves, peers = federation(3)
    opened = [open_network(own, peers, RING, tmp_path, SIZE, timing=Timing()) for own in selves]
    at_once([lambda n=n: play(n, range(3)) for n in opened])
    opened[2].close()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(play, network, range(3, 6)) for network in opened[:2]]
        time.sleep(5.0)  # the others' pauses between attempts are as long as they get
        assert not any(future.done() for future in waiting)
        assert opened[0].waiting_for == ("carla",) and not opened[1].status()["carla"].connected
        came = time.monotonic()
        opened[2] = resume_at(open_network(selves[2], peers, RING, tmp_path, SIZE), 3)
        pool.submit(play, opened[2], range(3, 6)).result(30)
        for future in waiting:
            future.result(30)
    assert time.monotonic() - came < 5.0
    for network in opened:
        network.close()


@pytest.mark.slow
def test_a_party_that_comes_back_knocks_and_need_not_wait_to_be_dialled(tmp_path: Path) -> None:
    selves, peers = federation(3)
    rare = Timing(first_pause=30.0, longest_pause=60.0)
    first = open_network(selves[0], peers, RING, tmp_path, SIZE, timing=rare)
    time.sleep(1.0)  # it has dialled in vain, and would do so again half a minute later
    assert first.status()["bert"].problem
    with closing(first), closing(open_network(selves[1], peers, RING, tmp_path, SIZE)):
        deadline = time.monotonic() + 8
        while not first.status()["bert"].connected:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_waiting_costs_almost_no_processor_time_and_is_visible(tmp_path: Path) -> None:
    selves, peers = federation(3)
    slow = Timing(longest_pause=3.0)
    network = open_network(selves[0], peers, RING, tmp_path, SIZE, timing=slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(network.exchange, frame_of(0, 0))
        time.sleep(3.0)
        before = time.process_time()
        time.sleep(3.0)
        used = time.process_time() - before
        status = network.status()
        network.stop()
        with pytest.raises(WaitStoppedError):
            waiting.result(10)
    network.close()
    assert used / 3.0 < 0.05
    assert network.waiting_for == ("bert",)
    assert not status["bert"].connected and status["bert"].problem


@pytest.mark.slow
def test_patience_ends_with_the_name_of_who_is_silent_not_of_who_is_slow(tmp_path: Path) -> None:
    selves, peers = federation(3)
    opened = [open_network(own, peers, RING, tmp_path, SIZE, patience=1.5) for own in selves]
    at_once([lambda n=n: play(n, range(1)) for n in opened])
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(play, network, range(1, 2)) for network in opened[1:]]
        # Node 0 computes for long, but gives signs of life.
        time.sleep(4.0)
        slow_sender_is_waited_for = not waiting[0].done()
        play(opened[0], range(1, 2))
        for future in waiting:
            future.result(10)
    assert slow_sender_is_waited_for
    opened[0].close()
    with pytest.raises(SilentPeerError, match=r"party 'anna' \(node 0\) .*--patience"):
        opened[1].exchange(frame_of(1, 2))
    for network in opened[1:]:
        network.close()


def test_a_party_restored_from_an_older_backup_releases_nothing(tmp_path: Path) -> None:
    selves, peers = federation(3)
    opened = [open_network(own, peers, RING, tmp_path, SIZE) for own in selves]
    at_once([lambda n=n: play(n, range(2)) for n in opened])
    opened[0].close()
    shutil.copytree(tmp_path / "anna", tmp_path / "backup")
    opened[0] = resume_at(open_network(selves[0], peers, RING, tmp_path, SIZE), 2)
    at_once([lambda n=n: play(n, range(2, 4)) for n in opened])
    at_once([n.finish for n in opened])
    opened[0].close()
    shutil.rmtree(tmp_path / "anna")
    shutil.move(tmp_path / "backup", tmp_path / "anna")
    before = opened[1]._journal.holding(0)
    restored = resume_at(open_network(selves[0], peers, RING, tmp_path, SIZE), 2)
    with pytest.raises(RestoredBackupError, match=r"'bert' .* holds 4 rounds .* has 2"):
        restored.exchange(frame_of(0, 77))
    assert restored._journal.released == 2 and opened[1]._journal.holding(0) == before
    deadline = time.monotonic() + 10
    while "holds 4 rounds" not in opened[1].status()["anna"].problem:
        assert time.monotonic() < deadline, "the others are told, too"
        time.sleep(0.05)
    for network in (restored, *opened[1:]):
        network.close()


def test_no_new_frame_is_released_before_every_receiver_has_spoken(tmp_path: Path) -> None:
    star = from_edges(3, [(0, 1), (0, 2), (1, 0), (2, 0)])
    selves, peers = federation(3)
    with (
        closing(open_network(selves[0], peers, star, tmp_path, SIZE, patience=1.5)) as anna,
        closing(open_network(selves[1], peers, star, tmp_path, SIZE)),
        pytest.raises(SilentPeerError, match=r"'carla'.*word of what has arrived"),
    ):
        anna.exchange(frame_of(0, 0))
    assert anna._journal.released == 0


def test_values_of_all_are_public_facts_or_the_own_value(tmp_path: Path) -> None:
    selves, peers = federation(3)
    with closing(open_network(selves[0], peers, RING, tmp_path, SIZE, steps=40)) as network:
        assert network.gather_values("remaining releases", 7) == [40]
        assert network.gather_values("whole checkpoints", [10, 20]) == [[10, 20]]


def test_a_frame_of_another_size_than_planned_is_refused_before_it_is_released(
    tmp_path: Path,
) -> None:
    selves, peers = federation(3)
    with closing(open_network(selves[0], peers, RING, tmp_path, SIZE + 1)) as network:
        with pytest.raises(ConfigError, match="has 100 bytes, the plan says 101"):
            network.exchange(frame_of(0, 0))
        assert network._journal.released == 0


def test_an_edge_between_two_parties_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    selves, peers = federation(3, outbound_only=[0, 1])
    with pytest.raises(ConfigError, match=r"'bert' .*'anna': neither can be reached"):
        open_network(selves[0], peers, RING, tmp_path, SIZE)


def test_an_address_in_use_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    selves, peers = federation(3)
    threads = threading.active_count()
    with closing(open_network(selves[0], peers, RING, tmp_path, SIZE)):
        twin = tmp_path / "twin"
        with pytest.raises(ConfigError, match=r"listen = .*cannot be listened on"):
            open_network(selves[0], peers, RING, twin, SIZE)
    open_network(selves[0], peers, RING, twin, SIZE).close()  # the journal is free
    time.sleep(0.2)
    assert threading.active_count() <= threads + 1  # gRPC keeps one of its own


@pytest.mark.slow
def test_a_party_that_was_killed_at_the_end_does_not_wait_for_those_who_have_left(
    tmp_path: Path,
) -> None:
    selves, peers = federation(3)
    plan: dict[str, Any] = {"size_of_round": lambda round_: SIZE if round_ < 2 else 0}
    with networks(RING, tmp_path, SIZE, **plan) as parties:
        at_once([lambda n=n: play(n, range(2)) for n in parties])
        at_once([n.finish for n in parties])
    started = time.monotonic()
    with closing(open_network(selves[0], peers, RING, tmp_path, SIZE, **plan)) as again:
        play(resume_at(again, 1), range(1, 2))
        again.finish()
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_who_waits_for_those_who_have_ended_is_told_how_to_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed just before the last acknowledgement was written: nobody will ever answer."""
    monkeypatch.setattr("dpcsgp.federation.party_network._FAREWELL_SECONDS", 0.5)
    selves, peers = federation(3)
    plan: dict[str, Any] = {"size_of_round": lambda round_: SIZE if round_ < 2 else 0}
    with networks(RING, tmp_path, SIZE, **plan) as parties:
        at_once([lambda n=n: play(n, range(2)) for n in parties])
        at_once([n.finish for n in parties])
    (tmp_path / "anna" / "acknowledged.json").unlink()
    said: list[str] = []
    with closing(open_network(selves[0], peers, RING, tmp_path, SIZE, **plan)) as again:
        play(resume_at(again, 1), range(1, 2))

        def hear(text: str) -> None:
            said.append(text)
            again.stop()

        with pytest.raises(WaitStoppedError, match="bert"):
            again.finish(hear)
    assert len(said) == 1
    assert "bert has not confirmed" in said[0] and "Ctrl-C" in said[0]


def test_checkpoints_let_old_frames_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpcsgp.federation.frame_log._SEGMENT_BYTES", 1)
    with networks(RING, tmp_path, SIZE, timing=QUICK) as parties:
        at_once([lambda n=n: play(n, range(8)) for n in parties])
        at_once([n.finish for n in parties])
        for network in parties:
            network.forget_before(6)
        for name in ("anna/outbox", "anna/inbox-2", "bert/inbox-0", "carla/outbox"):
            assert [path.stem[-1] for path in sorted((tmp_path / name).iterdir())] == ["6", "7"]


@pytest.mark.slow
def test_who_is_missing_in_the_end_is_said_along_the_edges(tmp_path: Path) -> None:
    """Anna hears bert, bert hears carla, carla hears dora, who is not there."""
    ring = from_edges(4, [(1, 0), (2, 1), (3, 2), (0, 3)])
    selves, peers = federation(4)
    opened = [open_network(own, peers, ring, tmp_path, SIZE) for own in selves]
    at_once([lambda n=n: play(n, range(1)) for n in opened])
    opened[3].close()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(play, network, range(1, 6)) for network in opened[:3]]
        ended = time.monotonic() + 20
        while opened[0].status()["bert"].waits_for != ("dora",) and time.monotonic() < ended:
            time.sleep(0.1)
        seen = [network.waiting_for for network in opened[:3]]
        roots = [network._transport._desk.waiting() for network in opened[:3]]
        for network in opened[:3]:
            network.stop()
        for future in waiting:
            with pytest.raises(WaitStoppedError):
                future.result(10)
    for network in opened[:3]:
        network.close()
    assert seen[0] == ("bert",) and roots == [("dora",)] * 3


@pytest.mark.slow
def test_a_sender_that_never_confirms_cannot_keep_a_party_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats and beats: silence is not what ends this wait."""
    monkeypatch.setattr(party_network, "_COURTESY_SECONDS", 4.0)
    monkeypatch.setattr(party_network, "_FAREWELL_SECONDS", 1.0)
    said: list[str] = []
    with networks(RING, tmp_path, SIZE) as parties:
        monkeypatch.setattr(parties[1]._journal, "hear_confirmation", lambda *words: None)
        at_once([lambda n=n: play(n, range(2)) for n in parties])
        started = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            ends = [pool.submit(network.finish, said.append) for network in parties]
            for end in ends:
                end.result(15)
    assert 4.0 <= time.monotonic() - started < 12
    assert any("this party's part is done; anna" in text for text in said), said


def test_a_beat_shows_names_of_the_roster_only(tmp_path: Path) -> None:
    with networks(RING, tmp_path, SIZE) as parties:
        desk = parties[0]._transport._desk
        assert desk.on_roster(["bert", "run `curl` now", "bert", "carla"]) == ("bert", "carla")
