"""Who is silent? Heartbeats and one shared cause of failure, so that every process ends in time and
names the same culprit.

When one process stops, its receivers notice first, but their own receivers only see *them* fall
silent. So every process beats from a thread of its own (a process that merely waits keeps beating,
a stopped one does not) and says for whom it waits; whoever gives up follows the chain of waiting to
its end and leaves the cause in the store, where the first one written is everybody's. The same
thread looks for a request to stop, so that no step has to wait for an answer of the store. A second
thread ends the process if even that takes too long: a store whose host is frozen can block a call
for ever.

With a key all values are tagged; a value that fails the check counts as not there, so that whoever
writes to the store without the key cannot blame anybody."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from dpcsgp.errors import DpcsgpError
from dpcsgp.network.board import Board, Seal, Store

CAUSE = "cause of failure"
STOP_ASKED = "stop asked"
PATIENCE = (
    0.6  # of the time-out, for one wait; the rest is for finding out who is to blame and telling it
)
_LONGEST_CAUSE = 4000
_TRIES = 5


class SilentPeerError(DpcsgpError):
    """A peer went silent or gave up: the message names it."""


class Cause(NamedTuple):
    """Why a run failed, and which rank is to blame (-1: nobody in particular)."""

    text: str
    rank: int


class Beat(NamedTuple):
    """One sign of life: its number, the rank it waits for (-1: nobody), and in which start it
    lives."""

    number: int
    waits: int
    life: str


def announce(board: Board, text: str, rank: int = -1) -> Cause:
    """Make this the cause of the run's failure, unless there is one already; return the one that
    counts."""
    cause = Cause(text[:_LONGEST_CAUSE], rank)
    for _ in range(
        _TRIES
    ):  # something that nobody of this run wrote may stand there, and may be written again
        held = board.text(CAUSE) or ""
        if known := _cause_in(board, held):
            return known
        board.store.compare_set(CAUSE, held, board.sealed(CAUSE, cause))
    return cause


def known_cause(board: Board) -> Cause | None:
    """Return the cause of the run's failure if one is known."""
    return _cause_in(board, board.text(CAUSE) or "")


def _cause_in(board: Board, text: str) -> Cause | None:
    note = board.genuine(CAUSE, text, fault=_cause_fault) if text else None
    return Cause(*note.value) if note else None


def _cause_fault(value: Any) -> str | None:
    right = (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and type(value[1]) is int
    )
    return None if right and len(value[0]) <= _LONGEST_CAUSE else "a text and a rank"


def exit_barrier(board: Board, world_size: int, seconds: float) -> None:
    """Say goodbye and wait a moment for the others, who may still want to read the store that ends
    with this process."""
    deadline = time.monotonic() + seconds
    board.put(f"gone/{board.rank}", True)
    staying = set(range(world_size)) - {board.rank}
    while staying and time.monotonic() < deadline:
        staying = {rank for rank in staying if board.peek(f"gone/{rank}", rank) is None}
        time.sleep(0.02)


def label(nodes: Sequence[int], rank: int) -> str:
    """Name a process by the nodes it hosts.

    >>> label([2], 2), label([4, 5, 6], 1)
    ('node 2 (rank 2)', 'nodes 4 to 6 (rank 1)')
    """
    return f"{f'node {nodes[0]}' if len(nodes) == 1 else f'nodes {nodes[0]} to {nodes[-1]}'} (rank {rank})"


def end_process(message: str, code: int = 1) -> NoReturn:
    """End at once, whatever other threads are stuck in; checkpoints and ledgers are whole at every
    moment."""
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
        seal: Seal | None = None,
    ) -> None:
        self.rank, self.nodes_of_rank, self.timeout = rank, nodes_of_rank, timeout
        self.interval = min(1.0, timeout / 20)
        # for the others to read the store before its host goes
        self.linger = min(3.0, timeout / 10)
        self.waiting_for = -1
        self.cause: Cause | None = None
        self.stop_asked = False  # some process was asked to stop the run
        self.seal = seal or Seal()
        self.life = ""  # the fresh bytes of this process and of all, once they have shaken hands
        self.lives: Sequence[str] = ()
        self._cause_since = 0.0
        self._waiting_since = 0.0
        self._deadline: float | None = None
        self._end = end
        self._stopped = threading.Event()
        # A store connection serves one thread at a time: the heart has its own.
        self._board = Board(open_store(), rank, self.seal)
        self._threads = [
            threading.Thread(
                target=self._beat, args=(Board(open_store(), rank, self.seal),), daemon=True
            ),
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
        """Bound whatever is done inside: give up waiting at the moment that is yielded; the rest is
        for the diagnosis."""
        seconds = seconds or self.timeout
        start = self._waiting_since = time.monotonic()
        self._deadline = start + seconds - 0.1 * self.timeout
        try:
            yield start + seconds - (1 - PATIENCE) * self.timeout
        except RuntimeError as error:  # of the store; errors of this package are no RuntimeErrors
            self.raise_if_failed()
            raise SilentPeerError(
                "the store of the run went silent: the launcher or the machine of rank 0 ended; "
                "continue with --resume"
            ) from error
        finally:
            self._deadline, self.waiting_for = None, -1

    def raise_if_failed(self) -> None:
        """Raise the cause of the run's failure if another process has told it."""
        if self.cause is not None:
            raise SilentPeerError(self.cause.text)

    def give_up(self, waited_for: int) -> SilentPeerError:
        """Find out who keeps the run from going on, tell everybody, and return the error to
        raise."""
        waited = time.monotonic() - self._waiting_since if self._deadline is not None else 0.0
        try:
            self.cause = known_cause(self._board) or self._investigate(waited_for, waited)
        except RuntimeError:
            name = label(self.nodes_of_rank[waited_for], waited_for)
            return SilentPeerError(
                f"the store of the run went silent together with {name}: the launcher or the "
                "machine of rank 0 ended; "
                "continue with --resume"
            )
        return SilentPeerError(self.cause.text)

    def _investigate(self, waited_for: int, waited: float) -> Cause:
        before, watched = self._beats(), 4 * self.interval
        time.sleep(watched)
        after = self._beats()
        silent = {
            rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new
        } - {self.rank}
        rank, seen = waited_for, {self.rank}
        while rank not in silent | seen and after[rank].waits >= 0:
            seen.add(rank)
            rank = after[rank].waits
        if (
            rank not in silent and silent
        ):  # whoever has not said yet for whom it waits breaks the chain
            rank = min(silent)
        name = label(self.nodes_of_rank[rank], rank)
        if rank in silent:
            text = (
                f"{name} went silent: no heartbeat for {watched:g} s, after a wait of "
                f"{waited:.1f} s; restart it and "
                "continue with --resume"
            )
        elif self.lives and after[rank].life != self.lives[rank]:
            text = (
                f"{name} was restarted alone and cannot rejoin a run that is under way; stop all "
                "processes, then continue "
                "with --resume on every machine"
            )
        else:
            text = f"{name} is alive but {self._silence(waited)}"
        return announce(self._board, text, rank)

    def _silence(self, waited: float) -> str:
        """Say what is known of a rank whose heart beats; waits end before the time-out, so that all
        can be told."""
        if waited < 0.95 * PATIENCE * self.timeout:
            return f"a connection broke after a wait of {waited:.1f} s; look at the network, then continue with --resume"
        return (
            f"sent nothing for {waited:.1f} s (a step may take {100 * PATIENCE:g} % of "
            "network.timeout_seconds = "
            f"{self.timeout:g}); raise network.timeout_seconds if it is only slow"
        )

    def _beats(self) -> list[Beat]:
        """Return each rank's last beat."""
        notes = [
            self._board.peek(f"beat/{rank}", rank, self._beat_fault)
            for rank in range(len(self.nodes_of_rank))
        ]
        return [Beat(*note.value) if note else Beat(0, -1, "") for note in notes]

    def _beat_fault(self, value: Any) -> str | None:
        right = isinstance(value, list) and [type(part) for part in value] == [int, int, str]
        return (
            None
            if right and -1 <= value[1] < len(self.nodes_of_rank)
            else "a count, a rank and a name"
        )

    def _beat(self, board: Board) -> None:
        count = 0
        while not self._stopped.wait(self.interval):
            count += 1
            try:
                board.put(f"beat/{self.rank}", Beat(count, self.waiting_for, self.life))
                if self.cause is None and (cause := known_cause(board)):
                    self.cause, self._cause_since = cause, time.monotonic()
                if not self.stop_asked and board.peek(STOP_ASKED):
                    self.stop_asked = True
            except RuntimeError:
                return  # the store has gone; the main thread will meet that too

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval):
            deadline, now = self._deadline, time.monotonic()
            if deadline is None:
                continue
            if (
                self.cause is not None
                and self._cause_since
                and now > self._cause_since + self.linger
            ):
                self._end(self.cause.text)
            elif now > deadline:
                rank = max(self.waiting_for, 0)
                self._end(
                    "the store of the run went silent: no answer from it or from "
                    f"{label(self.nodes_of_rank[rank], rank)} "
                    f"for {now - self._waiting_since:.1f} s; look at the machine that serves it "
                    "(rank 0's), then continue with --resume"
                )
