"""Worker processes that cannot outlive their parent, and a parent that never waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dpcsgp.runtime.orphans import die_with

# process id of the parent, in the environment of processes that must not outlive it
PARENT = "DPCSGP_PARENT"


def die_with_parent() -> None:
    """Make the operating system kill this process when the one that started it for us (or a
    torchrun agent) has gone."""
    agent = "TORCHELASTIC_RUN_ID" in os.environ
    parent = int(os.environ.get(PARENT, "0")) or (os.getppid() if agent else 0)
    if parent:
        die_with(parent)


def cores_per_process(processes: int) -> int:
    """Return how many threads each of several processes on this machine may use: together no more
    than there are cores."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // processes)


class Child:
    """A worker process, as the launcher sees it."""

    def __init__(self, rank: int, complaints: Path, nursery: Nursery) -> None:
        self.rank, self._complaints, self._nursery = rank, complaints, nursery
        self.code: int | None = None  # exit code, None while it runs
        self.ended_at = 0.0

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither with success nor because it was asked to stop."""
        return self.code not in (None, 0, 130)

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.code is None:
            self._nursery.write(f"{self.rank} {int(number)}\n")

    def complaint(self) -> str:
        """Return what it said about its end, on one line."""
        text = self._complaints.read_text(errors="replace") if self._complaints.exists() else ""
        _, found, message = text.rpartition("error: ")
        if found:
            return " ".join(message.split())
        if self.code is not None and self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return (text.strip().splitlines() or ["no message"])[-1]


class Nursery:
    """The process that forks the workers; see `dpcsgp.runtime.nursery`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dpcsgp.runtime.nursery"],
            env={**os.environ, **environment, PARENT: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on once
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._children: list[Child] = []
        self._heard = b""

    def start(self, words: Sequence[str], world_size: int, folder: Path) -> list[Child]:
        """Start one worker per rank."""
        files = [folder / f"rank-{rank}" for rank in range(world_size)]
        self._children = [Child(rank, file, self) for rank, file in enumerate(files)]
        order = {
            "words": words,
            "world_size": world_size,
            "complaints": [str(file) for file in files],
        }
        self.write(json.dumps(order) + "\n")
        return self._children

    def write(self, line: str) -> None:
        """Tell the nursery something; if it has gone, so have the workers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def look(self) -> None:
        """Bring the children's exit codes up to date."""
        assert self._process.stdout is not None
        gone = self._process.poll() is not None
        self._heard += self._process.stdout.read() or b""
        *lines, self._heard = self._heard.split(b"\n")
        ends = {int(rank): int(code) for rank, code in (line.split() for line in lines)}
        for child in self._children:
            code = ends.get(child.rank, -signal.SIGKILL if gone else None)
            if child.code is None and code is not None:
                child.code, child.ended_at = code, time.monotonic()

    def close(self) -> None:
        """End the nursery and, with it, every worker that still runs (a stopped one too)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its workers die with it
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def nursery(environment: Mapping[str, str]) -> Iterator[Nursery]:
    """Open a nursery; whatever happens, none of its workers outlives this block."""
    opened = Nursery(environment)
    try:
        yield opened
    finally:
        opened.close()
