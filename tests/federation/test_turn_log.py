"""Turns on disk: what a crash tears is cut off, what is damaged or changed is refused."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from dpcsgp.errors import JournalError
from dpcsgp.federation.turn_log import PartyTurn, TurnLog

TURNS = [
    PartyTurn((0, 0), 0, (1, 0)),
    PartyTurn((1, 0), -1, (1, 0)),
    PartyTurn((2, 1), 1, (2, 3)),
]
ROSTER = bytes(32)


def written(path: Path) -> TurnLog:
    log = TurnLog(path, 2, ROSTER)
    for round_, turn in enumerate(TURNS):
        log.record(round_, turn)
    return log


def test_turns_are_found_again(tmp_path: Path) -> None:
    written(tmp_path / "turns").close()
    log = TurnLog(tmp_path / "turns", 2, ROSTER)
    assert [log.find(round_) for round_ in range(4)] == [*TURNS, None]
    assert [log.last_gradient_before(round_) for round_ in range(4)] == [-1, 0, 0, 1]
    assert log.num_gradients() == 2
    log.record(1, TURNS[1])  # played again
    with pytest.raises(JournalError, match=r"round 1: .* was recorded, now it would be"):
        log.record(1, TURNS[2])
    with pytest.raises(JournalError, match="next turn is that of round 3, not 5"):
        log.record(5, TURNS[0])
    log.close()


def test_a_torn_end_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    written(path).close()
    body = path.read_bytes()
    last = body.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(body)):
        path.write_bytes(body[:end])
        log = TurnLog(path, 2, ROSTER)
        assert log.next == 2
        log.record(2, TURNS[2])
        log.close()
        assert path.read_bytes() == body


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    written(path).close()
    body = path.read_bytes()
    first = body.index(b"\n")
    for place in range(first):
        path.write_bytes(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
        with pytest.raises(JournalError, match="damaged"):
            TurnLog(path, 2, ROSTER)
    path.write_bytes(body)
    with pytest.raises(JournalError, match="damaged"):
        TurnLog(path, 3, ROSTER)  # of another graph
    with pytest.raises(JournalError, match="of another roster"):
        TurnLog(path, 2, bytes([1] * 32))


def test_a_disk_that_takes_half_a_turn_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    log, limits = written(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        with pytest.raises(JournalError, match=r"cannot be written .* Nothing was sent"):
            log.record(3, TURNS[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    log.record(3, TURNS[1])
    log.close()
    assert [TurnLog(path, 2, ROSTER).find(round_) for round_ in range(5)] == [
        *TURNS,
        TURNS[1],
        None,
    ]
