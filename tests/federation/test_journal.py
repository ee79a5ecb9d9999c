"""The journal: a frame is there wholly or not at all, once, and as long as somebody needs it."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpcsgp.errors import JournalError, RestoredBackupError, WireError
from dpcsgp.federation import frame_log
from dpcsgp.federation.frame_log import FrameLog, chain_after
from dpcsgp.federation.journal import Holding, Journal
from dpcsgp.federation.peers import Peer

ROSTER, ORIGIN = b"roster", bytes(32)
BERT, CARLA = Peer(1, "bert", b"", None), Peer(2, "carla", b"", None)


def frame(round_: int) -> bytes:
    return bytes([round_ % 256]) * 50


@contextmanager
def journal(folder: Path, **changes: object) -> Iterator[Journal]:
    values = {"roster_digest": ROSTER, "node": 0, "senders": [1], "receivers": [BERT, CARLA]}
    opened = Journal(folder, **{**values, **changes})  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


def fill(log: FrameLog, rounds: range) -> None:
    for round_ in rounds:
        assert log.append(frame(round_)) == round_
    log.sync()


def holding(own: Journal, rounds: int) -> Holding:
    chain = own.own_chain(rounds)
    assert chain is not None
    return Holding(rounds, chain)


def test_a_log_is_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, ORIGIN)
    fill(log, range(5))
    chain = log.chain_before(5)
    log.close()
    again = FrameLog(tmp_path, ORIGIN)
    assert (again.first, again.next, again.safe, again.chain_before(5)) == (0, 5, 5, chain)
    assert [again.read(round_) for round_ in range(5)] == [frame(r) for r in range(5)]
    fill(again, range(5, 7))
    assert again.read(6, start=10, size=7) == frame(6)[10:17]


def test_a_crash_at_any_byte_of_a_write_leaves_all_records_before_it(tmp_path: Path) -> None:
    log = FrameLog(tmp_path / "whole", ORIGIN)
    fill(log, range(2))
    file = next((tmp_path / "whole").iterdir())
    two = file.stat().st_size
    fill(log, range(2, 3))
    log.close()
    body = file.read_bytes()
    for length in range(two, len(body)):
        cut = tmp_path / "cut"
        shutil.rmtree(cut, ignore_errors=True)
        cut.mkdir()
        # Either the file ends there, or the disk holds nonsense from there on.
        (cut / file.name).write_bytes(body[:length] + bytes((length % 2) * (len(body) - length)))
        torn = FrameLog(cut, ORIGIN)
        assert torn.next == torn.safe == 2
        fill(torn, range(2, 4))
        torn.close()
        assert FrameLog(cut, ORIGIN).next == 4


def test_a_file_that_was_altered_before_the_last_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_log, "_SEGMENT_BYTES", 1)
    log = FrameLog(tmp_path, ORIGIN)
    fill(log, range(3))
    log.close()
    path = tmp_path / "000000000001.frames"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(JournalError, match=r"000000000001\.frames is damaged"):
        FrameLog(tmp_path, ORIGIN)


def test_a_disk_that_is_full_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, ORIGIN)
    fill(log, range(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(JournalError, match="round 2 cannot be written"):
            log.append(frame(2) * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.next == 2
    fill(log, range(2, 4))
    log.close()
    assert FrameLog(tmp_path, ORIGIN).read(3) == frame(3)


def test_a_frame_is_not_taken_if_its_announced_chain_is_another(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, ORIGIN)
    announced = chain_after(ORIGIN, 0, frame(0))
    with pytest.raises(WireError, match="damaged on the way"):
        log.append(frame(1), expected=announced)
    assert log.append(frame(0), expected=announced) == 0


def test_a_released_frame_is_never_replaced(tmp_path: Path) -> None:
    with journal(tmp_path) as own:
        own.release(0, frame(0))
    with journal(tmp_path) as own:
        assert own.released == 1
        own.release(0, frame(0))  # a replay
        with pytest.raises(JournalError, match="round 0: the frame computed now differs"):
            own.release(0, frame(1))
        assert own.piece(0, 0, 100) == frame(0)
        with pytest.raises(JournalError, match="the next own frame is that of round 1"):
            own.release(2, frame(2))


def test_frames_are_kept_until_everybody_has_them_and_a_checkpoint_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_log, "_SEGMENT_BYTES", 1)  # one file per frame

    def kept() -> list[int]:
        return sorted(int(path.stem) for path in (tmp_path / "outbox").iterdir())

    with journal(tmp_path) as own:
        for round_ in range(6):
            own.release(round_, frame(round_))
        own.forget_before(4)
        assert kept() == [0, 1, 2, 3, 4, 5], "nobody has said what it has"
        own.hear_holding(1, holding(own, 6))
        assert kept() == [0, 1, 2, 3, 4, 5], "one receiver has not spoken"
        assert own.unheard() == [CARLA]
        own.hear_holding(2, holding(own, 3))
        assert kept() == [3, 4, 5] and own.unacknowledged() == [CARLA]
        own.hear_holding(2, holding(own, 6))
        assert kept() == [4, 5] and not own.unacknowledged()
        own.forget_before(6)
        assert kept() == [5], "the last one says how far this party has come"
    with journal(tmp_path) as own:
        assert own.released == 6


def test_an_inbox_keeps_what_a_resume_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_log, "_SEGMENT_BYTES", 1)
    with journal(tmp_path) as own:
        for round_ in range(4):
            chain = chain_after(own.awaited(1).chain, round_, frame(round_))
            own.receive(1, round_, frame(round_), chain)
            assert own.holding(1).rounds == round_, "not safe before it is synced"
            assert own.secure(1) == Holding(round_ + 1, chain)
        own.forget_before(2)
        assert [own.frame_of(1, round_) for round_ in (2, 3)] == [frame(2), frame(3)]
        with pytest.raises(JournalError, match="round 1 is not kept"):
            own.frame_of(1, 1)
        with pytest.raises(WireError, match="round 3 of node 1: expected round 4"):
            own.receive(1, 3, frame(9), bytes(32))


def test_a_journal_older_than_what_others_hold_is_recognised(tmp_path: Path) -> None:
    with journal(tmp_path / "now") as own:
        own.release(0, frame(0))
    shutil.copytree(tmp_path / "now", tmp_path / "backup")
    with journal(tmp_path / "now") as own:
        own.release(1, frame(1))
        held = holding(own, 2)
    with journal(tmp_path / "backup") as own:
        with pytest.raises(RestoredBackupError, match=r"'bert'.*holds 2 rounds.*has 1"):
            own.hear_holding(1, held)
        # Even if that round were released anew, its receiver would not be sent more.
        own.release(1, frame(7))
        with pytest.raises(RestoredBackupError, match=r"other bytes .* round 1"):
            own.hear_holding(1, held)


def test_a_receiver_that_contradicts_itself_ends_its_line_only(tmp_path: Path) -> None:
    with journal(tmp_path) as own:
        own.release(0, frame(0))
        own.hear_holding(1, holding(own, 0))
        for wrong in (Holding(1, bytes(32)), Holding(5, bytes(32))):
            with pytest.raises(WireError, match="'bert'"):
                own.hear_holding(1, wrong)


def test_a_receiver_that_lost_what_it_had_acknowledged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_log, "_SEGMENT_BYTES", 1)
    with journal(tmp_path) as own:
        old = holding(own, 0)
        for round_ in range(3):
            own.release(round_, frame(round_))
        own.forget_before(3)
        own.hear_holding(1, holding(own, 3))
        own.hear_holding(2, holding(own, 3))
        with pytest.raises(WireError, match=r"'bert' .* asks for round 0.*older backup"):
            own.hear_holding(1, old)


def test_a_receiver_that_has_everything_need_not_be_asked_again(tmp_path: Path) -> None:
    with journal(tmp_path) as own:
        own.release(0, frame(0))
        own.hear_holding(1, holding(own, 1))
        own.hear_holding(2, holding(own, 0))
        own.settle()
    with journal(tmp_path) as own:
        assert own.unacknowledged() == [CARLA]
        assert own.unheard() == [BERT, CARLA], "a new release needs their word all the same"
        own.release(1, frame(1))
        assert own.unacknowledged() == [BERT, CARLA]


def test_a_sender_that_has_confirmed_everything_need_not_be_told_again(tmp_path: Path) -> None:
    with journal(tmp_path) as own:
        chain = chain_after(own.awaited(1).chain, 0, frame(0))
        own.receive(1, 0, frame(0), chain)
        assert own.untold() == [1]
        with pytest.raises(WireError, match="confirms 1 rounds, only 0 are safe"):
            own.hear_confirmation(1, 1, is_last=True)
        own.secure(1)
        assert own.untold() == [1]  # what was said may be lost
        own.hear_confirmation(1, 1, is_last=True)
        assert own.untold() == []
    with journal(tmp_path) as again:
        assert again.untold() == []


def test_what_was_acknowledged_and_confirmed_is_kept_with_every_checkpoint(tmp_path: Path) -> None:
    """A version may end before its plan: nobody says then that a round was the last one."""
    with journal(tmp_path) as own:
        own.release(0, frame(0))
        own.receive(1, 0, frame(0), chain_after(own.awaited(1).chain, 0, frame(0)))
        own.secure(1)
        own.hear_holding(1, holding(own, 1))
        own.hear_holding(2, holding(own, 1))
        own.hear_confirmation(1, 1, is_last=False)
        assert not (tmp_path / "acknowledged.json").exists()
        own.forget_before(0)
        shutil.copytree(tmp_path, tmp_path.with_name("killed"))
    with journal(tmp_path.with_name("killed"), end=1) as again:
        assert again.unacknowledged() == [] and again.untold() == []
        again.hear_holding(1, Holding(0, holding(again, 0).chain))
        assert again.unacknowledged() == [BERT], "its last word counts, not an earlier one"


def test_a_journal_that_is_closed_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    with journal(tmp_path) as own:
        own.release(0, frame(0))
        own.hear_holding(1, holding(own, 1))
    with journal(tmp_path) as again:
        assert again.unacknowledged() == [CARLA]


def test_a_journal_belongs_to_one_roster_one_node_and_one_process(tmp_path: Path) -> None:
    with journal(tmp_path), pytest.raises(JournalError, match="in use"), journal(tmp_path):
        pass
    for changes in ({"roster_digest": b"another"}, {"node": 3}):
        with pytest.raises(JournalError, match="belongs to"), journal(tmp_path, **changes):
            pass
    with journal(tmp_path):
        pass
