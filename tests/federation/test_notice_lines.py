"""Notices on real lines: they go before the frames made after them; hostile ones close a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from noise_members import Member, flood, members
from parties import federation, open_network, pair
from raw_caller import RING, SIZE, RawCaller, Scene, framed, pushed

from dpcsgp.errors import RestoredBackupError
from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.journal import Holding, Journal, _origin
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.notices import MOST_NOTICE, signed_notice
from dpcsgp.privacy.pair_keys import KeyPairs
from dpcsgp.randomness import PrivateRandomness

SAID_BY_RECEIVERS = {b"a": "holding", b"b": "beat", b"n": "notice", b"f": "frame"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Member]:
    return members(tmp_path_factory.mktemp("parties"))


@pytest.fixture
def sharing(made: list[Member], tmp_path: Path) -> Iterator[Scene]:
    """Bert, who shares noise: after the test he still takes what is right."""
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start()
    flood(made)
    selves, peers = federation(4)
    bert = open_network(selves[1], peers, RING, tmp_path, SIZE, notices=made[1].board)
    with closing(bert):
        scene = Scene(bert, peers[1], selves)
        yield scene
        before = scene.received()
        with scene.anna() as caller:
            assert pushed(Patient(caller).greet(), 1, SIZE).rounds == before + 1


class Patient:
    """A caller that does not hear notices, as the tests of frames expect it."""

    def __init__(self, caller: RawCaller) -> None:
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    def greet(self) -> Any:
        self._caller.greet()
        return self

    def hear(self) -> bytes:
        message = self._caller.hear()
        while messages.parsed_notice(message) is not None:
            message = self._caller.hear()
        return message


def new_notice(member: Member, start: int, valid_from: int, by: Member | None = None) -> bytes:
    half = KeyPairs(PrivateRandomness.fresh([0])).halves[0]
    key, node = (by or member).party.key(), member.node
    notice = signed_notice(key, member.roster, node, start, valid_from, half, False)
    return messages.notice(notice.text(member.roster))


def kinds_heard(caller: RawCaller, count: int) -> list[str]:
    """Return the kinds of the next messages, without beats and confirmations."""
    kinds: list[str] = []
    while len(kinds) < count:
        message = caller.hear()
        if messages.parsed_beat(message) is None and messages.parsed_heard(message) is None:
            kinds.append(SAID_BY_RECEIVERS[message[:1]])
    return kinds


def test_a_notice_is_kept_before_the_frame_that_comes_after_it(
    sharing: Scene, made: list[Member]
) -> None:
    with sharing.anna() as raw:
        caller = Patient(raw).greet()
        held = messages.parsed_holding(caller.hear())
        raw.say(new_notice(made[3], 2, 7), framed(0, bytes(SIZE), held.chain))
        while messages.parsed_beat(message := caller.hear()) is not None:
            pass
        held = messages.parsed_holding(message)
    assert held.rounds == 1
    found = NoticeBoard(made[1].path, made[1].roster, 1).valid_at(3, 7)
    assert found is not None and found.start == 2


def test_what_is_known_goes_before_the_next_frame(sharing: Scene, made: list[Member]) -> None:
    """Carla fetches: everybody's notice, then the frame; then one more notice, one more frame."""
    sharing.bert._journal.release(0, bytes(SIZE))
    with RawCaller(sharing.peer, "fetch", 2, pair("carla")) as carla:
        nothing = Holding(0, _origin(bytes(range(32)), 1))
        carla.greet().say(messages.holding(nothing))
        assert kinds_heard(carla, 5) == ["notice"] * 4 + ["frame"]
        body = messages.parsed_notice(new_notice(made[0], 2, 9))
        assert body is not None and made[1].board.accept(body) is not None
        sharing.bert._journal.release(1, bytes(SIZE))
        sharing.bert.pass_on()
        assert kinds_heard(carla, 2) == ["notice", "frame"]


def test_a_notice_that_comes_among_frames_goes_before_those_made_after_it(
    sharing: Scene, made: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds wait for Carla; while the first leaves, a notice comes and a third is made."""
    journal, honest = sharing.bert._journal, Journal.piece
    for round_ in range(2):
        journal.release(round_, bytes(SIZE))
    body = messages.parsed_notice(new_notice(made[0], 2, 9))
    assert body is not None

    def piece(self: Journal, round_: int, start: int, size: int) -> bytes:
        if journal.released == 2:
            assert made[1].board.accept(body) is not None
            journal.release(2, bytes(SIZE))
        return honest(self, round_, start, size)

    monkeypatch.setattr(Journal, "piece", piece)
    with RawCaller(sharing.peer, "fetch", 2, pair("carla")) as carla:
        nothing = Holding(0, _origin(bytes(range(32)), 1))
        carla.greet().say(messages.holding(nothing))
        kinds = kinds_heard(carla, 8)
    assert kinds == ["notice"] * 4 + ["frame", "notice", "frame", "frame"]


def test_receivers_pass_notices_on_too(sharing: Scene, made: list[Member]) -> None:
    with RawCaller(sharing.peer, "fetch", 2, pair("carla")) as carla:
        nothing = Holding(0, _origin(bytes(range(32)), 1))
        carla.greet().say(messages.holding(nothing), new_notice(made[2], 2, 5))
        with sharing.anna() as raw:
            raw.greet()
            while True:
                body = messages.parsed_notice(raw.hear())
                if body is not None and b'"node": 2, "start": 2' in body:
                    break


@pytest.mark.parametrize("what", ["forged", "garbage", "long", "other roster"])
def test_a_hostile_notice_closes_its_line_and_nothing_else(
    sharing: Scene, made: list[Member], what: str
) -> None:
    before = made[1].board.after(0)
    said = {
        "forged": new_notice(made[3], 2, 7, by=made[0]),
        "garbage": messages.notice(b"{" * 50),
        "long": messages.notice(b" " * (MOST_NOTICE + 1)),
        "other roster": new_notice(made[3], 2, 7).replace(
            made[3].roster.fingerprint.encode(), b"00" * 32
        ),
    }[what]
    with sharing.anna() as raw:
        code, text = raw.greet().say(said).refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "notice" in text
    assert made[1].board.after(0) == before


def test_parties_that_share_no_noise_take_no_notices(scene: Scene, made: list[Member]) -> None:
    with scene.anna() as raw:
        code, text = raw.greet().say(new_notice(made[3], 2, 7)).refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "share no noise" in text


def test_the_own_notice_of_a_start_that_is_not_known_ends_the_run(
    made: list[Member], tmp_path: Path
) -> None:
    """The folder is an old copy, or runs twice: nothing more may be released."""
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start()
    selves, peers = federation(4)
    with closing(
        open_network(selves[1], peers, RING, tmp_path, SIZE, notices=made[1].board, patience=5.0)
    ) as bert:
        with RawCaller(peers[1], "push", 0, pair("anna")) as raw:
            raw.greet().say(new_notice(made[1], 2, 7)).refusal()
        with pytest.raises(RestoredBackupError, match="others know a start 2 of this party"):
            bert.meet_receivers()
