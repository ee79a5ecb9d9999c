"""A durable record of every release: on disk before the message leaves, never shorter afterwards.

One append-only file per node (see `ledger_format`). `record` returns after the operating system has
put the line on the disk. The head (last checksum) and count go into the checkpoint, so that an
edited or shortened ledger is refused on resume. The owner of the machine can rewrite everything; a
ledger protects from accidents and from forgetting.

Whoever appends has locked a file beside the ledger (see `ledger_disk`) before the first read and
keeps the lock to the end: creation, reading and repair of a torn record are all done by one
process. Reading alone needs no lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from dpcsgp.errors import LedgerError
from dpcsgp.privacy.accounting import composed_epsilon
from dpcsgp.privacy.events import ReleaseEvent, Unit
from dpcsgp.privacy.ledger_disk import (
    LedgerLock,
    allow_open_files,
    lock_in_order,
    open_to_append,
    sync,
    write_error,
)
from dpcsgp.privacy.ledger_format import (
    GENESIS,
    Fork,
    LedgerContents,
    LedgerHeader,
    encode_line,
    new_start,
    read_ledger,
    release_record,
    torn_record,
)
from dpcsgp.privacy.ledger_reading import (
    LedgerHead,
    check_heads,
    common_delta,
    ledger_heads,
    read_ledgers,
    releases_by_node,
)
from dpcsgp.records.files import sync_folder, write_atomically

__all__ = [
    "Fork",
    "Ledger",
    "LedgerBook",
    "LedgerContents",
    "LedgerHead",
    "LedgerHeader",
    "check_heads",
    "common_delta",
    "ledger_heads",
    "read_ledger",
    "read_ledgers",
    "releases_by_node",
]

_MOST_THREADS = 16


@final
class Ledger:
    """The ledger of one node, open for appending; make one with `create` or `open`."""

    def __init__(self, lock: LedgerLock, start: str) -> None:
        self._lock, self._path, self.start = lock, lock.ledger, start
        self._descriptor: int | None = None
        try:
            self._descriptor = open_to_append(self._path)
            self._contents = self._verified()
        except BaseException:
            self.close()
            raise
        self._last_attempt, self._size = self._contents.last_attempt, self._contents.whole_bytes

    @classmethod
    def create(cls, path: Path, header: LedgerHeader) -> Ledger:
        """Start a ledger; the header and the folder entry are on disk when this returns."""
        (lock,) = lock_in_order([path])
        if path.exists():
            lock.release()
            raise LedgerError(
                f"ledger {path} exists already; resume the run or choose another --out folder"
            )
        return cls.under(lock, header)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Verify a ledger and open it for appending; a torn last record counts as spent."""
        return cls(LedgerLock(path), new_start())

    @classmethod
    def under(cls, lock: LedgerLock, header: LedgerHeader) -> Ledger:
        """Open the ledger that is locked, or start it if there is none; `close` unlocks it."""
        start = new_start()
        try:
            if not lock.ledger.exists():
                _write_header(lock.ledger, header, start)
        except BaseException:
            lock.release()
            raise
        return cls(lock, start)

    def _verified(self) -> LedgerContents:
        """Read the ledger; a torn last record is replaced, in a new file of the same name."""
        # A ledger in order is left as it is.
        contents = read_ledger(self._path)
        if contents.torn_event is None:
            return contents
        record = torn_record(self.start, contents.torn_event, contents.torn)
        line, _ = encode_line(record, contents.head)
        # In a new file: a crash in the middle of a repair in place could lose lines that count.
        try:
            write_atomically(self._path, self._path.read_bytes()[: contents.whole_bytes] + line)
        except OSError as error:
            raise write_error(self._path, error) from error
        # The old descriptor means the file that was replaced: appends there would be lost.
        replaced, self._descriptor = self._open_descriptor(), open_to_append(self._path)
        os.close(replaced)
        return read_ledger(self._path)

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
        """Append one release; it is on disk when this returns, and then its message may leave."""
        self.write(step, attempt, event)
        self.sync()

    def write(self, step: int, attempt: int, event: ReleaseEvent, *, lost: bool = False) -> None:
        """Hand one release to the operating system; it counts only after `sync`."""
        descriptor = self._open_descriptor()
        record = release_record(self.start, int(step), int(attempt), event, lost)
        line, digest = encode_line(record, self.head)
        try:
            # Unbuffered: what Python would keep back, a crash would lose.
            written = os.write(descriptor, line)
            while written < len(line):  # the system may take less than it is given
                written += os.write(descriptor, line[written:])
        except OSError as error:
            self._give_up()
            raise write_error(self._path, error) from error
        self._size += len(line)
        self._contents.append(event, digest, (int(step), int(attempt)))
        self._last_attempt = max(self._last_attempt, int(attempt))

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        try:
            sync(self._open_descriptor())
        except OSError as error:
            self.close()  # what is on disk is unknown now; reopening reads and verifies it
            raise write_error(self._path, error) from error

    def releases(self) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release with its count."""
        return self._contents.releases()

    def has(self, step: int, attempt: int) -> bool:
        """Say whether the release of this step by this start is recorded."""
        return (step, attempt) in self._contents.places

    def steps(self) -> set[int]:
        """Return the steps of all releases whose step is known."""
        return {step for step, _ in self._contents.places}

    def epsilon(self, delta: float | None = None) -> float:
        """Return the eps of everything recorded, at the header's delta unless another is given."""
        return composed_epsilon(self.releases(), common_delta(delta, [self.header]))

    def check_against(self, head: str, count: int) -> None:
        """Refuse a ledger that does not continue the one a checkpoint saw."""
        if not self._contents.continues(head, count):
            raise LedgerError(
                f"ledger {self._path} has {self.count} releases and does not continue the "
                f"checkpoint's (after {count} releases: {head[:8]}...): it was edited, shortened "
                "or belongs to another run. Restore it from a backup"
            )

    def close(self) -> None:
        """Close the file and let other processes have it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self._lock.release()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise LedgerError(
                f"ledger {self._path} is closed after an error or by `close`; open it again"
            )
        return self._descriptor

    def _give_up(self) -> None:
        """Take back a half-written line, and close."""
        descriptor = self._open_descriptor()
        try:
            os.ftruncate(descriptor, self._size)
            sync(descriptor)
        except OSError:
            pass  # the torn line stays, and counts as spent on the next opening
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@final
class LedgerBook:
    """The ledgers of all hosted nodes, `folder/node-0003.jsonl` and so on.

    Opens those that exist and starts the others. The files are brought to disk in parallel: the
    file system then commits them together.

    Args:
        folder: where the files lie; made if it does not exist.
        nodes: numbers of the hosted nodes.
        run_id: public name of the run; ledgers of another run are refused.
        config: a fingerprint of the settings, for the headers of new ledgers.
        deltas: per node in the order of `nodes`, for these headers.
        events: per node, what a torn first record would be counted as.
        private: whether noise is fresh; False for runs with `privacy.seed`.
        unit: what is promised privacy as a whole, an example or a person.
        begun_as: numbers under which the ledgers were begun, in files and headers; None: `nodes`.

    Raises:
        LedgerError: for a ledger that is damaged, in use, of another run, or cannot be written.
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
        unit: Unit = "example",
        begun_as: Sequence[int] | None = None,
    ) -> None:
        self.nodes, numbers = tuple(nodes), tuple(nodes if begun_as is None else begun_as)
        self._ledgers: dict[int, Ledger] = {}
        allow_open_files(2 * len(self.nodes))
        paths = [folder / f"node-{node:04d}.jsonl" for node in numbers]
        # all locks before the first read: nobody may append between reading and writing
        locks = {lock.ledger: lock for lock in lock_in_order(paths)}
        self._pool = ThreadPoolExecutor(
            min(_MOST_THREADS, len(self.nodes) or 1), thread_name_prefix="ledger"
        )

        def start(row: int) -> None:
            delta, event = float(deltas[row]) if deltas else None, events[row] if events else None
            header = LedgerHeader(run_id, numbers[row], config, delta, event, private, unit)
            self._ledgers[self.nodes[row]] = Ledger.under(locks[paths[row]], header)
            _refuse_foreign(paths[row], self._ledgers[self.nodes[row]].header, header)

        try:
            self._all(start, range(len(self.nodes)))
        except BaseException:
            self.close()
            raise
        # Threads end in any order.
        self._ledgers = {node: self._ledgers[node] for node in self.nodes}

    def record(self, step: int, attempt: int, events_by_node: Mapping[int, ReleaseEvent]) -> None:
        """Append one release for each of these nodes; all are on disk when this returns."""
        ledgers = [self._ledger(node) for node in events_by_node]
        # All lines first, then all fsyncs at once: they share the disk's one flush.
        for ledger, event in zip(ledgers, events_by_node.values(), strict=True):
            ledger.write(step, attempt, event)
        self._all(Ledger.sync, ledgers)

    def record_lost(self, node: int, events_by_step: Mapping[int, ReleaseEvent]) -> int:
        """Append releases whose lines were lost, unless they are here; return how many lacked."""
        ledger, attempt = self._ledger(node), self.next_attempt()
        known = ledger.steps()
        lost = {step: event for step, event in events_by_step.items() if step not in known}
        for step, event in lost.items():
            ledger.write(step, attempt, event, lost=True)
        ledger.sync()
        return len(lost)

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
                        f"the checkpoint knows no ledger of node {node} (found {other!r}); it is "
                        "of another run"
                    )

    def releases(self, node: int) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release of a node with its count."""
        return self._ledger(node).releases()

    def has(self, node: int, step: int, attempt: int) -> bool:
        """Say whether a node's release of this step by this start is recorded."""
        return self._ledger(node).has(step, attempt)

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
            raise LedgerError(
                f"node {node} has no ledger here; this process hosts {list(self.nodes)}"
            )
        return self._ledgers[node]

    def _all(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Do the work for all items in parallel; the first error is raised after all ended."""
        if len(items) <= 1:
            return [work(item) for item in items]
        futures = [self._pool.submit(work, item) for item in items]
        # All are waited for, so that no thread still writes when the error is raised.
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]


def _refuse_foreign(path: Path, found: LedgerHeader, own: LedgerHeader) -> None:
    """Refuse a ledger of another run or node, or of another kind of noise."""
    if (found.run_id, found.node) != (own.run_id, own.node):
        raise LedgerError(
            f"ledger {path} belongs to run {found.run_id}, node {found.node}, not to run "
            f"{own.run_id}; choose another --out folder"
        )
    if found.private != own.private:
        before, now = ("fresh", "seeded") if found.private else ("seeded", "fresh")
        raise LedgerError(
            f"ledger {path} was started with {before} noise and this run has {now} noise "
            "(privacy.seed); continue as it was started, or choose another --out folder"
        )


def _write_header(path: Path, header: LedgerHeader, start: str) -> None:
    line, _ = encode_line(header.as_record(start), GENESIS)
    try:
        write_atomically(path, line)
        for folder in path.parents[1:4]:  # the run's own folder may be as new as the ledger
            sync_folder(folder)
    except OSError as error:
        raise write_error(path, error) from error
