"""One process of a distributed run; it hosts some of the nodes.

`dpcsgp launch` or torchrun starts it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, final

import torch

from dpcsgp.compression import frames
from dpcsgp.config import Config
from dpcsgp.errors import (
    ConfigError,
    DivergenceError,
    DpcsgpError,
    PrivateStepError,
    RefusedDataError,
)
from dpcsgp.network.board import Board, Seal
from dpcsgp.network.handshake import handshake
from dpcsgp.network.health import Health, announce, end_process, exit_barrier, label
from dpcsgp.network.torch_distributed import (
    ProcessEnvironment,
    TorchDistributed,
    leave_group,
    nodes_of_ranks,
)
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.records.ending import Ending, Stop
from dpcsgp.records.trackers import Trackers, check_trackers
from dpcsgp.runs.build import build_run
from dpcsgp.runs.design import RunDesign, build_topology
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.merge import SharedFolder, StateFiles, merge_parts, merge_rows, write_part
from dpcsgp.runs.summary import merge_summaries
from dpcsgp.runtime.logs import LOG_FILE, open_logs
from dpcsgp.runtime.pacing import AgreedStop, Pace
from dpcsgp.runtime.process_agreement import (
    handshake_facts,
    refuse_few_colluders,
    refuse_lag,
    refuse_unauthenticated_pairs,
)
from dpcsgp.runtime.reporting import Reporter, Silent
from dpcsgp.runtime.requests import BuiltinRequest, RunRequest
from dpcsgp.runtime.session import (
    NO_HOOKS,
    Hooks,
    Outcome,
    also_tracked,
    newest_checkpoint,
    write_page,
)
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.runtime.standings import Publisher, standing_of_all
from dpcsgp.runtime.workers import PARENT, cores_per_process, die_with_agent
from dpcsgp.training import Progress, Run, TrainingNetwork, train

log = logging.getLogger(__name__)

# Processes may take this long to start, one after the other, on a busy machine.
START_SECONDS: Final = 120.0


Wrapper = Callable[[TrainingNetwork], TrainingNetwork]


@final
@dataclass(frozen=True)
class ProcessContext:
    """This process among the others of a run."""

    environment: ProcessEnvironment
    store: Any
    board: Board
    health: Health
    config: Config
    key: bytes | None

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.environment.world_size


def run_process(
    request: RunRequest,
    environment: ProcessEnvironment,
    hooks: Hooks = NO_HOOKS,
    wrap: Wrapper = lambda network: network,
) -> Outcome:
    """Train this process's nodes; the summary is of the whole run.

    What ends this process is told to the others.

    Args:
        request: what to train; the same in all processes but for
            `process_agreement.MACHINE_SETTINGS`.
        environment: which process this is, and where the store is.
        hooks: what the caller adds; rank 0 reports, unless a launcher does.
        wrap: puts something around the network.
    """
    die_with_agent()
    # The processes of this machine share its cores.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", environment.world_size))
    torch.set_num_threads(cores_per_process(local))
    refuse_lag(request.config())
    if request.out is None:
        raise ConfigError("--out FOLDER is needed when several processes write one results folder")
    # From here on the others can be told of what goes wrong.
    store = environment.open_store(START_SECONDS, hosting=environment.hosts_store)
    board, name, linger = Board(store, environment.rank), f"rank {environment.rank}", 1.0
    try:
        context = _context(request.config(), environment, store, board)
        hosting = nodes_of_ranks(build_topology(context.config).num_nodes, context.world_size)
        name, linger = label(hosting[context.rank], context.rank), context.health.linger
        # The run itself; then all leave together, because one of them may serve the store.
        outcome = _session(context, request, hooks, wrap)
        context.health.stop()
        leave_group()
        timeout = context.config.network.timeout_seconds
        with suppress(RuntimeError):  # all is written: who still serves the store does not matter
            exit_barrier(board, context.world_size, timeout if environment.hosts_store else 0)
        return outcome
    except BaseException as error:
        _tell_the_others(board, environment.world_size, f"{name} gave up: {_told(error)}", linger)
        raise


def run_worker(request: BuiltinRequest, wrap: Wrapper = lambda network: network) -> int:
    """Be a worker of `dpcsgp launch`; return the exit code."""
    environment = ProcessEnvironment.from_environment()
    assert environment is not None
    if name := os.environ.get(LOG_FILE):
        open_logs(verbose=False, log_file=Path(name))
    return run_process_or_end(request, environment, wrap=wrap).progress.ending.exit_code


def run_process_or_end(
    request: RunRequest,
    environment: ProcessEnvironment,
    hooks: Hooks = NO_HOOKS,
    wrap: Wrapper = lambda network: network,
) -> Outcome:
    """Do what `run_process` does; an error ends the process at once.

    Taking down torch's threads with half-dead connections takes seconds and can abort the process
    with another code.
    """
    try:
        return run_process(request, environment, hooks, wrap)
    except DpcsgpError as error:
        _end_with(error)
    except KeyboardInterrupt:
        end_process("stopped at once; continue from the last checkpoint with --resume", 130)
    except Exception as error:
        traceback.print_exc()
        end_process(f"{type(error).__name__}: {error}")


def _told(error: BaseException) -> str:
    """Return what the others may hear of an error."""
    if isinstance(error, RefusedDataError):
        return error.told
    # Texts of this package are written to be told; those of other code may quote what it worked on.
    return str(error) if isinstance(error, DpcsgpError) else type(error).__name__


def _end_with(error: DpcsgpError) -> NoReturn:
    if isinstance(error, PrivateStepError):
        print(f"reason, for this machine only: {error.__cause__!r}", file=sys.stderr, flush=True)
    end_process(str(error), error.exit_code)


def _context(
    config: Config, environment: ProcessEnvironment, store: Any, board: Board
) -> ProcessContext:
    """Load the key, and start to beat and to watch the others."""
    # The key seals every value on the board; without one only form and range are checked.
    key_file = config.network.key_file
    key = frames.load_key(Path(key_file)) if key_file else None
    if key is None:
        refuse_unauthenticated_pairs(config, environment.world_size)
    refuse_few_colluders(config, environment.world_size)
    board.seal = Seal(key, environment.start)
    timeout = config.network.timeout_seconds
    hosting = nodes_of_ranks(build_topology(config).num_nodes, environment.world_size)
    store.set_timeout(timedelta(seconds=timeout))

    def open_store() -> Any:
        return environment.open_store(timeout)

    health = Health(open_store, environment.rank, hosting, timeout, seal=board.seal)
    return ProcessContext(environment, store, board, health, config, key)


def _tell_the_others(board: Board, world_size: int, cause: str, linger: float) -> None:
    """Leave the cause (the first one counts), let go of all connections, stay until it was read."""
    try:
        announce(board, cause, board.rank)
        leave_group()
        exit_barrier(board, world_size, linger)
    except RuntimeError:
        pass  # the store has gone: everybody notices that without being told


def _session(context: ProcessContext, request: RunRequest, hooks: Hooks, wrap: Wrapper) -> Outcome:
    """Meet the others, train, and put the results together."""
    config, rank, world_size = context.config, context.rank, context.world_size
    # A launcher talks for its workers; otherwise rank 0 does.
    launched = PARENT in os.environ
    reporter = Silent() if launched or rank != 0 else hooks.reporter
    # Rank 0 alone shows what it sees, as its own, and at the end what all have seen.
    tracker_names = (*config.run.trackers, *hooks.trackers) if rank == 0 else ()
    check_trackers(tracker_names)
    # Data and design are checked before this process meets any other.
    design, data = request.prepare(config)
    reporter.plan(design)
    network = _connect(context, design, request.resume)
    folder = _results_folder(network, rank, request, config)
    # Marks under a fresh common name show which ranks see the same disk.
    names = network.gather_values("name of this start", os.urandom(8).hex())
    shared = SharedFolder.join(folder.path, rank, names[0])
    pace = Pace.of(design)
    trackers = Trackers(tracker_names, folder.path, folder.run_id, config.flat())
    run = build_run(
        design,
        data,
        wrap(network),
        folder,
        rank=rank,
        world_size=world_size,
        checkpoints_to_keep=pace.checkpoints_to_keep(config.run.checkpoint_every),
        on_row=also_tracked(hooks.on_start(folder.path), trackers, "rank_0/"),
    )
    with closing(run.gradients.ledger), trackers:  # whatever happens, this process can resume
        checkpoint = newest_checkpoint(run) if request.resume else None
        # Nobody starts before all are ready: reading a checkpoint may take long on one machine.
        network.gather_values("ready", True, START_SECONDS)
        states = StateFiles.of(folder.path, rank, world_size, design)
        if checkpoint is None:
            _keep_start(states, run)
        progress, stop_asked = _train(context, run, pace, states, checkpoint, reporter, hooks)
        part = write_part(design, run, progress, states)
        sharers = shared.ranks
        merge = partial(merge_parts, folder, run, progress, states=states, ranks=sharers)
        summary = _summary_of_all(network, part, merge if rank == sharers[0] else None)
        trackers.write_all(folder.path / "metrics.jsonl")
        trackers.close(progress.stopped_because)
        if progress.ending is not Ending.INTERRUPTED:  # everybody has its last checkpoint
            run.gradients.forget_all()
        shared.leave()
    writes_page = hooks.write_page and not launched and rank == sharers[0]
    page = write_page(folder.path) if writes_page else None
    reporter.outcome(summary, folder.path, page)
    return Outcome(summary, run, progress, folder.path, stop_asked)


def _keep_start(states: StateFiles, run: Run) -> None:
    """Keep the state of step 0, for the average model of the first row."""
    start_ND = run.anchor_D.expand(len(run.network.nodes), -1)
    states.keep(0, run.algorithm.init(start_ND, run.anchor_D))


def _summary_of_all(
    network: TorchDistributed,
    part: dict[str, Any],
    merge: Callable[[list[dict[str, Any]]], dict[str, Any]] | None,
) -> dict[str, Any]:
    """Tell the own rows and part of the summary, and return the summary of all.

    Args:
        network: to all processes.
        part: this process's part.
        merge: puts all parts together in a folder; None: another process that sees it does.
    """
    part["bytes_between_processes"] = network.bytes_to_processes
    parts = network.gather_values("results", part)
    if merge is not None:
        summary = merge(parts)
    else:
        summary = merge_summaries(parts, merge_rows([part["rows"][-1] for part in parts]))
    network.gather_values("merged", True)
    return summary


def _connect(context: ProcessContext, design: RunDesign, resume: bool) -> TorchDistributed:
    """Shake hands and connect; tags of this start's frames and values fit no other start."""
    environment, board = context.environment, context.board
    facts = handshake_facts(design, context.key, resume)
    # All compare their facts; the key of this start follows from what all of them drew.
    run_key = handshake(board, context.world_size, facts, context.health, START_SECONDS)
    board.seal.advance(run_key)
    backend = "nccl" if context.config.run.device.startswith("cuda") else "gloo"
    network = TorchDistributed(
        design.topology, environment, context.store, context.health, run_key, backend
    )
    log.info("rank %d of %d connected", context.rank, context.world_size)
    return network


def _results_folder(
    network: TorchDistributed, rank: int, request: RunRequest, config: Config
) -> ResultsFolder:
    """Rank 0 opens the results folder; the others use it, or make theirs if they cannot see it."""
    assert request.out is not None
    folder = ResultsFolder.open(request.out, config, request.resume) if rank == 0 else None
    # One name for the run, although machines without a shared disk have folders of their own.
    run_id = network.gather_values("run id", folder.run_id if folder else None)[0]
    folder = folder or ResultsFolder.join(request.out, config, run_id)
    (folder.path / "checkpoint").mkdir(exist_ok=True)
    return folder


def _train(
    context: ProcessContext,
    run: Run,
    pace: Pace,
    states: StateFiles,
    checkpoint: Checkpoint | None,
    reporter: Reporter,
    hooks: Hooks,
) -> tuple[Progress, bool]:
    """Train in step with the others.

    Return the last progress, and whether a signal asked to stop.
    """
    health, board, world_size = context.health, context.board, context.world_size
    publish, quiet = Publisher(board, run), isinstance(reporter, Silent)
    with (
        StopSignal(reporter.say, hooks.should_stop) as stop,
        reporter.progress() as show,
    ):
        agreed = AgreedStop(board, world_size, health, stop, pace)

        def should_stop(step: int) -> Stop | None:
            health.raise_if_failed()
            with health.limit():
                return agreed.is_set(step)  # asks the store only once somebody wants to stop

        def show_all() -> None:
            if not quiet and (found := standing_of_all(board, world_size, context.config)):
                show(found)

        def watch(progress: Progress) -> None:
            with health.limit():
                if publish(progress):
                    show_all()
            step = progress.state.step
            if run.recorder.rows[-1]["step"] == step and not progress.rounds_polished:
                states.keep(step, progress.state)
            pace.meet(run.network, step)

        progress = train(run, watch, should_stop, checkpoint)
        if progress.ending is Ending.DIVERGED:
            raise DivergenceError(progress.stopped_because)
        # The last line shows the slowest process: it must have told its last step.
        run.network.gather_values("trained", True)
        show_all()
    return progress, stop.asked
