"""Starts the processes of a run on this machine, shows one progress line for all, and leaves no
orphan behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from dpcsgp.compression import frames
from dpcsgp.config import Config
from dpcsgp.console.session import check_quickly, downloads, new_folder, open_config
from dpcsgp.console.tables import outcome_table, plan_table
from dpcsgp.console.watching import progress_line
from dpcsgp.errors import DpcsgpError
from dpcsgp.network.board import LAUNCHER, Board, Seal
from dpcsgp.network.health import announce, known_cause, label
from dpcsgp.network.torch_distributed import START, ProcessEnvironment, nodes_of_ranks, serve_store
from dpcsgp.runs.build import load_builtin_data
from dpcsgp.runs.design import build_topology, design_run
from dpcsgp.runtime.children import Child, Nursery, cores_per_process, nursery
from dpcsgp.runtime.session import previous_processes
from dpcsgp.runtime.signals import STOPPING, SignalCatcher

_POLL_SECONDS = 0.1


class RunFailed(DpcsgpError):
    """Processes of a run failed: the message gives the cause and what each of them said."""


class Interrupted(DpcsgpError):
    """The run was stopped before it could save anything new."""

    exit_code = 130


def launch_session(
    config_file: Path | None,
    settings: Sequence[str],
    out: Path | None,
    processes: int | None,
    resume: bool,
    allow_divergence: bool,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run all processes to their end and return the merged summary."""
    console = Console(quiet=quiet)
    config = open_config(config_file, settings, out, resume)
    out = out or new_folder(config)
    check_quickly(config, out, resume)
    previous = max(previous_processes(out / "checkpoint"), default=None) if resume else None
    hosting = nodes_of_ranks(
        build_topology(config).num_nodes, processes or previous or build_topology(config).num_nodes
    )
    words = ["run", *([str(config_file)] if config_file else []), "--out", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--resume"] * resume + ["--allow-divergence"] * allow_divergence
    server = serve_store()
    place = ProcessEnvironment(
        0, len(hosting), "127.0.0.1", server.port, start=os.urandom(16).hex()
    )
    started = time.time()
    with nursery(_environment(place)) as workers:  # imports while the data are loaded here
        with downloads(console) as bars:  # once, and before ten processes ask for the same files
            design = design_run(
                config, load_builtin_data(config, bars).facts, allow_divergence or resume
            )
        console.print(plan_table(design))
        _supervise(console, workers, words, place, hosting, config)
    summary_file = out / "summary.json"
    if not summary_file.exists() or summary_file.stat().st_mtime < started:
        raise Interrupted("stopped before the first step")
    summary = json.loads(summary_file.read_text())
    _show_outcome(console, summary, out)
    return summary


def _show_outcome(console: Console, summary: dict[str, Any], out: Path) -> None:
    from dpcsgp.report import write_report  # brings matplotlib, which takes a while to import

    page = write_report([out])
    console.print(outcome_table(summary))
    console.print(_pace(summary), highlight=False, soft_wrap=True)
    console.print(f"results: {out}    page: {page}", highlight=False, soft_wrap=True)


def _pace(summary: dict[str, Any]) -> str:
    if not summary.get("seconds_per_step"):
        return ""
    return (
        f"{summary['seconds_per_step']:.3f} s per step with {summary['processes']} processes, "
        "evaluations included; "
        f"{summary['bytes_between_processes'] / 1e6:.3f} MB of frames between them"
    )


def _supervise(
    console: Console,
    workers: Nursery,
    words: Sequence[str],
    place: ProcessEnvironment,
    hosting: Sequence[tuple[int, ...]],
    config: Config,
) -> None:
    """Start the workers and watch them to their end; raise if one failed."""
    key = frames.load_key(config.network.key_file) if config.network.key_file else None
    board = Board(place.open_store(timeout=10), LAUNCHER, Seal(key, place.start))
    with (
        tempfile.TemporaryDirectory() as folder,
        Signals(console) as signals,
        progress_line(console, config, board, place.world_size) as show,
    ):
        children = workers.start(words, place.world_size, Path(folder))
        while any(child.code is None for child in children):
            signals.pass_on(children)
            show()
            workers.look()
            _tell_of_failures(board, children, hosting)
            _end_survivors(board, children, config.network.timeout_seconds)
            time.sleep(_POLL_SECONDS)
        show()
        _raise_if_failed(board, children, hosting, signals.asked)


def _environment(place: ProcessEnvironment) -> dict[str, str]:
    # The processes meet on this machine only, whatever its name resolves to.
    own = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **{name: value for name, value in own.items() if name not in os.environ},
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        START: place.start,
        "OMP_NUM_THREADS": str(cores_per_process(place.world_size)),
    }


class Signals(SignalCatcher):
    """Catches Ctrl-C and SIGTERM for the workers, who finish the step and save; a second one ends
    them at once."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.asked = 0
        self._console, self._passed_on = console, 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1

    def pass_on(self, children: Sequence[Child]) -> None:
        """Send the workers what came since the last call."""
        if self.asked == self._passed_on:
            return
        self._passed_on = self.asked
        for child in children:
            child.send(signal.SIGINT if self.asked == 1 else signal.SIGKILL)
        if self.asked == 1:
            self._console.print(STOPPING, style="yellow")


def _tell_of_failures(
    board: Board, children: Sequence[Child], hosting: Sequence[tuple[int, ...]]
) -> None:
    """Tell the others of a process that cannot do it itself any more."""
    for child in children:
        if child.failed and known_cause(board) is None:
            name = label(hosting[child.rank], child.rank)
            announce(
                board,
                f"{name} went silent: {child.complaint()}; continue with --resume",
                child.rank,
            )


def _end_survivors(board: Board, children: Sequence[Child], timeout: float) -> None:
    """Once the run has failed, give everybody time to notice; only the one to blame may be stopped
    for good."""
    ends = [child.ended_at for child in children if child.failed]
    if not ends:
        return
    cause = known_cause(board)
    alive = [child for child in children if child.code is None]
    only_culprit = cause is not None and all(child.rank == cause.rank for child in alive)
    if time.monotonic() > (max(ends) + 1 if only_culprit else min(ends) + timeout):
        for child in alive:
            child.send(signal.SIGKILL)


def _raise_if_failed(
    board: Board, children: Sequence[Child], hosting: Sequence[tuple[int, ...]], asked_to_stop: int
) -> None:
    failed = [child for child in children if child.failed]
    if not failed:
        return
    if asked_to_stop:
        raise Interrupted(
            "stopped before this step was finished; continue from the last checkpoint with --resume"
        )
    cause = known_cause(board)
    said = [f"  {label(hosting[child.rank], child.rank)}: {child.complaint()}" for child in failed]
    error = RunFailed(
        "\n".join(
            [cause.text if cause else "the run did not finish", "what the processes said:", *said]
        )
    )
    error.exit_code = 2 if all(child.code == 2 for child in failed) else 1
    raise error
