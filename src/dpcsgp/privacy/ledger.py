"""A durable record of every release: on disk before the message leaves, and never shorter afterwards.

One append-only file per node (see `ledger_format`). `record` returns after the operating system has put the line on the
disk. The head (last checksum) and count go into the checkpoint, so that an edited or shortened ledger is refused on
resume. The owner of the machine can rewrite everything; a ledger protects from accidents and from forgetting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.files import write_atomically
from dpcsgp.privacy.accounting import composed_epsilon
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.ledger_format import (
    GENESIS,
    LedgerContents,
    LedgerHeader,
    encode_line,
    ledger_files,
    read_ledger,
    release_record,
    torn_record,
)

__all__ = [
    "Ledger",
    "LedgerBook",
    "LedgerContents",
    "LedgerHeader",
    "common_delta",
    "read_ledger",
    "read_ledgers",
    "releases_by_node",
]

_MOST_THREADS = 16


def _sync(descriptor: int) -> None:
    """Wait until the file is on the disk itself, not only in the disk's cache (macOS asks for it by another name)."""
    try:
        import fcntl

        full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is not None:
            fcntl.fcntl(descriptor, full_sync)
            return
    except ImportError:
        pass
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Keep a second process from appending to the same chain; released when the file is closed or the process dies."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(
            f"ledger {path} is in use by another process; wait for it or choose another --out folder"
        ) from error


def _write_error(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"cannot write ledger {path}: {error.strerror}; free space or choose a writable --out folder. "
        "What was recorded before is intact, and nothing was sent"
    )


@final
class Ledger:
    """The ledger of one node, open for appending; make one with `create` or `open`."""

    def __init__(self, contents: LedgerContents) -> None:
        self._contents, self._path = contents, contents.path
        self._last_attempt, self._size = contents.last_attempt, contents.whole_bytes
        try:
            self._descriptor: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise _write_error(self._path, error) from error
        try:
            _lock(self._descriptor, self._path)
        except LedgerError:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, header: LedgerHeader) -> Ledger:
        """Start a ledger; the header and the folder entry are on disk when this returns."""
        if path.exists():
            raise LedgerError(f"ledger {path} exists already; resume the run or choose another --out folder")
        line, _ = encode_line(header.as_record(), GENESIS)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, line)
            for folder in path.parents[1:4]:  # the run's own folder may be as new as the ledger
                _sync_folder(folder)
        except OSError as error:
            raise _write_error(path, error) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Verify a ledger and open it for appending; a torn last record stays as a release that counts as spent."""
        contents = read_ledger(path)
        if contents.torn_event is not None:
            line, _ = encode_line(torn_record(contents.torn_event), contents.head)
            try:
                write_atomically(path, path.read_bytes()[: contents.whole_bytes] + line)
            except OSError as error:
                raise _write_error(path, error) from error
            contents = read_ledger(path)
        return cls(contents)

    @property
    def header(self) -> LedgerHeader:
        """What this ledger is about."""
        return self._contents.header

    @property
    def head(self) -> str:
        """Checksum of the last line; covers all lines before it."""
        return self._contents.head

    @property
    def count(self) -> int:
        """Number of releases recorded."""
        return self._contents.count

    @property
    def last_attempt(self) -> int:
        """Largest attempt recorded, -1 if none."""
        return self._last_attempt

    def record(self, step: int, attempt: int, event: ReleaseEvent) -> None:
        """Append one release; it is on disk when this returns, and must be before its message leaves."""
        self.write(step, attempt, event)
        self.sync()

    def write(self, step: int, attempt: int, event: ReleaseEvent) -> None:
        """Hand one release to the operating system; it counts only after `sync`."""
        descriptor = self._open_descriptor()
        line, digest = encode_line(release_record(int(step), int(attempt), event), self.head)
        try:
            written = os.write(descriptor, line)
            while written < len(line):
                written += os.write(descriptor, line[written:])
        except OSError as error:
            self._give_up()
            raise _write_error(self._path, error) from error
        self._size += len(line)
        self._contents.append(event, digest)
        self._last_attempt = max(self._last_attempt, int(attempt))

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        try:
            _sync(self._open_descriptor())
        except OSError as error:
            self.close()  # what is on disk is unknown now; reopening reads and verifies it
            raise _write_error(self._path, error) from error

    def releases(self) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release with its count."""
        return self._contents.releases()

    def epsilon(self, delta: float | None = None) -> float:
        """Return the eps of everything recorded, at the header's delta unless another is given."""
        return composed_epsilon(self.releases(), common_delta(delta, [self.header]))

    def check_against(self, head: str, count: int) -> None:
        """Refuse a ledger that does not continue the one a checkpoint saw."""
        if not self._contents.continues(head, count):
            raise LedgerError(
                f"ledger {self._path} has {self.count} releases and does not continue the checkpoint's (after {count} "
                f"releases: {head[:8]}...): it was edited, shortened or belongs to another run. Restore it from a backup"
            )

    def close(self) -> None:
        """Close the file and let other processes have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise LedgerError(f"ledger {self._path} is closed after an error or by `close`; open it again")
        return self._descriptor

    def _give_up(self) -> None:
        """Take back a half-written line; if even that fails, the torn line counts as spent on the next opening."""
        descriptor = self._open_descriptor()
        try:
            os.ftruncate(descriptor, self._size)
            _sync(descriptor)
        except OSError:
            pass
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@final
class LedgerBook:
    """The ledgers of all hosted nodes, `folder/node-0003.jsonl` and so on; opens those that exist, starts the others.

    `deltas` and `events` (per node, in the order of `nodes`) and `config` (a fingerprint of the settings) go into the
    headers of new ledgers. The files are brought to disk in parallel: the file system then commits them together.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[int],
        run_id: str,
        *,
        config: str = "",
        deltas: Sequence[float] | None = None,
        events: Sequence[ReleaseEvent | None] | None = None,
        private: bool = True,
    ) -> None:
        self.nodes = tuple(nodes)
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, len(self.nodes) or 1), thread_name_prefix="ledger")
        _allow_open_files(len(self.nodes))

        def start(row: int) -> Ledger:
            path = folder / f"node-{self.nodes[row]:04d}.jsonl"
            delta = float(deltas[row]) if deltas else None
            header = LedgerHeader(run_id, self.nodes[row], config, delta, events[row] if events else None, private)
            ledger = Ledger.open(path) if path.exists() else Ledger.create(path, header)
            if (ledger.header.run_id, ledger.header.node) != (run_id, self.nodes[row]):
                ledger.close()
                raise LedgerError(
                    f"ledger {path} belongs to run {ledger.header.run_id}, node {ledger.header.node}, not to run {run_id}; "
                    "choose another --out folder"
                )
            if ledger.header.private != private:
                ledger.close()
                before, now = ("fresh", "seeded") if ledger.header.private else ("seeded", "fresh")
                raise LedgerError(
                    f"ledger {path} was started with {before} noise and this run has {now} noise (privacy.seed); continue as "
                    "it was started, or choose another --out folder"
                )
            return ledger

        self._ledgers = dict(zip(self.nodes, self._all(start, range(len(self.nodes))), strict=True))

    def record(self, step: int, attempt: int, events_by_node: Mapping[int, ReleaseEvent]) -> None:
        """Append one release for each of these nodes; all are on disk when this returns."""
        ledgers = [self._ledger(node) for node in events_by_node]
        for ledger, event in zip(ledgers, events_by_node.values(), strict=True):
            ledger.write(step, attempt, event)
        self._all(Ledger.sync, ledgers)

    def heads(self) -> dict[str, list[Any]]:
        """Return node -> [head, count], for the checkpoint."""
        return {str(node): [ledger.head, ledger.count] for node, ledger in self._ledgers.items()}

    def check_against(self, heads: Mapping[str, Any]) -> None:
        """Refuse ledgers that do not continue those a checkpoint saw."""
        for node, ledger in self._ledgers.items():
            match heads.get(str(node)):
                case [str(head), int(count)]:
                    ledger.check_against(head, count)
                case other:
                    raise LedgerError(
                        f"the checkpoint knows no ledger of node {node} (found {other!r}); it is of another run"
                    )

    def releases(self, node: int) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release of a node with its count."""
        return self._ledger(node).releases()

    def next_attempt(self) -> int:
        """Return a number for this start that no record carries yet."""
        return 1 + max((ledger.last_attempt for ledger in self._ledgers.values()), default=-1)

    def close(self) -> None:
        """Close all files."""
        for ledger in self._ledgers.values():
            ledger.close()
        self._pool.shutdown()

    def _ledger(self, node: int) -> Ledger:
        if node not in self._ledgers:
            raise LedgerError(f"node {node} has no ledger here; this process hosts {list(self.nodes)}")
        return self._ledgers[node]

    def _all(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Do the work for all items, in parallel if there are several; the first error is raised after all ended."""
        if len(items) <= 1:
            return [work(item) for item in items]
        futures = [self._pool.submit(work, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]


def read_ledgers(paths: Path | str | Iterable[Path | str]) -> list[LedgerContents]:
    """Read and verify ledgers from files, `ledger` folders or results folders; copies of one ledger count once."""
    given = [paths] if isinstance(paths, Path | str) else list(paths)
    kept: dict[tuple[str, int], LedgerContents] = {}
    for path in given:
        for file in ledger_files(Path(path)):
            found = read_ledger(file)
            key = found.header.run_id, found.header.node
            other = kept.setdefault(key, found)
            shorter, longer = sorted((other, found), key=lambda ledger: (len(ledger.digests), ledger.count))
            if not longer.continues(shorter.head, len(shorter.digests) // 16 - 1):
                raise LedgerError(f"{other.path} and {found.path} claim to be run {key[0]}, node {key[1]}, but differ")
            kept[key] = longer
    return list(kept.values())


def releases_by_node(ledgers: Iterable[LedgerContents]) -> dict[int, list[tuple[ReleaseEvent, int]]]:
    """Return, per node, the releases of all its ledgers together: runs on the same data add up."""
    by_node: dict[int, list[tuple[ReleaseEvent, int]]] = {}
    for ledger in ledgers:
        by_node.setdefault(ledger.header.node, []).extend(ledger.releases())
    return dict(sorted(by_node.items()))


def common_delta(delta: float | None, headers: Iterable[LedgerHeader]) -> float:
    """Return the given delta, or the one that all headers name."""
    found = {header.delta for header in headers} if delta is None else {delta}
    value = found.pop() if len(found) == 1 else None
    if value is None:
        raise ConfigError("delta: the ledgers do not name one common value; give --delta, such as 1e-4")
    return value


def _allow_open_files(wanted: int) -> None:
    """Raise the limit on open files where one file per node would not fit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    if soft != resource.RLIM_INFINITY and soft < needed and (hard == resource.RLIM_INFINITY or hard >= needed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
