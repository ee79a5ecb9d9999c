"""Start the processes of a run on this machine, watch them to their end, and leave none behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dpcsgp.compression import frames
from dpcsgp.config import Config
from dpcsgp.errors import DpcsgpError
from dpcsgp.network.board import LAUNCHER, Board, Seal
from dpcsgp.network.health import announce, known_cause, label
from dpcsgp.network.torch_distributed import (
    START,
    ProcessEnvironment,
    nodes_of_ranks,
    serve_store,
)
from dpcsgp.runs.design import build_topology
from dpcsgp.runs.folder import new_folder, previous_processes
from dpcsgp.runtime.logs import LOG_FILE
from dpcsgp.runtime.process import run_worker
from dpcsgp.runtime.process_agreement import refuse_lag
from dpcsgp.runtime.reporting import Reporter, Silent
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.runtime.session import write_page
from dpcsgp.runtime.signals import STOPPING, SignalCatcher
from dpcsgp.runtime.standings import standing_of_all
from dpcsgp.runtime.workers import Worker, cores_per_process, fork_server, started

_POLL_SECONDS: Final = 0.1

Hosting = Sequence[tuple[int, ...]]  # the nodes of every rank


class RunFailed(DpcsgpError):
    """Processes of a run failed: the message gives the cause and what each of them said."""


class Interrupted(DpcsgpError):
    """The run was stopped before it could save anything new."""

    exit_code = 130


def launch_run(
    request: BuiltinRequest,
    processes: int | None = None,
    reporter: Reporter | None = None,
    worker: Callable[[BuiltinRequest], int] = run_worker,
    log_file: Path | None = None,
) -> dict[str, Any]:
    """Run all processes to their end and return the merged summary.

    Args:
        request: what to train.
        processes: how many; None: one per node, or as many as the run that is resumed had.
        reporter: hears how the run goes.
        worker: what every process does.
        log_file: where the workers append their log lines; None: nowhere.

    Raises:
        RunFailed: if a process did not reach the end.
        Interrupted: if the run was stopped before it could save anything new.
    """
    reporter, began = reporter or Silent(), time.time()
    config = request.config()
    refuse_lag(config)
    out = request.out or new_folder(config)
    request = replace(request, out=out)
    # Who hosts which nodes, and how many threads each of them may use.
    hosting = _hosting(config, processes, out / "checkpoint" if request.resume else None)
    threads = {"OMP_NUM_THREADS": str(cores_per_process(len(hosting)))}
    # The fork server imports while the data are loaded here.
    with Signals(reporter.say) as signals, fork_server("dpcsgp.runtime.preload", threads):
        with reporter.downloads() as bars:  # once, before ten processes ask for the same files
            design, _ = request.prepare(config, bars)
        reporter.plan(design)
        signals.pass_on_from_now()
        logs = {LOG_FILE: str(log_file.resolve())} if log_file else {}
        _supervise(request, config, hosting, reporter, worker, logs, signals)
    summary_file = out / "summary.json"
    # A summary from before this start is that of the run that is resumed.
    if not summary_file.exists() or summary_file.stat().st_mtime < began:
        raise Interrupted("stopped before it could save anything new")
    summary = json.loads(summary_file.read_text())
    reporter.outcome(summary, out, write_page(out))
    return summary


def _hosting(config: Config, processes: int | None, checkpoints: Path | None) -> Hosting:
    """Return the nodes of every process: as many as asked for, as before, or one per node."""
    num_nodes = build_topology(config).num_nodes
    before = max(previous_processes(checkpoints), default=None) if checkpoints else None
    return nodes_of_ranks(num_nodes, processes or before or num_nodes)


def _supervise(
    request: BuiltinRequest,
    config: Config,
    hosting: Hosting,
    reporter: Reporter,
    worker: Callable[[BuiltinRequest], int],
    logs: Mapping[str, str],
    signals: Signals,
) -> None:
    """Start the workers and watch them to their end; raise if one failed."""
    # The launcher serves the store, so that it outlives every worker.
    server, world_size = serve_store(), len(hosting)
    start = os.urandom(16).hex()
    environment = ProcessEnvironment(0, world_size, "127.0.0.1", server.port, start=start)
    key_file = config.network.key_file
    key = frames.load_key(Path(key_file)) if key_file else None
    board = Board(environment.open_store(timeout=10), LAUNCHER, Seal(key, start))
    environments = [{**_environment(environment, rank), **logs} for rank in range(world_size)]
    with (
        tempfile.TemporaryDirectory() as folder,
        reporter.progress() as show,
        started(worker, (request,), environments, Path(folder)) as workers,
    ):

        def show_all() -> None:
            if found := standing_of_all(board, world_size, config):
                show(found)

        # Signals go down to the workers, standings come up, and failures are told to the others.
        while any(each.code is None for each in workers):
            signals.pass_on(workers)
            show_all()
            for each in workers:
                each.look()
            _tell_of_failures(board, workers, hosting)
            _end_survivors(board, workers, config.network.timeout_seconds)
            time.sleep(_POLL_SECONDS)
        show_all()
        _raise_if_failed(board, workers, hosting, signals.asked)


def _environment(environment: ProcessEnvironment, rank: int) -> Mapping[str, str]:
    """Return what a worker reads from its environment, as torchrun would set it."""
    # The processes meet on this machine only, whatever its name resolves to.
    local = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **{name: value for name, value in local.items() if name not in os.environ},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_WORLD_SIZE": str(environment.world_size),
        "MASTER_ADDR": environment.host,
        "MASTER_PORT": str(environment.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        START: environment.start,
    }


class Signals(SignalCatcher):
    """Catches Ctrl-C and SIGTERM for the workers, who finish the step and save.

    A second one ends them at once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.asked = 0
        self._say, self._passed_on, self._preparing = say, 0, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._preparing:  # there are no workers yet: a download, say, ends at once
            raise KeyboardInterrupt

    def pass_on_from_now(self) -> None:
        """End the time of preparation; a stop that was asked for in it is never lost.

        An interrupt that reaches Python inside a callback of an import or of the garbage collector
        is printed and forgotten there.
        """
        self._preparing = False
        if self.asked:
            raise KeyboardInterrupt

    def pass_on(self, workers: Sequence[Worker]) -> None:
        """Send the workers what came since the last call."""
        # The handler only counts: signals are sent here, outside of it.
        if self.asked == self._passed_on:
            return
        self._passed_on = self.asked
        for worker in workers:
            worker.send(signal.SIGINT if self.asked == 1 else signal.SIGKILL)
        if self.asked == 1:
            self._say(STOPPING)


def _tell_of_failures(board: Board, workers: Sequence[Worker], hosting: Hosting) -> None:
    """Tell the others of a process that cannot do it itself any more."""
    for worker in workers:
        if worker.failed and known_cause(board) is None:
            name, words = label(hosting[worker.rank], worker.rank), worker.last_words()
            announce(board, f"{name} went silent: {words}; continue with --resume", worker.rank)


def _end_survivors(board: Board, workers: Sequence[Worker], timeout: float) -> None:
    """Once the run has failed, give all time to notice; only the one to blame may be stopped."""
    ends = [worker.ended_at for worker in workers if worker.failed]
    if not ends:
        return
    cause = known_cause(board)
    alive = [worker for worker in workers if worker.code is None]
    # If only the one to blame still runs, a second after the last end is enough.
    only_culprit = cause is not None and all(worker.rank == cause.rank for worker in alive)
    if time.monotonic() > (max(ends) + 1 if only_culprit else min(ends) + timeout):
        for worker in alive:
            worker.send(signal.SIGKILL)


def _raise_if_failed(
    board: Board, workers: Sequence[Worker], hosting: Hosting, asked_to_stop: int
) -> None:
    failed = [worker for worker in workers if worker.failed]
    if not failed:
        return
    # Asked to stop, a worker may end in the middle of a step: that is no failure.
    if asked_to_stop:
        raise Interrupted(
            "stopped before this step was finished; continue from the last checkpoint with --resume"
        )
    cause = known_cause(board)
    # The first cause on top, then the last words of everyone who failed.
    said = [f"  {label(hosting[each.rank], each.rank)}: {each.last_words()}" for each in failed]
    first = cause.text if cause else "the run did not finish"
    error = RunFailed("\n".join([first, "what the processes said:", *said]))
    # 2 means wrong input: only if all of them say so.
    error.exit_code = 2 if all(each.code == 2 for each in failed) else 1
    raise error
