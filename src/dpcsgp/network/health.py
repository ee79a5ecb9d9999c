"""Who is silent? Heartbeats and last words through a shared store, so that every process names the same culprit.

When one process stops, its receivers notice first, but their own receivers only see *them* fall silent. So every process
beats from a thread of its own (a process that merely waits keeps beating, a stopped one does not), and whoever gives up
leaves a last word with the cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Store(Protocol):
    """The part of a key-value store that is needed here."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        ...


def read(store: Store, key: str) -> str | None:
    """Return a value, or None if it is not there; never waits."""
    return store.get(key).decode() if store.check([key]) else None


class Health:
    """Heartbeat of this process, and a look at everybody else's."""

    def __init__(
        self, open_store: Callable[[], Store], rank: int, nodes_of_rank: Sequence[Sequence[int]], timeout: float
    ):
        self.rank = rank
        self.nodes_of_rank = nodes_of_rank
        self.interval = min(1.0, timeout / 20)
        self._store = open_store()
        self._beating = threading.Event()
        # A store connection serves one thread at a time: the heart has its own.
        self._thread = threading.Thread(target=self._beat, args=(open_store(),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating (a clean end)."""
        self._beating.set()
        self._thread.join(timeout=5)

    def last_word(self, cause: str) -> None:
        """Leave the cause for the others before this process ends."""
        try:
            self._store.set(f"last word/{self.rank}", cause)
        except Exception as error:  # the store may be what has gone; the cause is raised here in any case
            del error

    def diagnose(self, waited_for: int) -> str:
        """Return a sentence that names the silent node, after waiting in vain for rank `waited_for`."""
        try:
            return self._last_words() or self._stale() or self._name(waited_for)
        except Exception:
            return f"{self._name(waited_for)} (the store of the run cannot be reached either)"

    def _last_words(self) -> str | None:
        time.sleep(2 * self.interval)  # whoever noticed first needs a moment to say so
        for rank in range(len(self.nodes_of_rank)):
            word = read(self._store, f"last word/{rank}") if rank != self.rank else None
            if word:
                return word
        return None

    def _stale(self) -> str | None:
        before = [read(self._store, f"beat/{rank}") for rank in range(len(self.nodes_of_rank))]
        time.sleep(3 * self.interval)
        after = [read(self._store, f"beat/{rank}") for rank in range(len(self.nodes_of_rank))]
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            if old == new and rank != self.rank:
                return self._name(rank)
        return None

    def _name(self, rank: int) -> str:
        nodes = self.nodes_of_rank[rank]
        label = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
        return f"{label} (rank {rank}) went silent"

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._beating.wait(self.interval):
            count += 1
            try:
                store.set(f"beat/{self.rank}", str(count))
            except Exception:
                return  # the run is over or the store is gone; the main thread will notice by itself
