"""Worker processes on this machine that start fast and cannot outlive their parent.

The standard library's fork server imports everything once and forks the workers from there, so that
ten of them start nearly as fast as one. It ends when the process that started it does, and its
workers die with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

PARENT: Final = "DPCSGP_PARENT"  # a flag in the environment of a launcher's workers
_PR_SET_PDEATHSIG: Final = 1
_LOST: Final = 255  # what multiprocessing says of workers whose fork server has gone
_STOPPING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def die_with(parent: int) -> None:
    """Make the operating system kill this process when the one with this number has gone."""
    # Linux does it by itself; elsewhere a thread asks twice a second.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def tied_command(*words: str) -> list[str]:
    """Return the line of a `dpcsgp` command that ends with this process, however this one ends.

    Args:
        words: what follows `dpcsgp`.
    """
    # `-m dpcsgp`, after one call more; the words stand in the line as they do there.
    code = (
        f"import runpy; from dpcsgp.runtime.workers import die_with; die_with({os.getpid()}); "
        "runpy.run_module('dpcsgp', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *words]


def die_with_agent() -> None:
    """Make this process end with the torchrun agent that started it, if one did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())


def cores_per_process(processes: int) -> int:
    """Return how many threads each of several processes here may use: together all cores."""
    # In a container fewer cores may be allowed than there are.
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return max(1, cores // processes)


@final
class Worker:
    """A worker process, as the launcher sees it."""

    def __init__(self, rank: int, process: Any, stderr: Path) -> None:
        self.rank, self._process, self._stderr = rank, process, stderr
        # Exit code, None while it runs; minus the signal that ended it.
        self.code: int | None = None
        self.ended_at = 0.0

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither with success nor because it was asked to stop."""
        return self.code not in (None, 0, 130)

    def look(self) -> None:
        """Bring the exit code up to date."""
        if self.code is None and (code := self._process.exitcode) is not None:
            self.code, self.ended_at = code, time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        self.look()
        if self.code is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self._process.pid, number)

    def last_words(self) -> str:
        """Return what it said about its end, on one line."""
        text = self._stderr.read_text(errors="replace") if self._stderr.exists() else ""
        # Its own error line, else the signal that ended it, else whatever it wrote last.
        _, found, message = text.rpartition("error: ")
        if found:
            return " ".join(message.split())
        if self.code is not None and self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        if self.code == _LOST and not text:
            return "ended together with the fork server"
        return (text.strip().splitlines() or ["no message"])[-1]


@contextmanager
def fork_server(module: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Start importing a module in the fork server; workers started inside the block have it.

    Args:
        module: the module that the workers need.
        environment: variables that must be there before it is imported.
    """
    multiprocessing.set_forkserver_preload([module])
    # The server takes over the environment as it is when it starts; afterwards it is put back.
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with _signals_held_back():
            forkserver.ensure_running()  # it imports while this process goes on
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold back what stops a process: a fork server started inside never hears of it.

    Ctrl-C and SIGTERM often go to the whole process group. A server that ends takes the workers
    with it, in the middle of a step.
    """
    resource_tracker.ensure_running()  # starting it lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep new workers from running the caller's script again: it may have no `__main__` guard."""
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def started(
    target: Callable[..., int],
    arguments: Sequence[Any],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
) -> Iterator[list[Worker]]:
    """Start one worker per environment; none of them outlives the block.

    Args:
        target: a function of an importable module; what it returns is the exit code.
        arguments: plain values for it.
        environments: what each worker has in its environment, by rank.
        folder: where the workers' stderr goes, a file each.
    """
    context = multiprocessing.get_context("forkserver")
    workers = []
    try:
        for rank, environment in enumerate(environments):
            stderr = folder / f"rank-{rank}"
            # A worker that finds this name leaves the reporting to the launcher.
            own = {**environment, PARENT: str(os.getpid())}
            process = context.Process(
                target=_work, args=(target, tuple(arguments), own, str(stderr)), daemon=True
            )
            with _signals_held_back(), _main_hidden():
                process.start()
            workers.append(Worker(rank, process, stderr))
        yield workers
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
        for worker in workers:
            # Killed, they end at once: ten seconds are for a busy machine.
            worker._process.join(10)


def _work(
    target: Callable[..., int],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    stderr: str,
) -> None:
    """Be a worker: in a session of its own, so that Ctrl-C reaches the launcher alone."""
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    os.setsid()
    os.environ.update(environment)
    _redirect(stderr)
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING_SIGNALS)  # held back by the server
        # Whatever happens becomes an exit code: nothing returns into the fork server.
        code = target(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()  # its last line is what the launcher shows
    finally:
        sys.stderr.flush()
        os._exit(code)  # torch's threads are not waited for


def _redirect(stderr: str) -> None:
    """Cut the worker off from the launcher's terminal; what it says on stderr goes to a file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    file = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in enumerate((nothing, nothing, file)):
        os.dup2(source, target)
