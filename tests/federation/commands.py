"""Commands as they are typed, in forked processes that need not import everything again."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from running import FORKS, unblock_signals


@dataclass
class Command:
    """A command that runs, or has run."""

    process: Any
    output: Path

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def kill(self) -> None:
        """End it without a warning."""
        self.process.kill()
        self.process.join()

    def ends(self, code: int, seconds: float = 90.0) -> str:
        """Wait for its end, hold its exit code against this one, and return what it printed."""
        self.process.join(seconds)
        assert self.process.exitcode == code, (self.process.exitcode, self.text)
        return self.text


@contextmanager
def commands(root: Path) -> Iterator[Any]:
    """Return a function that starts commands in a folder; none outlives the block."""
    started: list[Command] = []

    def start(*words: str, most_bytes: int | None = None) -> Command:
        output = root / f"output-{len(started)}.txt"
        process = FORKS.Process(target=_type, args=(str(root), output.name, words, most_bytes))
        process.start()
        started.append(Command(process, output))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.process.kill()
            command.process.join()


def until(holds: Any, seconds: float = 60.0) -> None:
    """Wait until something is the case."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _type(root: str, output: str, words: tuple[str, ...], most_bytes: int | None) -> None:
    """Be the command: its own folder, its output in a pipe or file, files of a limited size."""
    from dpcsgp.cli.main import app

    unblock_signals()
    os.chdir(root)
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if most_bytes is not None:  # a pipe to nowhere else: the limit holds for files
        reading, writing = os.pipe()
        if os.fork():
            os.close(writing)
            while piece := os.read(reading, 4096):
                os.write(sink, piece)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        sink = writing
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = ["dpcsgp", *words]
    code: Any = 0
    try:
        app()
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    os._exit(code)
