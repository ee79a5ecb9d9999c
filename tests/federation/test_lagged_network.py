"""A lagged network after crashes in the worst order, and beside a neighbour that holds back."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from parties import QUICK, ROSTER, federation
from test_party_network import SIZE, frame_of

from dpcsgp.errors import JournalError, WaitStoppedError
from dpcsgp.federation.archive import Ended
from dpcsgp.federation.lagged_network import LaggedPartyNetwork
from dpcsgp.federation.turn_log import NO_GRADIENT, TURNS, PartyTurn
from dpcsgp.graphs import from_edges
from dpcsgp.network.health import SilentPeerError

PAIR = from_edges(2, [(0, 1), (1, 0)])
LAG = 2


def opened(
    own: Any, peers: Any, folder: Path, patience: float | None = None, **later: Any
) -> LaggedPartyNetwork:
    words = (ROSTER, folder / own.name, lambda round_: SIZE, 20, patience, LAG, QUICK)
    return LaggedPartyNetwork(own, peers, PAIR, *words, **later)


def turn(network: LaggedPartyNetwork) -> tuple[int, ...]:
    """Take what has come and send the next frame; return how much was taken."""
    round_ = network.traffic.rounds
    taken = network.credits(round_, [False])
    network.ahead(round_)
    network.send(frame_of(network.nodes[0], round_))
    return taken


def until(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_was_heard_before_a_frame_is_the_same_after_a_crash(tmp_path: Path) -> None:
    """The crash comes after the turn is on disk and before the frame is; then more frames come."""
    selves, peers = federation(2)
    with closing(opened(selves[1], peers, tmp_path)) as bert:
        with closing(opened(selves[0], peers, tmp_path)) as anna:
            turn(bert)
            until(lambda: anna._arrived(1) == 1)
            assert turn(anna) == (0,)  # round 0 takes nothing: no frame is of an earlier round
            assert anna.credits(1, [False]) == (1,)
            anna.meet_receivers()
            anna.turns.record(
                1, PartyTurn((0,), NO_GRADIENT, (1,))
            )  # as if it had been heard later
        # Another frame comes; the released past must not change because of it.
        with closing(opened(selves[0], peers, tmp_path)) as anna:
            turn(bert)
            until(lambda: anna._arrived(1) == 2)
            anna.traffic.restore(bytes_per_edge=0, rounds=1, bytes_sent=[0])
            assert turn(anna) == (0,) and turn(anna) == (2,)
            assert torch.equal(anna.frames_of(1, [1]), frame_of(1, 1))


def test_a_party_goes_on_alone_for_the_lag_and_no_further(tmp_path: Path) -> None:
    """A neighbour that is always as late as allowed delays; it cannot make anybody send more."""
    selves, peers = federation(2)
    with (
        closing(opened(selves[0], peers, tmp_path)) as anna,
        closing(opened(selves[1], peers, tmp_path)) as bert,
    ):
        assert [turn(anna) for _ in range(LAG + 1)] == [(0,)] * (LAG + 1)
        done: list[tuple[int, ...]] = []
        waiting = threading.Thread(target=lambda: done.append(turn(anna)))
        waiting.start()
        until(lambda: anna.waiting_for == ("bert",))
        assert not done and anna._journal.released == LAG + 1
        turn(bert)
        waiting.join(20)
        assert done == [(1,)]
        assert 0.0 < anna.waiting_share <= 1.0
        # In step it needs all earlier frames, whatever the lag is.
        failed: list[BaseException] = []

        def in_step() -> None:
            try:
                anna.credits(anna.traffic.rounds, [True])
            except WaitStoppedError as error:
                failed.append(error)

        waiting = threading.Thread(target=in_step)
        waiting.start()
        until(lambda: anna.waiting_for == ("bert",))
        anna.stop()
        waiting.join(20)
        assert failed


def test_turns_after_the_end_of_a_version_count_for_nothing(tmp_path: Path) -> None:
    """Rounds 10 to 12 were made, frame 0 was a model; the version ends at 12 after all."""
    selves, peers = federation(2)
    later = {"first": 10, "hands_over": True}

    def made(network: LaggedPartyNetwork, round_: int) -> tuple[int, ...]:
        taken = network.credits(round_, [False])
        network.ahead(round_)
        network.put_in(round_)
        network.send(frame_of(network.nodes[0], network.traffic.rounds))
        return taken

    with closing(opened(selves[1], peers, tmp_path, **later)) as bert:
        with closing(opened(selves[0], peers, tmp_path, **later)) as anna:
            both = [
                threading.Thread(target=each.exchange, args=(frame_of(node, 0),))
                for node, each in enumerate((anna, bert))
            ]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(20)
            assert [made(anna, round_) for round_ in (10, 11, 12)] == [(10,)] * 3
            assert anna.last_gradient_before(13) == 12 and anna.turn_of(13) is None
        ended = Ended("version 3 took effect", 3)
        with closing(opened(selves[0], peers, tmp_path, ended=ended, **later)) as anna:
            turn_11 = anna.turn_of(11)
            assert turn_11 is not None and turn_11.gradient == 11 and anna.turn_of(12) is None
            assert anna.last_gradient_before(13) == 11 and anna._journal.released == 3
            made(bert, 10)
            until(lambda: anna._arrived(1) == 11)
            done: list[tuple[int, ...]] = []
            waiting = threading.Thread(target=lambda: done.append(anna.credits(12, [True])))
            waiting.start()
            until(lambda: anna.waiting_for == ("bert",))
            made(bert, 11)
            waiting.join(20)
            assert done == [(12,)]
            assert torch.equal(anna.frames_of(11, [1]), frame_of(1, 2))


def test_patience_names_who_is_silent(tmp_path: Path) -> None:
    selves, peers = federation(2)
    with closing(opened(selves[0], peers, tmp_path, patience=1.0)) as anna:
        bert = opened(selves[1], peers, tmp_path)
        for _ in range(LAG + 1):
            turn(anna)
        bert.close()
        with pytest.raises(SilentPeerError, match="party 'bert'"):
            turn(anna)


def test_frames_that_a_checkpoint_has_not_taken_are_kept(tmp_path: Path) -> None:
    selves, peers = federation(2)
    with (
        closing(opened(selves[0], peers, tmp_path)) as anna,
        closing(opened(selves[1], peers, tmp_path)) as bert,
    ):
        for _ in range(5):
            turn(anna)
            until(lambda: bert._arrived(0) == anna.traffic.rounds)
            turn(bert)
            until(lambda: anna._arrived(1) == bert.traffic.rounds)
        # A checkpoint before round 5 may lack the frames of rounds 5 - LAG - 1 and later.
        anna.forget_before(5)
        for round_ in range(5 - LAG - 1, 5):
            assert torch.equal(anna.frames_of(round_, [1]), frame_of(1, round_))


def test_a_journal_without_its_turns_is_refused(tmp_path: Path) -> None:
    selves, peers = federation(2)
    with (
        closing(opened(selves[0], peers, tmp_path)) as anna,
        closing(opened(selves[1], peers, tmp_path)),
    ):
        turn(anna)
    body = (tmp_path / "anna" / TURNS).read_bytes()
    (tmp_path / "anna" / TURNS).unlink()
    with pytest.raises(JournalError, match=r"0 turns, but frames of 1 rounds .* as a whole"):
        opened(selves[0], peers, tmp_path)
    # Turns of another node of the same roster are not these, though as long.
    (tmp_path / "bert").mkdir(exist_ok=True)
    (tmp_path / "bert" / TURNS).write_bytes(body + body)
    with pytest.raises(JournalError, match="line 1 is damaged or of another roster or node"):
        opened(selves[1], peers, tmp_path)


def test_a_journal_that_is_older_than_its_turns_is_refused(tmp_path: Path) -> None:
    """One turn may be ahead of the frames, after a crash between the two; more is another copy."""
    selves, peers = federation(2)
    with (
        closing(opened(selves[0], peers, tmp_path)) as anna,
        closing(opened(selves[1], peers, tmp_path)),
    ):
        turn(anna)
        anna.turns.record(1, PartyTurn((0,), NO_GRADIENT, (0,)))
    opened(selves[0], peers, tmp_path).close()
    with closing(opened(selves[0], peers, tmp_path)) as anna:
        anna.turns.record(2, PartyTurn((0,), NO_GRADIENT, (0,)))
    with pytest.raises(JournalError, match="3 turns, but frames of 1 rounds were released"):
        opened(selves[0], peers, tmp_path)
