"""Who is silent? Heartbeats and one shared cause of failure, so that every process ends in time and names the same culprit.

When one process stops, its receivers notice first, but their own receivers only see *them* fall silent. So every process
beats from a thread of its own (a process that merely waits keeps beating, a stopped one does not) and says for whom it
waits; whoever gives up follows the chain of waiting to its end and leaves the cause in the store, where the first one
written is everybody's. A second thread ends the process if even that takes too long: a store whose host is frozen can
block a call for ever.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Protocol

from dpcsgp.errors import DpcsgpError

CAUSE = "cause of failure"


class SilentPeerError(DpcsgpError):
    """A peer went silent or gave up: the message names it."""


class Store(Protocol):
    """The part of a key-value store that is needed here; `get` is called for keys that are there."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the key holds the expected one (empty: if it is not there); return what it holds then."""
        ...

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return it."""
        ...


class Cause(NamedTuple):
    """Why a run failed, and which rank is to blame (-1: nobody in particular)."""

    text: str
    rank: int


def read(store: Store, key: str) -> str | None:
    """Return a value, or None if it is not there; does not wait for it."""
    return store.get(key).decode() if store.check([key]) else None


def announce(store: Store, text: str, rank: int = -1) -> Cause:
    """Make this the cause of the run's failure, unless there is one already; return the one that counts."""
    return Cause(*json.loads(store.compare_set(CAUSE, "", json.dumps([text, rank]))))


def known_cause(store: Store) -> Cause | None:
    """Return the cause of the run's failure if one is known."""
    text = read(store, CAUSE)
    return Cause(*json.loads(text)) if text else None


def take_leave(store: Store, world_size: int, seconds: float) -> None:
    """Say goodbye and wait a moment for the others, who may still want to read the store that ends with this process."""
    deadline = time.monotonic() + seconds
    gone = store.add("gone", 1)
    while gone < world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        gone = store.add("gone", 0)


def label(nodes: Sequence[int], rank: int) -> str:
    """Name a process by the nodes it hosts.

    >>> label([2], 2), label([4, 5, 6], 1)
    ('node 2 (rank 2)', 'nodes 4 to 6 (rank 1)')
    """
    return f"{f'node {nodes[0]}' if len(nodes) == 1 else f'nodes {nodes[0]} to {nodes[-1]}'} (rank {rank})"


def end_process(message: str, code: int = 1) -> NoReturn:
    """End at once, whatever other threads are stuck in; checkpoints and ledgers are whole at every moment."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(code)


class Health:
    """Heartbeat of this process, a look at everybody else's, and a limit on every wait."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        rank: int,
        nodes_of_rank: Sequence[Sequence[int]],
        timeout: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.rank, self.nodes_of_rank, self.timeout = rank, nodes_of_rank, timeout
        self.interval = min(1.0, timeout / 20)
        self.linger = min(3.0, timeout / 10)  # for the others to read the store before its host goes
        self.waiting_for = -1
        self.cause: Cause | None = None
        self._cause_since = 0.0
        self._deadline: float | None = None
        self._end = end
        self._stopped = threading.Event()
        # A store connection serves one thread at a time: the heart has its own.
        self._store = open_store()
        self._threads = [
            threading.Thread(target=self._beat, args=(open_store(),), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop beating and watching."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.interval)

    @contextmanager
    def limit(self, seconds: float | None = None) -> Iterator[float]:
        """Bound whatever is done inside: give up waiting at the moment that is yielded; the rest is for the diagnosis."""
        seconds = seconds or self.timeout
        start = time.monotonic()
        self._deadline = start + seconds - 0.1 * self.timeout
        try:
            yield start + seconds - 0.4 * self.timeout
        except RuntimeError as error:  # of the store; errors of this package are no RuntimeErrors
            self.raise_if_failed()
            raise SilentPeerError(
                "the store of the run went silent: the launcher or the machine of rank 0 ended; continue with --resume"
            ) from error
        finally:
            self._deadline, self.waiting_for = None, -1

    def raise_if_failed(self) -> None:
        """Raise the cause of the run's failure if another process has told it."""
        if self.cause is not None:
            raise SilentPeerError(self.cause.text)

    def give_up(self, waited_for: int) -> SilentPeerError:
        """Find out who keeps the run from going on, tell everybody, and return the error to raise."""
        try:
            self.cause = known_cause(self._store) or self._investigate(waited_for)
        except RuntimeError:
            name = label(self.nodes_of_rank[waited_for], waited_for)
            return SilentPeerError(
                f"the store of the run went silent together with {name}: the launcher or the machine of rank 0 ended; "
                "continue with --resume"
            )
        return SilentPeerError(self.cause.text)

    def _investigate(self, waited_for: int) -> Cause:
        before = self._beats()
        time.sleep(4 * self.interval)
        after = self._beats()
        silent = {rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new} - {self.rank}
        rank, seen = waited_for, {self.rank}
        while rank not in silent | seen and after[rank][1] >= 0:
            seen.add(rank)
            rank = after[rank][1]
        if rank not in silent and silent:  # whoever has not said yet for whom it waits breaks the chain
            rank = min(silent)
        name, seconds = label(self.nodes_of_rank[rank], rank), f"{self.timeout:g} s"
        if rank in silent:
            text = f"{name} went silent: no sign of life within {seconds}; restart it and continue with --resume"
        else:
            text = (
                f"{name} is alive but sent nothing within {seconds}; raise network.timeout_seconds if it is only slow"
            )
        return announce(self._store, text, rank)

    def _beats(self) -> list[tuple[int, int]]:
        """Return each rank's count of beats and the rank it waits for (-1: nobody)."""
        texts = [read(self._store, f"beat/{rank}") or "0 -1" for rank in range(len(self.nodes_of_rank))]
        return [(int(count), int(waits)) for count, waits in (text.split() for text in texts)]

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._stopped.wait(self.interval):
            count += 1
            try:
                store.set(f"beat/{self.rank}", f"{count} {self.waiting_for}")
                if self.cause is None and (cause := known_cause(store)):
                    self.cause, self._cause_since = cause, time.monotonic()
            except RuntimeError:
                return  # the store has gone; the main thread will meet that too

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval):
            deadline, now = self._deadline, time.monotonic()
            if deadline is None:
                continue
            if self.cause is not None and self._cause_since and now > self._cause_since + self.linger:
                self._end(self.cause.text)
            elif now > deadline:
                rank = max(self.waiting_for, 0)
                self._end(
                    f"the store of the run went silent: no answer from it or from {label(self.nodes_of_rank[rank], rank)} "
                    f"within {self.timeout:g} s; look at the machine that serves it (rank 0's), then continue with --resume"
                )
