"""Frames of one sender on disk, in order, each once: files to which records are appended.

A record is a head (round, size, chain before, chain after) and the frame. The chain is a hash over
all frames so far: two logs of one sender with equal chains hold equal bytes from the first round
on. What a crash leaves half written at the end fails its chain and is cut off when the log is
opened; it was never told to anybody, for a frame leaves, or is acknowledged, only after `sync`.

A frame can be read as soon as it is appended, before it is safe: whoever sent it still has it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dpcsgp.errors import DiskError, JournalError, WireError

CHAIN_BYTES: Final = 32
_HEAD = struct.Struct(f"<4sQQ{CHAIN_BYTES}s{CHAIN_BYTES}s")
_MAGIC: Final = b"dpcj"
_SEGMENT_BYTES: Final = 16 * 2**20  # a file that is larger gets no further record


class _Record(NamedTuple):
    path: Path
    start: int  # of the frame in its file
    size: int
    before: bytes
    after: bytes

    @property
    def stop(self) -> int:
        return self.start + self.size


def chain_after(before: bytes, round_: int, frame: bytes | memoryview) -> bytes:
    """Return the chain of all frames up to this one."""
    digest = hashlib.blake2b(before, digest_size=CHAIN_BYTES, person=b"dpcsgp journal")
    digest.update(struct.pack("<QQ", round_, len(frame)))
    digest.update(frame)
    return digest.digest()


class FrameLog:
    """Frames of rounds 0, 1, ... of one sender; the oldest may be forgotten. Thread-safe.

    Args:
        folder: its files; made if missing.
        origin: the chain before round 0: names the run and the sender.

    Raises:
        JournalError: the files are damaged or belong to another run.
    """

    def __init__(self, folder: Path, origin: bytes) -> None:
        self._folder, self._origin = folder, origin
        self._lock = threading.RLock()
        self._records: dict[int, _Record] = {}
        self._file: int | None = None  # descriptor of the last file, for appending
        self._broken: str = ""
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._safe = self.next

    @property
    def next(self) -> int:
        """The round that is appended next."""
        with self._lock:
            return next(reversed(self._records)) + 1 if self._records else 0

    @property
    def safe(self) -> int:
        """The number of rounds that are safe on the disk."""
        with self._lock:
            return self._safe

    @property
    def first(self) -> int:
        """The oldest round that is kept, or `next`."""
        with self._lock:
            return next(iter(self._records), 0)

    def append(self, frame: bytes | memoryview, expected: bytes | None = None) -> int:
        """Add the frame of round `next` and return that round; it is safe after `sync`.

        Args:
            frame: its bytes.
            expected: the chain after it, if somebody has announced one.

        Raises:
            WireError: the chain is not the announced one.
            JournalError: the disk does not take it; the log is as before.
        """
        with self._lock:
            self._refuse_if_broken()
            round_ = self.next
            before = self.chain_before(round_)
            assert before is not None
            after = chain_after(before, round_, frame)
            if expected not in (None, after):
                raise WireError(f"round {round_}: damaged on the way, its digest does not match")
            head = _HEAD.pack(_MAGIC, round_, len(frame), before, after)
            path, end = self._place(round_)
            try:
                self._write(path, end, head, frame)
            except OSError as error:
                raise self._refusal(round_, error) from error
            self._records[round_] = _Record(path, end + _HEAD.size, len(frame), before, after)
            return round_

    def sync(self) -> int:
        """Bring everything that was appended to the disk; return the number of safe rounds.

        Raises:
            JournalError: the disk failed; nothing is appended any more.
        """
        with self._lock:
            self._refuse_if_broken()
            appended = self.next
            if self._file is None or appended == self._safe:
                return self._safe
            # A descriptor of its own: the file may be closed for a new one meanwhile.
            descriptor = os.dup(self._file)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # After a failed sync nobody knows what is on the disk.
            self._broken = f"{self._folder}: the disk failed ({error.strerror})"
            raise DiskError(self._broken) from error
        finally:
            os.close(descriptor)
        with self._lock:
            self._safe = max(self._safe, appended)
            return self._safe

    def read(self, round_: int, start: int = 0, size: int | None = None) -> bytes:
        """Return a frame, or `size` bytes of it from `start` on.

        Raises:
            JournalError: the round is not kept.
        """
        with self._lock:
            if round_ not in self._records:
                raise JournalError(f"{self._folder}: round {round_} is not kept")
            record = self._records[round_]
        length = record.size - start if size is None else min(size, record.size - start)
        with open(record.path, "rb") as file:
            file.seek(record.start + start)
            return file.read(length)

    def size_of(self, round_: int) -> int:
        """Return the size of a kept frame in bytes."""
        with self._lock:
            return self._records[round_].size

    def chain_before(self, round_: int) -> bytes | None:
        """Return the chain of all frames before a round; None if it is no longer known."""
        with self._lock:
            if round_ in self._records:
                return self._records[round_].before
            if round_ - 1 in self._records:
                return self._records[round_ - 1].after
            return self._origin if round_ == 0 else None

    def forget_before(self, round_: int) -> None:
        """Remove files all of whose rounds are older; the last file stays."""
        with self._lock:
            # The newest safe record must stay: without it nobody knows how far the log went.
            needed = min(round_, self._safe - 1)
            last_of = {record.path: number for number, record in self._records.items()}
            gone = {path for path, last in last_of.items() if last < needed}
            for path in gone:
                path.unlink(missing_ok=True)
            self._records = {
                number: record
                for number, record in self._records.items()
                if record.path not in gone
            }

    def close(self) -> None:
        """Close the file; what was appended but not synced may be lost."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._broken = self._broken or f"{self._folder}: closed"

    def _place(self, round_: int) -> tuple[Path, int]:
        """Return the file for the next record and where it begins there."""
        last = self._records.get(round_ - 1)
        if last is not None and last.stop < _SEGMENT_BYTES:
            return last.path, last.stop
        return self._folder / f"{round_:012d}.frames", 0

    def _write(self, path: Path, end: int, head: bytes, frame: bytes | memoryview) -> None:
        if end == 0:
            self._open_new(path)
        elif self._file is None:
            self._file = os.open(path, os.O_WRONLY)
        assert self._file is not None
        # Cut off what a failed attempt may have left, then write behind the last record.
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        for part in (head, frame):
            view = memoryview(part)
            while view:
                view = view[os.write(self._file, view) :]

    def _open_new(self, path: Path) -> None:
        if self._file is not None:
            self.sync()  # later calls will only see the new file
            os.close(self._file)
            self._file = None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        _sync(self._folder)

    def _refusal(self, round_: int, error: OSError) -> DiskError:
        return DiskError(
            f"{self._folder}: round {round_} cannot be written ({error.strerror}); free space "
            "and start again, nothing was lost"
        )

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise DiskError(self._broken)

    def _recover(self) -> None:
        """Read all files; cut off what was half written at the end of the last."""
        paths = sorted(self._folder.glob("*.frames"))
        for path in paths:
            end = 0
            for round_, record in _records_in(path):
                if not self._follows(round_, record):
                    break
                self._records[round_] = record
                end = record.stop
            if end < path.stat().st_size or end == 0:
                if path != paths[-1]:
                    raise JournalError(
                        f"{path} is damaged; restore the folder of this party from a copy that "
                        "was made while it was stopped, or have the federation amended"
                    )
                _cut(path, end)
        # A process that was killed may have left records that only the system's memory holds.
        if self._records:
            _sync(self._records[self.next - 1].path)

    def _follows(self, round_: int, record: _Record) -> bool:
        """Tell whether a record is the next one; the first of all may be of any round."""
        if not self._records:
            return round_ > 0 or record.before == self._origin
        return round_ == self.next and record.before == self.chain_before(round_)


def _records_in(path: Path) -> Iterator[tuple[int, _Record]]:
    """Yield the whole records at the beginning of a file; stop at the first that is not."""
    end, length = 0, path.stat().st_size
    with open(path, "rb") as file:
        while end + _HEAD.size <= length:
            magic, round_, size, before, after = _HEAD.unpack(file.read(_HEAD.size))
            start = end + _HEAD.size
            if magic != _MAGIC or start + size > length:
                return
            if chain_after(before, round_, file.read(size)) != after:
                return
            yield round_, _Record(path, start, size, before, after)
            end = start + size


def _cut(path: Path, end: int) -> None:
    """Shorten a file to its whole records, or remove it if it has none."""
    if end == 0:
        path.unlink()
    else:
        with open(path, "r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
