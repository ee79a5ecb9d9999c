"""Heartbeats, causes, limits and the handshake, with threads in the place of processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dpcsgp.errors import ConfigError, DpcsgpError
from dpcsgp.network import handshake as handshake_module
from dpcsgp.network.board import Board, Seal
from dpcsgp.network.handshake import handshake
from dpcsgp.network.health import Health, SilentPeerError, announce, exit_barrier, known_cause
from dpcsgp.network.torch_distributed import ProcessEnvironment, serve_store

TIMEOUT = 2.0


class ProcessContext:
    """A store and the health of some ranks, three nodes each."""

    def __init__(self, world_size: int) -> None:
        self._server = serve_store()
        self.place = ProcessEnvironment(0, world_size, "127.0.0.1", self._server.port)
        self.ended: list[str] = []
        self.healths = [self.join(rank) for rank in range(world_size)]

    def join(self, rank: int) -> Health:
        nodes = [range(3 * other, 3 * other + 3) for other in range(self.place.world_size)]
        return Health(self.open_store, rank, nodes, TIMEOUT, self.ended.append)

    def open_store(self) -> Any:
        return self.place.open_store(10)


@pytest.fixture
def party() -> Iterator[ProcessContext]:
    party = ProcessContext(4)
    time.sleep(3 * party.healths[0].interval)
    yield party
    for health in party.healths:
        health.stop()


def test_the_stopped_rank_is_named_and_not_the_one_that_waits_for_it(
    party: ProcessContext, caplog: pytest.LogCaptureFixture
) -> None:
    party.healths[3].stop()  # 0 waits for 1, 1 for 2, 2 for 3, and 3 beats no more
    for rank in (0, 1, 2):
        party.healths[rank].waiting_for = rank + 1
    with caplog.at_level(logging.WARNING, "dpcsgp.network"):
        error = party.healths[0].diagnose(1)
    assert "nodes 9 to 11 (rank 3) went silent" in str(error)
    assert "rank 0: lost a peer, rank 3" in caplog.messages


def test_a_rank_that_is_alive_but_stuck_is_named_as_such(party: ProcessContext) -> None:
    party.healths[1].waiting_for = 2
    error = party.healths[0].diagnose(1)
    assert "nodes 6 to 8 (rank 2) is alive but" in str(error)


def test_messages_tell_the_time_that_was_waited(party: ProcessContext) -> None:
    health = party.healths[0]
    with health.limit() as deadline:  # the whole patience: 60 % of the time-out
        time.sleep(deadline - time.monotonic())
        text = str(health.diagnose(1))
    assert "nodes 3 to 5 (rank 1) is alive but sent nothing for 1.2 s" in text
    assert "60 % of network.timeout_seconds = 2" in text


def test_a_connection_that_breaks_early_is_not_called_a_long_silence(party: ProcessContext) -> None:
    with party.healths[0].limit():
        time.sleep(0.3)
        assert "is alive but a connection broke after a wait of 0.3 s" in str(
            party.healths[0].diagnose(1)
        )


def test_a_rank_that_was_killed_is_reported_with_the_time_that_passed(
    party: ProcessContext,
) -> None:
    party.healths[1].stop()
    with party.healths[0].limit():
        time.sleep(0.3)
        text = str(party.healths[0].diagnose(1))
    assert (
        "nodes 3 to 5 (rank 1) went silent: no heartbeat for 0.4 s, after a wait of 0.3 s" in text
    )


def test_a_rank_that_was_restarted_alone_is_named_as_such(party: ProcessContext) -> None:
    for rank, health in enumerate(party.healths):
        health.nonce, health.nonces = f"life {rank}", [f"life {other}" for other in range(4)]
    party.healths[2].stop()
    party.healths[2] = party.join(2)  # beats again, and belongs to no handshake
    time.sleep(3 * party.healths[2].interval)
    assert "nodes 6 to 8 (rank 2) was restarted alone" in str(party.healths[0].diagnose(2))


def test_everybody_repeats_the_first_cause(party: ProcessContext) -> None:
    board = Board(party.open_store(), 2)
    assert known_cause(board) is None
    assert announce(board, "the first", 2).text == "the first"
    assert announce(board, "the second", 1) == ("the first", 2)
    assert str(party.healths[3].diagnose(0)) == "the first"
    time.sleep(3 * party.healths[1].interval)
    with pytest.raises(SilentPeerError, match="the first"):
        party.healths[1].raise_if_failed()


def test_a_wait_without_end_ends_the_process(party: ProcessContext) -> None:
    health = party.healths[0]
    with health.limit() as deadline:
        health.waiting_for = 1
        assert deadline - time.monotonic() == pytest.approx(0.6 * TIMEOUT, abs=0.1)
        time.sleep(TIMEOUT)
    assert party.ended
    assert "no answer from it or from nodes 3 to 5 (rank 1) for 1." in party.ended[0]


def test_work_outside_a_wait_may_take_as_long_as_it_likes(party: ProcessContext) -> None:
    with party.healths[0].limit():
        pass
    time.sleep(1.2 * TIMEOUT)
    assert party.ended == []


def test_the_host_of_the_store_stays_until_the_others_have_gone(party: ProcessContext) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        host = pool.submit(exit_barrier, Board(party.open_store(), 0), 2, 5.0)
        time.sleep(0.4)
        assert not host.done()
        exit_barrier(Board(party.open_store(), 1), 2, 0)
        host.result()
    assert 0.4 < time.monotonic() - began < 2


def hands(
    party: ProcessContext,
    facts: list[dict[str, object]],
    world_sizes: list[int],
    seconds: float = 1.0,
    key: bytes | None = bytes(32),
) -> list[Any]:
    """Let each rank shake hands with its facts; return keys or errors."""

    def one(rank: int) -> Any:
        try:
            board = Board(party.open_store(), rank, Seal(key))
            return handshake(board, world_sizes[rank], facts[rank], party.healths[rank], seconds)
        except DpcsgpError as error:
            return error

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts))))


def test_equal_facts_give_everybody_the_same_key_of_this_start(party: ProcessContext) -> None:
    shapes: dict[str, object] = {"input shape": (8, 8)}
    first = hands(party, [shapes] * 3, [3] * 3)
    assert isinstance(first[0], bytes)
    assert first[0] == first[1] == first[2]
    assert hands(ProcessContext(3), [shapes] * 3, [3] * 3)[0] != first[0]
    assert hands(ProcessContext(3), [shapes] * 3, [3] * 3, key=None) == [None] * 3


def test_every_rank_names_a_differing_key(party: ProcessContext) -> None:
    errors = hands(
        party, [{"run.seed": 0, "a": 1}, {"run.seed": 0, "a": 1}, {"run.seed": 5, "a": 1}], [3] * 3
    )
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "rank 2 has run.seed = 5 (rank 0: 0)" in str(errors[0])
    assert "rank 2 has run.seed = 5 (rank 1: 0)" in str(errors[1])
    assert "has run.seed = 0 (rank 2: 5)" in str(errors[2])


def test_a_rank_of_another_world_is_named(party: ProcessContext) -> None:
    errors = hands(party, [{}, {}, {}], [3, 3, 4])
    assert "rank 2 has world size = 4 (rank 0: 3)" in str(errors[0])
    assert all(isinstance(error, ConfigError) for error in errors)


def test_another_protocol_version_is_named(
    party: ProcessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_module, "PROTOCOL", 99)
    party.open_store().set(
        "hello/1", '{"facts": {"protocol version": 1, "world size": 2}, "fresh": ""}'
    )
    (error,) = hands(party, [{}], [2], key=None)
    assert "rank 1 has protocol version = 1 (rank 0: 99)" in str(error)


def test_a_rank_that_does_not_show_up_is_named_in_time(party: ProcessContext) -> None:
    began = time.monotonic()
    (error,) = hands(party, [{}], [2], seconds=0.5)
    assert time.monotonic() - began < 1.5
    assert "rank 1 of 2 did not show up within 0.5 s" in str(error)
