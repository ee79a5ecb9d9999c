"""Failure detection: heartbeats and one shared cause, so that all processes end and name one rank.

When one process stops, its receivers notice first, but their own receivers only see *them* fall
silent. So every process sends heartbeats from a thread of its own (a process that merely waits goes
on, a stopped one does not), each with the rank that it waits for. A process whose wait times out
follows the chain of waiting ranks to its end and writes the cause to the store, where the first
cause is the one that all report. The same thread looks for a request to stop, so that no step has
to wait for an answer of the store. A watchdog thread ends the process if even that takes too long:
a store whose host is frozen can block a call without limit.

With a key all values are tagged; a value that fails the check counts as missing, so that a writer
without the key cannot name a rank as the cause.
"""

from __future__ import annotations

import logging
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
# Share of the time-out for one wait; the rest is for the diagnosis and for publishing it.
PATIENCE = 0.6
_LONGEST_CAUSE = 4000
_TRIES = 5
_LOG = logging.getLogger(__name__)


class SilentPeerError(DpcsgpError):
    """A peer went silent or failed: the message names it."""


class Cause(NamedTuple):
    """Why a run failed, and the rank that caused it (-1: none in particular)."""

    text: str
    rank: int


class Beat(NamedTuple):
    """One heartbeat: its number, the rank it waits for (-1: none), the nonce of its process."""

    number: int
    waits_for: int
    nonce: str


def announce(board: Board, text: str, rank: int = -1) -> Cause:
    """Publish the cause of the run's failure unless there is one; return the one that counts."""
    cause = Cause(text[:_LONGEST_CAUSE], rank)
    # Compare and set: the first valid cause wins. A stranger's value is replaced, and may come
    # again, hence a few tries.
    for _ in range(_TRIES):
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
    """Report the exit of this rank and wait for the others', at most so many seconds.

    The store ends with the process that serves it, and the others may still have to read it.
    """
    deadline = time.monotonic() + seconds
    board.put(f"gone/{board.rank}", True)
    staying = set(range(world_size)) - {board.rank}
    while staying and time.monotonic() < deadline:
        staying = {rank for rank in staying if board.peek(f"gone/{rank}", rank) is None}
        time.sleep(0.02)
    _LOG.info("rank %d of %d stopped", board.rank, world_size)


def label(nodes: Sequence[int], rank: int) -> str:
    """Name a process by the nodes it hosts.

    >>> label([2], 2), label([4, 5, 6], 1)
    ('node 2 (rank 2)', 'nodes 4 to 6 (rank 1)')
    """
    hosted = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
    return f"{hosted} (rank {rank})"


def end_process(message: str, code: int = 1) -> NoReturn:
    """End at once with a message on stderr, whatever other threads are stuck in."""
    # No clean-up is needed: checkpoints and ledgers on disk are valid at every moment.
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(code)


class Health:
    """Heartbeat of this process, diagnosis of the others', and a limit on every wait.

    Args:
        open_store: opens a connection to the store; called once per thread.
        rank: of this process.
        nodes_of_rank: hosted nodes of every rank, for messages.
        timeout: `network.timeout_seconds`, in seconds.
        end: called by the watchdog with a message; ends the process.
        seal: makes and checks tags; None: no key.
    """

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
        # Time for the others to read the store before the process that serves it ends.
        self.linger = min(3.0, timeout / 10)
        self.waiting_for = -1
        self.cause: Cause | None = None
        self.stop_asked = False  # some process was asked to stop the run
        self.seal = seal or Seal()
        self.nonce = ""  # of this process and of all ranks, once the handshake is complete
        self.nonces: Sequence[str] = ()
        self._cause_since = 0.0
        self._waiting_since = 0.0
        self._deadline: float | None = None
        self._end = end
        self._stopped = threading.Event()
        # A store connection serves one thread at a time: the heartbeat has its own.
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
        """Stop heartbeat and watchdog."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.interval)

    @contextmanager
    def limit(self, seconds: float | None = None) -> Iterator[float]:
        """Bound a wait; yields the moment (monotonic clock) at which it has to time out.

        What is left of `seconds` after that moment is for the diagnosis; then the watchdog acts.
        """
        seconds = seconds or self.timeout
        start = self._waiting_since = time.monotonic()
        self._deadline = start + seconds - 0.1 * self.timeout
        try:
            yield start + seconds - (1 - PATIENCE) * self.timeout
        # A RuntimeError is the store's: errors of this package are none.
        except RuntimeError as error:
            self.raise_if_failed()
            raise SilentPeerError(
                "the store of the run went silent: the launcher or the machine of rank 0 ended; "
                "continue with --resume"
            ) from error
        finally:
            self._deadline, self.waiting_for = None, -1

    def raise_if_failed(self) -> None:
        """Raise the cause of the run's failure if another process has published one."""
        if self.cause is not None:
            raise SilentPeerError(self.cause.text)

    def diagnose(self, waited_for: int) -> SilentPeerError:
        """Find the rank that blocks the run, publish it as the cause, and return the error.

        Args:
            waited_for: the rank on which this process's wait timed out or broke.
        """
        waited = time.monotonic() - self._waiting_since if self._deadline is not None else 0.0
        try:
            self.cause = known_cause(self._board) or self._investigate(waited_for, waited)
        except RuntimeError:
            _LOG.warning("rank %d: lost the store and rank %d", self.rank, waited_for)
            name = label(self.nodes_of_rank[waited_for], waited_for)
            return SilentPeerError(
                f"the store of the run went silent together with {name}: the launcher or the "
                "machine of rank 0 ended; continue with --resume"
            )
        _LOG.warning("rank %d: lost a peer, rank %d", self.rank, self.cause.rank)
        return SilentPeerError(self.cause.text)

    def _investigate(self, waited_for: int, waited: float) -> Cause:
        # Silent ranks: those whose heartbeat does not move within four intervals.
        before, watched = self._beats(), 4 * self.interval
        time.sleep(watched)
        after = self._beats()
        silent = {
            rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new
        } - {self.rank}
        # Follow the chain of waiting ranks until one is silent, waits for none, or closes a circle.
        rank, seen = waited_for, {self.rank}
        while rank not in silent | seen and after[rank].waits_for >= 0:
            seen.add(rank)
            rank = after[rank].waits_for
        # A rank that has not published its wait yet breaks the chain: a silent one is likelier.
        if rank not in silent and silent:
            rank = min(silent)
        name = label(self.nodes_of_rank[rank], rank)
        if rank in silent:
            text = (
                f"{name} went silent: no heartbeat for {watched:g} s, after a wait of "
                f"{waited:.1f} s; restart it and continue with --resume"
            )
        elif self.nonces and after[rank].nonce != self.nonces[rank]:
            text = (
                f"{name} was restarted alone and cannot rejoin a run that is under way; stop all "
                "processes, then continue with --resume on every machine"
            )
        else:
            text = f"{name} is alive but {self._silence(waited)}"
        return announce(self._board, text, rank)

    def _silence(self, waited: float) -> str:
        """Say what is known of a rank whose heartbeat goes on."""
        # A wait that ended early did not time out: the connection broke.
        if waited < 0.95 * PATIENCE * self.timeout:
            return (
                f"a connection broke after a wait of {waited:.1f} s; look at the network, "
                "then continue with --resume"
            )
        return (
            f"sent nothing for {waited:.1f} s (a step may take {100 * PATIENCE:g} % of "
            f"network.timeout_seconds = {self.timeout:g}); "
            "raise network.timeout_seconds if it is only slow"
        )

    def _beats(self) -> list[Beat]:
        """Return each rank's last heartbeat."""
        notes = [
            self._board.peek(f"beat/{rank}", rank, self._beat_fault)
            for rank in range(len(self.nodes_of_rank))
        ]
        return [Beat(*note.value) if note else Beat(0, -1, "") for note in notes]

    def _beat_fault(self, value: Any) -> str | None:
        typed = isinstance(value, list) and [type(part) for part in value] == [int, int, str]
        # The rank becomes an index of the chain of waiting ranks.
        valid = typed and -1 <= value[1] < len(self.nodes_of_rank)
        return None if valid else "a count, a rank and a name"

    def _beat(self, board: Board) -> None:
        """Heartbeat thread: publish, and look for a cause of failure or a request to stop."""
        count = 0
        while not self._stopped.wait(self.interval):
            count += 1
            try:
                board.put(f"beat/{self.rank}", Beat(count, self.waiting_for, self.nonce))
                if self.cause is None and (cause := known_cause(board)):
                    self.cause, self._cause_since = cause, time.monotonic()
                    _LOG.warning("rank %d: the run failed at rank %d", self.rank, cause.rank)
                if not self.stop_asked and board.peek(STOP_ASKED):
                    self.stop_asked = True
                    _LOG.info("rank %d: the run was asked to stop", self.rank)
            except RuntimeError:
                return  # the store has ended; the main thread will meet that too

    def _watch(self) -> None:
        """Watchdog thread: end the process where a wait outlasts its limit, diagnosis included."""
        while not self._stopped.wait(self.interval):
            deadline, now = self._deadline, time.monotonic()
            if deadline is None:
                continue
            # The cause is known, but the main thread is stuck in a call: it had its time.
            cause = self.cause
            if cause is not None and self._cause_since and now > self._cause_since + self.linger:
                self._end(cause.text)
            elif now > deadline:
                rank = max(self.waiting_for, 0)
                self._end(
                    "the store of the run went silent: no answer from it or from "
                    f"{label(self.nodes_of_rank[rank], rank)} for "
                    f"{now - self._waiting_since:.1f} s; look at the machine that serves it "
                    "(rank 0's), then continue with --resume"
                )
