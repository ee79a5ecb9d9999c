"""A ledger never forgets a release: not after a crash, not after an edit, not on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy.accounting import ReleaseEvent, composed_epsilon
from dpcsgp.privacy.ledger import (
    Ledger,
    LedgerBook,
    LedgerHeader,
    common_delta,
    read_ledger,
    read_ledgers,
    releases_by_node,
)

EVENT = ReleaseEvent("poisson", 2048 / 6000, 11.2)
OTHER = ReleaseEvent("uniform", 0.1, 30.0)
HEADER = LedgerHeader(run_id="9f3c", node=3, config="c0ffee", delta=1e-4, event=EVENT)


def written(path: Path, releases: int = 3) -> Path:
    with Ledger.create(path, HEADER) as ledger:
        for step in range(releases):
            ledger.record(step, 0, EVENT)
    return path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


# What is written


def test_a_ledger_reads_back_what_was_recorded(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "new" / "node-0003.jsonl", HEADER) as ledger:
        assert ledger.count == 0
        ledger.record(0, 0, EVENT)
        ledger.record(1, 0, EVENT)
        ledger.record(1, 1, OTHER)
        head = ledger.head
    with Ledger.open(tmp_path / "new" / "node-0003.jsonl") as again:
        assert (again.head, again.count, again.header) == (head, 3, HEADER)
        assert sorted(again.releases(), key=str) == sorted([(EVENT, 2), (OTHER, 1)], key=str)
        assert again.last_attempt == 1
        assert again.epsilon() == composed_epsilon([(EVENT, 2), (OTHER, 1)], 1e-4)
        again.record(2, 2, EVENT)
    assert read_ledger(tmp_path / "new" / "node-0003.jsonl").count == 4


def test_only_public_constants_are_written(tmp_path: Path) -> None:
    records = [json.loads(line) for line in lines_of(written(tmp_path / "a.jsonl"))]
    event_fields = {"sampling", "sampling_rate", "noise_multiplier"}
    assert set(records[1]) == {"kind", "start", "step", "attempt", "prev", "sum"} | event_fields
    own = {"kind", "format", "start", "run_id", "node", "config", "delta", "private", "prev", "sum"}
    assert set(records[0]) == own | event_fields
    assert [record["prev"] for record in records[1:]] == [record["sum"] for record in records[:-1]]


def test_record_returns_after_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        real(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().read_bytes())

    with Ledger.create(tmp_path / "a.jsonl", HEADER) as ledger:
        if sys.platform != "linux":
            pytest.skip("looks a descriptor up in /proc")
        monkeypatch.setattr(os, "fsync", spy)
        ledger.record(7, 0, EVENT)
    assert len(synced) == 1
    assert b'"step":7' in synced[0]
    assert synced[0].endswith(b'"}\n')


def test_an_existing_ledger_is_not_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path, HEADER)
    assert read_ledger(path).count == 3


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    with Ledger.open(path), pytest.raises(LedgerError, match="in use by another process"):
        Ledger.open(path)
    Ledger.open(path).close()


# Damage


def test_a_last_record_torn_anywhere_counts_as_spent(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    *whole, last = lines_of(path)
    for kept in range(1, len(last)):
        path.write_bytes(b"".join(whole) + last[:kept])
        contents = read_ledger(path)
        assert contents.count == 3
        assert contents.torn_event == EVENT
        if kept % 40 == 1:
            with Ledger.open(path) as ledger:
                assert ledger.releases() == [(EVENT, 3)]
                ledger.record(9, 1, EVENT)
            assert read_ledger(path).count == 4
            assert read_ledger(path).torn_event is None


def test_a_torn_first_record_is_counted_as_the_header_declares(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", releases=1)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_ledger(path).releases() == [(EVENT, 1)]


def test_a_torn_first_record_of_unknown_kind_promises_nothing(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "a.jsonl", LedgerHeader("9f3c", 0)) as ledger:
        ledger.record(0, 0, EVENT)
    path = tmp_path / "a.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert composed_epsilon(read_ledger(path).releases(), 1e-4) == float("inf")


def test_a_lost_newline_keeps_the_records_own_event(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Ledger.create(path, HEADER) as ledger:
        ledger.record(0, 0, EVENT)
        ledger.record(1, 0, OTHER)
    path.write_bytes(path.read_bytes()[:-1])
    with Ledger.open(path) as ledger:
        assert ledger.releases() == [(EVENT, 1), (OTHER, 1)]


def test_a_torn_header_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", releases=0)
    for body in (b"", path.read_bytes()[:-5], b"\n", b"{}\n", b"not a ledger\n"):
        path.write_bytes(body)
        with pytest.raises(LedgerError, match="line 1"):
            read_ledger(path)


@pytest.mark.parametrize("bit", [0, 5])
def test_a_flipped_bit_before_the_last_record_is_refused(tmp_path: Path, bit: int) -> None:
    path = written(tmp_path / "a.jsonl")
    body = path.read_bytes()
    ends = [index for index, byte in enumerate(body) if byte == ord("\n")]
    for place in range(ends[2]):
        path.write_bytes(body[:place] + bytes([body[place] ^ (1 << bit)]) + body[place + 1 :])
        line = sum(end < place for end in ends) + 1
        with pytest.raises(LedgerError, match=rf"a\.jsonl, line ({line}|{line + 1}):"):
            read_ledger(path)


@pytest.mark.parametrize("bit", [0, 3, 6])
def test_a_flipped_bit_in_the_last_record_never_shortens_the_ledger(
    tmp_path: Path, bit: int
) -> None:
    path = written(tmp_path / "a.jsonl")
    body = path.read_bytes()
    for place in range(body[:-1].rindex(b"\n"), len(body)):
        path.write_bytes(body[:place] + bytes([body[place] ^ (1 << bit)]) + body[place + 1 :])
        with contextlib.suppress(LedgerError):
            assert read_ledger(path).count == 3


@pytest.mark.parametrize(
    "order",
    [
        [0, 2, 3, 4],
        [0, 1, 3, 4],
        [0, 2, 1, 3, 4],
        [0, 1, 1, 2, 3, 4],
        [1, 2, 3, 4],
        [0, 1, 2, 3, 0, 4],
    ],
)
def test_dropped_moved_or_doubled_lines_are_refused(tmp_path: Path, order: list[int]) -> None:
    path = written(tmp_path / "a.jsonl", releases=4)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[index] for index in order))
    with pytest.raises(LedgerError, match=r"a\.jsonl, line \d"):
        read_ledger(path)


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    from dpcsgp.privacy.ledger_format import GENESIS, encode_line, new_start

    line, _ = encode_line({**HEADER.as_record(new_start()), "format": 99}, GENESIS)
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(LedgerError, match="format 99, this version reads formats 1, 2, 3"):
        read_ledger(tmp_path / "a.jsonl")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_ledgers_are_refused_or_count_every_release_before_the_damage(
    tmp_path: Path, data: st.DataObject
) -> None:
    path, whole = tmp_path / "a.jsonl", tmp_path / "whole.jsonl"
    body = bytearray((whole if whole.exists() else written(whole)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "truncate"])):
            case "flip":
                body[place] ^= data.draw(st.integers(1, 255))
            case "insert":
                body[place:place] = data.draw(st.binary(min_size=1, max_size=300))
            case "delete":
                del body[place : place + data.draw(st.integers(1, 300))]
            case _:
                del body[max(place, 1) :]
        if not body:
            body = bytearray(b"\n")
    path.write_bytes(bytes(body))
    try:
        contents = read_ledger(path)
    except LedgerError:
        return
    assert set(contents.counts) <= {EVENT}
    assert contents.count >= body.count(b'{"kind":"release"')


def test_a_checkpoint_knows_an_edited_or_shortened_ledger(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", releases=3)
    with Ledger.open(path) as ledger:
        head, count = ledger.head, ledger.count
        ledger.record(3, 1, EVENT)
        ledger.check_against(head, count)  # longer is fine: releases after the checkpoint
        with pytest.raises(LedgerError, match="shortened"):
            ledger.check_against(head, count + 1)
        with pytest.raises(LedgerError, match="edited"):
            ledger.check_against("0" * 32, count)
        with pytest.raises(LedgerError):
            ledger.check_against(head, -1)
    path.write_bytes(b"".join(lines_of(path)[:-2]))
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="has 2 releases"):
        ledger.check_against(head, count)
    path.unlink()
    with Ledger.create(path, HEADER) as ledger, pytest.raises(LedgerError):
        ledger.check_against(head, count)


# A hostile disk


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let writes beyond this size fail in the middle, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_leaves_the_ledger_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    before = path.read_bytes()
    ledger = Ledger.open(path)
    with (
        largest_file(len(before) + 100),
        pytest.raises(LedgerError, match=r"cannot write ledger.*free space"),
    ):
        ledger.record(3, 1, EVENT)
    assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="open it again"):
        ledger.record(3, 1, EVENT)
    with Ledger.open(path) as ledger:
        ledger.record(3, 2, EVENT)
        assert ledger.count == 4


def test_a_full_disk_keeps_a_torn_ledger_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    torn = path.read_bytes()[:-9]
    path.write_bytes(torn)
    with largest_file(100), pytest.raises(LedgerError, match="cannot write ledger"):
        Ledger.open(path)
    assert path.read_bytes() == torn
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "a.lock"]


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere"
)
def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir(mode=0o500)
    with pytest.raises(LedgerError, match=r"cannot write ledger.*writable --out folder"):
        Ledger.create(folder / "a.jsonl", HEADER)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LedgerError, match=r"cannot write ledger.*writable --out folder"):
        Ledger.create(tmp_path / "file" / "a.jsonl", HEADER)


KILLED = """
import sys
from pathlib import Path
from dpcsgp.privacy.ledger import LedgerBook, ReleaseEvent

book = LedgerBook(Path(sys.argv[1]), [0, 1, 2], "9f3c")
attempt = book.next_attempt()
for step in range(10**6):
    book.record(step, attempt, {node: ReleaseEvent("poisson", 0.5, 2.0) for node in book.nodes})
    print(step, flush=True)  # stands for the message that leaves
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_release_unrecorded(tmp_path: Path) -> None:
    seen = 0
    for kill in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(5 + 13 * kill):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        seen += 5 + 13 * kill + len(child.stdout.readlines())
        child.stdout.close()
        assert all(contents.count >= seen for contents in read_ledgers(tmp_path))
    book = LedgerBook(tmp_path, [0, 1, 2], "9f3c")
    assert book.next_attempt() == 4
    book.close()


# Many nodes, many runs


def test_a_book_records_only_the_nodes_that_release(tmp_path: Path) -> None:
    book = LedgerBook(
        tmp_path,
        [4, 7, 9],
        "9f3c",
        config="c0ffee",
        deltas=[1e-4, 1e-5, 1e-6],
        events=[EVENT, EVENT, OTHER],
    )
    assert book.next_attempt() == 0
    book.record(0, 0, {4: EVENT, 9: OTHER})
    book.record(1, 0, {9: OTHER})
    book.record(2, 0, {})
    assert book.releases(4) == [(EVENT, 1)]
    assert book.releases(7) == []
    assert book.releases(9) == [(OTHER, 2)]
    heads = json.loads(json.dumps(book.heads()))
    book.record(2, 0, {4: EVENT})
    book.check_against(heads)
    book.close()
    again = LedgerBook(tmp_path, [4, 7, 9], "9f3c")
    again.check_against(heads)
    assert again.next_attempt() == 1
    assert again.releases(4) == [(EVENT, 2)]
    again.close()
    assert [contents.header.delta for contents in read_ledgers(tmp_path)] == [1e-4, 1e-5, 1e-6]


def test_a_book_refuses_strangers(tmp_path: Path) -> None:
    book = LedgerBook(tmp_path, [0, 1], "9f3c")
    book.record(0, 0, {0: EVENT, 1: EVENT})
    heads = book.heads()
    with pytest.raises(LedgerError, match="node 5 has no ledger here"):
        book.record(1, 0, {5: EVENT})
    with pytest.raises(LedgerError, match="knows no ledger of node 1"):
        book.check_against({"0": heads["0"]})
    book.close()
    with pytest.raises(LedgerError, match="belongs to run 9f3c"):
        LedgerBook(tmp_path, [0, 1], "another")
    (tmp_path / "node-0001.jsonl").unlink()
    book = LedgerBook(tmp_path, [0, 1], "9f3c")
    with pytest.raises(LedgerError, match="has 0 releases"):
        book.check_against(heads)
    book.close()


def test_several_runs_on_the_same_data_add_up(tmp_path: Path) -> None:
    for run, event in (("first", EVENT), ("second", OTHER)):
        book = LedgerBook(tmp_path / run / "ledger", [0, 1], run, deltas=[1e-4, 1e-4])
        for step in range(5):
            book.record(step, 0, {0: event, 1: event} if step < 3 else {1: event})
        book.close()
    ledgers = read_ledgers([tmp_path / "first", tmp_path / "second" / "ledger"])
    by_node = releases_by_node(ledgers)
    assert {node: dict(releases) for node, releases in by_node.items()} == {
        0: {EVENT: 3, OTHER: 3},
        1: {EVENT: 5, OTHER: 5},
    }
    assert common_delta(None, [ledger.header for ledger in ledgers]) == 1e-4


def test_missing_ledgers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_ledgers(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no ledger"):
        read_ledgers([tmp_path])


def test_deltas_that_differ_must_be_given(tmp_path: Path) -> None:
    headers = [LedgerHeader("a", 0, delta=1e-4), LedgerHeader("a", 1, delta=1e-5)]
    with pytest.raises(ConfigError, match="give --delta"):
        common_delta(None, headers)
    assert common_delta(1e-6, headers) == 1e-6
    assert common_delta(None, headers[:1]) == 1e-4


@pytest.mark.parametrize("private", [True, False])
def test_seeded_and_fresh_noise_do_not_share_a_ledger(tmp_path: Path, private: bool) -> None:
    LedgerBook(tmp_path, [0], "9f3c", private=private).close()
    with pytest.raises(LedgerError, match=r"privacy\.seed"):
        LedgerBook(tmp_path, [0], "9f3c", private=not private)
    LedgerBook(tmp_path, [0], "9f3c", private=private).close()
