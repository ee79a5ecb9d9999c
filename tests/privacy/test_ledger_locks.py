"""While a ledger is open nobody else writes to it, and what was made for it is on the disk."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from dpcsgp.errors import LedgerError
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.ledger import Ledger, LedgerBook, LedgerHeader, read_ledger
from dpcsgp.privacy.ledger_disk import LedgerLock

EVENT = ReleaseEvent("poisson", 0.1, 1.0)
fcntl = pytest.importorskip("fcntl")


def replace_by_a_copy(path: Path) -> None:
    """Put another file of the same contents in its place, as the repair of a torn record does."""
    shutil.copy(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_open_ledger_is_locked_even_if_its_file_is_replaced(
    tmp_path: Path, replaced: bool
) -> None:
    path = tmp_path / "node-0000.jsonl"
    with Ledger.create(path, LedgerHeader("run", 0)):
        if replaced:
            replace_by_a_copy(path)
        with pytest.raises(LedgerError, match="in use by another process"):
            LedgerLock(path)
    LedgerLock(path).release()


def test_a_book_locks_before_it_reads(tmp_path: Path) -> None:
    """A start that comes second neither reads nor repairs: the torn record stays as it is."""
    with LedgerBookFolder(tmp_path) as path:
        with path.open("ab") as file:
            file.write(b'{"kind":"rel')
        torn = path.read_bytes()
        replace_by_a_copy(path)
        with pytest.raises(LedgerError, match="in use by another process"):
            LedgerBook(tmp_path, [0], "run")
        with pytest.raises(LedgerError, match="in use by another process"):
            Ledger.open(path)
        assert path.read_bytes() == torn


class LedgerBookFolder:
    """A book of one node that is open inside, with one record."""

    def __init__(self, folder: Path) -> None:
        self.book = LedgerBook(folder, [0], "run")
        self.book.record(0, 0, {0: EVENT})
        self.path = folder / "node-0000.jsonl"

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.book.close()


def test_programs_that_lock_the_file_itself_are_kept_out(tmp_path: Path) -> None:
    """As older releases do."""
    path = tmp_path / "node-0000.jsonl"
    with (
        Ledger.create(path, LedgerHeader("run", 0)),
        path.open("r+b") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(sys.platform == "darwin", reason="has another name for fsync")
def test_new_folders_and_every_record_of_a_book_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    folder = tmp_path / "results" / "run" / "ledger"
    book = LedgerBook(folder, [0, 1], "run")
    new = [folder, folder.parent, folder.parent.parent]
    assert {path.stat().st_ino for path in new} <= set(synced)
    files = [folder / f"node-{node:04d}.jsonl" for node in (0, 1)]
    for step in range(3):
        synced.clear()
        book.record(step, 0, {0: EVENT, 1: EVENT})
        assert {path.stat().st_ino for path in files} <= set(synced)
        assert [read_ledger(path).count for path in files] == [step + 1] * 2
    book.close()
