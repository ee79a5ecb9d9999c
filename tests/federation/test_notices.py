"""Notices: pairs agree whoever starts anew, no stream meets two sums, hostile ones do nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

sys.path.insert(0, str(Path(__file__).parent))
from noise_members import DIM, STEPS, Member, flood, left_over, members

from dpcsgp.errors import JournalError, PrivateStepError, RestoredBackupError, WireError
from dpcsgp.federation import notice_board
from dpcsgp.federation.notice_board import MOST_KEPT, NoticeBoard
from dpcsgp.federation.notices import MOST_NOTICE, known_everywhere_from, signed_notice
from dpcsgp.federation.party_pairs import PartyPairs
from dpcsgp.graphs import Topology, complete, directed_exponential, directed_ring, random_digraph
from dpcsgp.privacy.pair_keys import KeyPairs, PublicHalf
from dpcsgp.randomness import PairStreams, PrivateRandomness


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Member]:
    return members(tmp_path_factory.mktemp("parties"))


@pytest.fixture
def four(made: list[Member]) -> list[Member]:
    """Four parties that have started and heard each other; node 0 sends to 1, 1 to 2, and so on."""
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start()
    flood(made)
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, tuple[int, int, str, int]]]:
    """Every stream that is drawn, by its first bytes: one stream is drawn by two ends at most."""
    seen: dict[bytes, tuple[int, int, str, int]] = {}
    times: dict[bytes, int] = {}
    honest = PairStreams.bytes

    def watched(
        self: PairStreams, first: int, second: int, purpose: str, step: int, num_bytes: int
    ) -> np.ndarray:
        out = honest(self, first, second, purpose, step, num_bytes)
        name, start = (first, second, purpose, step), out[:32].tobytes()
        assert seen.setdefault(start, name) == name
        times[start] = times.get(start, 0) + 1
        return out

    monkeypatch.setattr(PairStreams, "bytes", watched)
    yield seen
    assert max(times.values()) <= 2


def half() -> PublicHalf:
    return KeyPairs(PrivateRandomness.fresh([0])).halves[0]


def notice_of(
    member: Member,
    start: int,
    valid_from: int,
    by: Member | None = None,
    told: PublicHalf | None = None,
) -> bytes:
    """Return a notice in the name of a party, signed by it or by another one."""
    key, roster = (by or member).party.key(), member.roster
    made = signed_notice(key, roster, member.node, start, valid_from, told or half(), False)
    return made.text(roster)


def test_shared_noise_cancels_between_parties_and_over_no_subset(four: list[Member]) -> None:
    for step in range(3):
        counts = [member.counts(step) for member in four]
        assert not np.sum(counts, axis=0).any()
        for out in range(4):
            assert np.sum(counts[:out] + counts[out + 1 :], axis=0).any()


def test_a_party_that_starts_anew_cancels_from_the_step_that_it_announced(
    four: list[Member], drawn: dict[bytes, Any]
) -> None:
    """It made steps 0 to 6, and the last of them is kept; on a ring of four, news take 3 rounds."""
    for step in range(7):
        left_over(four, step)
    four[1].start(first_step=4, paid=3)
    flood(four)
    counts = {step: [member.counts(step) for member in four] for step in range(7, 12)}
    for step, rows in counts.items():
        assert np.sum(rows, axis=0).any() == (step < 10), step
    # Until then only its own pairs are uncancelled: the others' are there, with the right signs.
    streams = four[0].noise._partners
    assert streams is not None
    before, after = streams.streams(9), streams.streams(10)
    changed = {
        pair
        for pair in before.fingerprints()
        if before.fingerprints()[pair] != after.fingerprints()[pair]
    }
    assert changed == {(0, 1)}


def test_whoever_hears_of_a_start_late_draws_other_noise_and_as_much_of_it(
    four: list[Member], drawn: dict[bytes, Any]
) -> None:
    """A relay that withholds a notice spoils the cancelling of one pair, and nothing else."""
    four[1].start(first_step=0)
    flood([four[1], four[0], four[3]])
    left = np.stack([left_over(four, step) for step in range(3, STEPS)]).ravel()
    # Both ends of the pair of nodes 1 and 2 add independent noise: two scales, and nobody else.
    wanted = four[0].noise.scale(DIM) * np.sqrt(2)
    assert np.std(left) == pytest.approx(wanted, rel=5 / np.sqrt(2 * left.size))


def test_nobody_draws_before_it_has_everybodys_first_notice(made: list[Member]) -> None:
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start()
    pairs = made[0].noise._partners
    assert isinstance(pairs, PartyPairs) and pairs.missing(0) == [1, 2, 3]
    flood(made[:3])
    assert pairs.missing(0) == [3]
    flood(made)
    assert pairs.missing(0) == []


def test_a_party_without_a_notice_gets_noise_that_nobody_subtracts(
    made: list[Member], drawn: dict[bytes, Any]
) -> None:
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start()
    first, second = made[0].counts(0), made[0].start().counts(0)
    wanted = made[0].noise.scale(DIM) * np.sqrt(3)
    assert np.std(first) == pytest.approx(wanted, rel=0.5)
    assert not np.array_equal(first, second)


def test_a_step_is_drawn_once_and_a_start_joins_once(four: list[Member]) -> None:
    four[0].counts(5)
    with pytest.raises(PrivateStepError, match="never meets two sums"):
        four[0].counts(5)
    with pytest.raises(PrivateStepError, match="joined twice"):
        four[0].noise.join(0, STEPS, {0: []}, lambda name, value: [value], [0])


def test_crashes_before_a_release_never_bring_a_stream_back(
    four: list[Member], drawn: dict[bytes, Any]
) -> None:
    """Drawn, not kept, killed: the step is drawn again by the next start, ten times over."""
    for _ in range(10):
        flood(four)
        for member in four:
            member.counts(3)
            member.start(first_step=3)


def test_a_folder_from_an_old_backup_draws_no_old_stream_and_refuses_to_go_on(
    four: list[Member], drawn: dict[bytes, Any], tmp_path: Path
) -> None:
    """Receivers may lie about what they hold; the noise is new all the same."""
    shutil.copy(four[1].path, tmp_path / "backup.json")
    for step in range(4):
        left_over(four, step)
    four[1].start(first_step=4)
    flood(four)
    left_over(four, 4)
    shutil.copy(tmp_path / "backup.json", four[1].path)
    four[1].start(first_step=2)
    for step in range(2, 6):
        four[1].counts(step)
    with pytest.raises(RestoredBackupError, match="others know a start 2 of this party"):
        flood([four[0], four[1]])


def test_two_copies_of_a_folder_draw_different_streams_and_notice_each_other(
    four: list[Member], drawn: dict[bytes, Any], tmp_path: Path
) -> None:
    shutil.copy(four[1].path, tmp_path / "copy.json")
    twin = Member(four[1].roster, four[1].law, four[1].party, tmp_path / "copy.json")
    four[1].start(first_step=5)
    twin.start(first_step=5)
    for step in range(5, 12):
        left_over([*four, twin], step)
    # The others keep what came first, and go on.
    flood([four[0], four[1], four[2]])
    assert twin.board.after(0)[1]
    for body in twin.board.after(0)[1]:
        assert four[0].board.accept(body) is None
    with pytest.raises(RestoredBackupError):
        flood([four[0], twin])


def test_a_lost_file_of_notices_is_noticed(four: list[Member]) -> None:
    four[2].path.unlink()
    four[2].start(first_step=3)
    with pytest.raises(RestoredBackupError, match="others know a start 1"):
        flood(four)


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 1},
        {"node": -1},
        {"node": 4},
        {"node": True},
        {"start": 0},
        {"start": 10**30},
        {"start": 2.0},
        {"valid_from": -1},
        {"valid_from": 3},
        {"valid_from": "3"},
        {"half": ["00" * 32, "11" * 32]},
        {"half": ["ab" * 32]},
        {"seeded": 0},
        {"seeded": True},
        {"signature": "00" * 70},
        {"signature": "z" * 140},
        {"signature": 5},
        {"roster": "00" * 32},
        {"more": "x" * MOST_NOTICE},
        {"more": 1},
    ],
)
def test_a_changed_notice_is_refused(four: list[Member], changes: dict[str, Any]) -> None:
    before = four[3].board.after(0)
    body = json.dumps({**json.loads(notice_of(four[2], 2, 9)), **changes}).encode()
    with pytest.raises(WireError):
        four[3].board.accept(body)
    assert four[3].board.after(0) == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 900, b"\xff" * 40, b"null", b"7"])
def test_what_is_no_notice_is_refused(four: list[Member], body: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        four[0].board.accept(body)


def test_nobody_speaks_in_anothers_name_or_with_a_key_that_hides_nothing(
    four: list[Member],
) -> None:
    with pytest.raises(WireError, match="not signed by it"):
        four[0].board.accept(notice_of(four[1], 2, 3, by=four[2]))
    weak = PublicHalf(bytes(32), bytes(32))
    with pytest.raises(WireError, match="gives no secret"):
        four[0].board.accept(notice_of(four[1], 2, 3, told=weak))
    stranger = ec.generate_private_key(ec.SECP256R1())
    forged = signed_notice(stranger, four[0].roster, 1, 2, 3, half(), False)
    with pytest.raises(WireError, match="not signed by it"):
        four[0].board.accept(forged.text(four[0].roster))


def test_replays_and_contradictions_change_nothing(four: list[Member]) -> None:
    old = four[1].board.after(0)[1][-1]
    four[1].start(first_step=2)
    flood(four)
    before = four[0].board.valid_at(1, 10)
    assert before is not None and before.start == 2 and before.valid_from == 5
    assert four[0].board.accept(old) is None
    # Another key for a start that is known, with a right signature: the first one stays.
    assert four[0].board.accept(notice_of(four[1], 2, 5)) is None
    assert four[0].board.accept(notice_of(four[1], 1, 0)) is None
    assert four[0].board.valid_at(1, 10) == before
    first = four[0].board.valid_at(1, 4)
    assert first is not None and first.start == 1


def test_a_party_that_gives_notices_without_end_takes_a_bounded_place(
    four: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, honest, clock = four[0].board, four[0].board.valid_at(2, 0), [1e9]
    monkeypatch.setattr(notice_board, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    # At once: some are taken, the others neither kept nor passed on.
    taken = [board.accept(notice_of(four[1], start, start)) for start in range(2, 100)]
    assert 20 < sum(notice is not None for notice in taken) <= MOST_KEPT
    # One in ten seconds, for ever: all are taken, and push each other out.
    for start in range(100, 200):
        clock[0] += 10
        assert board.accept(notice_of(four[1], start, start)) is not None
    assert len(board._kept[1]) == MOST_KEPT and len(board.after(0)[1]) == MOST_KEPT + 3
    assert four[0].path.stat().st_size < (MOST_KEPT + 3) * MOST_NOTICE
    # Nobody else is touched; what it has pushed out itself is replaced by noise of the same law.
    assert board.valid_at(2, 0) == honest
    assert board.valid_at(1, 0) is None
    assert np.std(four[0].counts(0)) > four[0].noise.scale(DIM)
    clock[0] += 1
    assert board.accept(notice_of(four[2], 2, 5)) is not None


def test_a_party_that_starts_often_is_not_locked_out(four: list[Member]) -> None:
    for _ in range(100):
        four[1].start(first_step=6)
    flood(four)
    assert len(four[0].board._kept[1]) == 2
    assert left_over(four, 8).any() and not left_over(four, 9).any()


def test_a_start_knows_what_the_last_one_knew(four: list[Member]) -> None:
    four[1].start(first_step=5)
    flood(four)
    again = NoticeBoard(four[0].path, four[0].roster, 0)
    assert sorted(again.after(0)[1]) == sorted(four[0].board.after(0)[1])
    four[0].path.write_bytes(
        four[0].path.read_bytes().replace(b'valid_from\\": 8', b'valid_from\\": 7')
    )
    with pytest.raises(JournalError, match=r"notices\.json cannot be read"):
        NoticeBoard(four[0].path, four[0].roster, 0)


def test_seeded_starts_are_all_the_first(made: list[Member]) -> None:
    for member in made:
        member.path.unlink(missing_ok=True)
        member.start(seed=3)
    flood(made)
    first = [member.counts(2) for member in made]
    made[1].start(first_step=2, seed=3)
    flood(made)
    assert np.array_equal(made[1].counts(2), first[1])
    assert not np.sum(first, axis=0).any()


def test_a_party_with_a_seed_among_others_without_is_told(
    four: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    """Its fresh key can be computed by all; the lasting one keeps what the others draw secret."""
    four[1].start(seed=3)
    four[1].path.unlink()
    four[1].start(seed=3)
    for member in four:
        if member is not four[1]:
            member.path.unlink()
            member.start()
    flood(four)
    assert left_over(four, 0).any()
    assert "of lab-b and this party one runs with a seed" in caplog.text
    keys, pairs = KeyPairs(PrivateRandomness.seeded(3, [1])), four[0].noise._partners
    assert isinstance(pairs, PartyPairs)
    halves = keys.halves | {0: four[0].noise._keys.halves[0]}
    guessed = keys.pair_key("seeded", 1, 0, halves)
    assert pairs._key(1, 0) != guessed


def test_the_key_of_a_pair_needs_the_lasting_keys_the_fresh_ones_and_the_roster() -> None:
    one, two = KeyPairs(PrivateRandomness.fresh([0])), KeyPairs(PrivateRandomness.fresh([1]))
    halves = one.halves | two.halves
    key = one.pair_key("roster a", 0, 1, halves, b"lasting")
    assert key == two.pair_key("roster a", 1, 0, halves, b"lasting")
    assert key != one.pair_key("roster a", 0, 1, halves, b"another")
    assert key != one.pair_key("roster b", 0, 1, halves, b"lasting")
    assert key != one.pair_key("roster a", 0, 1, halves | {1: half()}, b"lasting")
    nonce = PublicHalf(halves[1].public, bytes(32))
    assert key != one.pair_key("roster a", 0, 1, halves | {1: nonce}, b"lasting")
    assert one.lone_key(0, 1) != one.lone_key(0, 2)


def test_the_lasting_keys_of_the_cards_are_used(four: list[Member]) -> None:
    """Whoever knows all that was told and a fresh key of its own making still lacks the card's."""
    pairs = four[0].noise._partners
    assert isinstance(pairs, PartyPairs)
    keys, notice = four[0].noise._keys, four[0].board.valid_at(1, 0)
    assert notice is not None
    halves = {0: keys.halves[0], 1: notice.half}
    name = f"roster {four[0].roster.fingerprint}"
    assert pairs._key(1, 0) != keys.pair_key(name, 0, 1, halves)
    assert pairs._key(1, 0) == keys.pair_key(name, 0, 1, halves, pairs._lasting[1])
    assert len(pairs._lasting[1]) == 32 and pairs._lasting[1] != pairs._lasting[2]


def test_a_budget_that_ends_early_is_the_partys_own_business(four: list[Member]) -> None:
    """Others go on to share noise with it: they see less of it, and are hidden no worse."""
    event = four[0].law.event(0)
    assert four[0].end == STEPS
    four[0].start(first_step=10, paid=2, spent=[(event, 30)])
    assert four[0].end == 12 + STEPS - 30
    four[0].start(first_step=10, spent=[(event, 100)])
    assert four[0].end == 10
    assert all(four[1].noise.active(STEPS - 1)) and not any(four[1].noise.active(STEPS))


def knows_before(topology: Topology, node: int, first_step: int, every: int, lag: int) -> list[int]:
    """Let a notice travel as slowly as the rules allow; return each node's first step with it."""
    sends = [10**9] * topology.num_nodes  # the first round whose message goes after the notice
    sends[node] = first_step // every
    for _ in range(topology.num_nodes):
        for other in range(topology.num_nodes):
            for sender in topology.senders_to(other):
                sends[other] = min(sends[other], sends[sender] + 1 + lag)
    # In step all is heard at the end of a round; with lag before the own message, after its step.
    return [(round_ + (lag > 0)) * every for round_ in sends]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "topology",
    [directed_ring(5), directed_exponential(9), complete(4), random_digraph(8, 0.3, 1)],
    ids=lambda topology: topology.name,
)
def test_news_are_everywhere_in_time_and_no_later_than_needed(
    topology: Topology, every: int, lag: int
) -> None:
    for node in range(topology.num_nodes):
        for first_step in range(7):
            known = knows_before(topology, node, first_step, every, lag)
            others = [step for other, step in enumerate(known) if other != node]
            found = known_everywhere_from(topology, node, first_step, every, lag)
            assert found == max(others)
