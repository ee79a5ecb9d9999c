"""What a ledger asks of the system: a lock before the first read, the disk before the return.

The lock is on a file of its own, `node-0003.lock` beside `node-0003.jsonl`. It is never replaced or
deleted: two processes that lock it always mean the same file. It is empty and stays behind.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dpcsgp.errors import LedgerError

try:
    import fcntl
except ImportError:  # no locks here
    fcntl = None


def write_error(path: Path, error: OSError) -> LedgerError:
    """Return what to tell when the disk refuses."""
    return LedgerError(
        f"cannot write ledger {path}: {error.strerror}; free space or choose a writable --out "
        "folder. What was recorded before is intact, and nothing was sent"
    )


_AS_IT_IS: Final = getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines


class LedgerLock:
    """The right to append to one ledger; it ends with `release` or with the process."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        try:
            flags = os.O_RDWR | os.O_CREAT
            self._descriptor: int | None = os.open(ledger.with_suffix(".lock"), flags, 0o666)
        except OSError as error:
            raise write_error(ledger, error) from error
        try:
            lock_descriptor(self._descriptor, ledger)
        except LedgerError:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes have the ledger."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_in_order(ledgers: Iterable[Path]) -> list[LedgerLock]:
    """Lock all ledgers, or none; in one order, so that of two processes one gets them all."""
    locks: list[LedgerLock] = []
    try:
        for ledger in sorted(ledgers):
            _make_folder(ledger)
            locks.append(LedgerLock(ledger))
    except LedgerError:
        for lock in locks:
            lock.release()
        raise
    return locks


def _make_folder(ledger: Path) -> None:
    try:
        ledger.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(ledger, error) from error


def lock_descriptor(descriptor: int, ledger: Path) -> None:
    """Lock an open file until it is closed or the process dies; never wait for another one."""
    # flock, not lockf: the latter is dropped when any descriptor of the file is closed
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise LedgerError(
                f"ledger {ledger} cannot be locked: {error.strerror}; choose an --out folder on "
                "a local disk"
            ) from error
        raise LedgerError(
            f"ledger {ledger} is in use by another process; wait for it or choose another --out "
            "folder"
        ) from error


def open_to_append(ledger: Path) -> int:
    """Open a ledger whose lock is held; also lock the file itself, as older releases do."""
    try:
        descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | _AS_IT_IS)
    except FileNotFoundError as error:
        raise LedgerError(f"cannot read ledger {ledger}: {error.strerror}") from error
    except OSError as error:
        raise write_error(ledger, error) from error
    try:
        lock_descriptor(descriptor, ledger)
    except LedgerError:
        os.close(descriptor)
        raise
    return descriptor


def sync(descriptor: int) -> None:
    """Wait until a file is on the disk, not only in its cache."""
    # On macOS fsync stops at the drive's cache; F_FULLFSYNC empties that too.
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full_sync is not None:
        fcntl.fcntl(descriptor, full_sync)
    else:
        os.fsync(descriptor)


def allow_open_files(wanted: int) -> None:
    """Raise the limit on open files where so many more would not fit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    room = hard == resource.RLIM_INFINITY or hard >= needed
    if soft != resource.RLIM_INFINITY and soft < needed and room:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
