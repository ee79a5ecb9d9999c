"""Worker processes that cannot outlive their parent, and a parent that never waits for ever."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PARENT = "DPCSGP_PARENT"  # process id of the launcher, in the environment of its workers
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the operating system kill this process when the launcher or the torchrun agent that started it has gone."""
    agent = "TORCHELASTIC_RUN_ID" in os.environ
    parent = int(os.environ.get(PARENT, "0")) or (os.getppid() if agent else 0)
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def cores_per_process(processes: int) -> int:
    """Return how many threads each of several processes on this machine may use: together no more than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


class Child:
    """A worker process whose complaints are kept in a file."""

    def __init__(self, rank: int, words: Sequence[str], environment: Mapping[str, str], complaints: Path) -> None:
        self.rank, self._complaints = rank, complaints
        self.ended_at: float | None = None
        with open(complaints, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dpcsgp", *words],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on once
            )

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return code

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither with success nor because it was asked to stop."""
        return self.code not in (None, 0, 130)

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill it if it still runs (a stopped process dies too), and collect it."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def complaint(self) -> str:
        """Return what it said about its end, on one line."""
        text = self._complaints.read_text(errors="replace")
        _, found, message = text.rpartition("error: ")
        if found:
            return " ".join(message.split())
        if self.code is not None and self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return (text.strip().splitlines() or ["no message"])[-1]


@contextmanager
def family(
    words: Sequence[str], world_size: int, environment: Mapping[str, str], folder: Path
) -> Iterator[list[Child]]:
    """Start one worker per rank; whatever happens, none of them outlives this block."""
    children: list[Child] = []
    try:
        for rank in range(world_size):
            children.append(Child(rank, words, environment, folder / f"rank-{rank}"))
        yield children
    finally:
        for child in children:
            child.end()
