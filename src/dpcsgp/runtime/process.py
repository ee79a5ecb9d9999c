"""One process of a distributed run, started by `dpcsgp launch` or torchrun; hosts its share of the
nodes."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dpcsgp import training
from dpcsgp.compression import frames
from dpcsgp.config import Config
from dpcsgp.console.session import open_config
from dpcsgp.console.tables import outcome_table, plan_table
from dpcsgp.console.watching import Publisher, progress_line
from dpcsgp.errors import ConfigError, DivergenceError, DpcsgpError, PrivateStepError
from dpcsgp.network.board import Board, Seal
from dpcsgp.network.handshake import handshake
from dpcsgp.network.health import Health, announce, end_process, exit_barrier, label
from dpcsgp.network.torch_distributed import (
    ProcessEnvironment,
    TorchDistributed,
    leave_group,
    nodes_of_ranks,
)
from dpcsgp.records.metrics import Recorder
from dpcsgp.runs.build import RunData, build_run, load_builtin_data
from dpcsgp.runs.design import RunDesign, build_topology, design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.merge import (
    SharedFolder,
    StateFiles,
    merge_parts,
    merge_rows,
    merge_summaries,
    write_part,
)
from dpcsgp.runtime.children import PARENT, cores_per_process, die_with_parent
from dpcsgp.runtime.pacing import AgreedStop, Pace
from dpcsgp.runtime.session import Outcome, load_checkpoint
from dpcsgp.runtime.signals import StopSignal

START_SECONDS = (
    120.0  # processes may take this long to start, one after the other, on a busy machine
)
# Settings that may differ between the machines of one run without changing what is computed.
MACHINE_SETTINGS = ("network.key_file", "graph.edges_file", "run.device", "privacy.seed")

Wrapper = Callable[[training.TrainingNetwork], training.TrainingNetwork]


@dataclass(frozen=True)
class RunRequest:
    """What a process has to train, and where it writes; `wrap` puts something around the
    network."""

    open_config: Callable[[], Config]
    prepare: Callable[[Config], tuple[RunDesign, RunData]]
    out: Path | None
    resume: bool = False
    wrap: Wrapper = lambda network: network
    should_stop: Callable[[int], bool] = lambda step: False
    on_row: Callable[[dict[str, Any]], None] = lambda row: None
    quiet: bool = False  # no tables and no page


@dataclass(frozen=True)
class ProcessContext:
    """This process among the others of a run."""

    place: ProcessEnvironment
    store: Any
    board: Board
    health: Health
    config: Config
    key: bytes | None
    quiet: bool

    @property
    def console(self) -> Console:
        """Where rank 0 talks; the launcher talks for its workers."""
        return Console(quiet=self.quiet or self.place.rank != 0 or PARENT in os.environ)


def worker_session(
    place: ProcessEnvironment,
    config_file: Path | None,
    settings: Sequence[str],
    out: Path | None,
    resume: bool,
    allow_divergence: bool,
    wrap: Wrapper = lambda network: network,
) -> dict[str, Any]:
    """Train this process's nodes of a built-in task and return the summary of the run."""

    def prepare(config: Config) -> tuple[RunDesign, RunData]:
        data = load_builtin_data(config)
        return design_run(config, data.facts, allow_divergence or resume), data

    def settled() -> Config:
        return open_config(config_file, settings, out, resume)

    return take_part(place, RunRequest(settled, prepare, out, resume, wrap)).summary


def take_part(place: ProcessEnvironment, assignment: RunRequest) -> Outcome:
    """Train this process's nodes; the summary is of the whole run. What ends this process is told
    to the others."""
    die_with_parent()
    torch.set_num_threads(
        cores_per_process(int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size)))
    )
    if assignment.out is None:
        raise ConfigError("--out FOLDER is needed when several processes write one results folder")
    store = place.open_store(START_SECONDS, hosting=place.hosts_store)
    board, name, linger = Board(store, place.rank), f"rank {place.rank}", 1.0
    try:
        config = assignment.open_config()
        key = frames.load_key(config.network.key_file) if config.network.key_file else None
        board.seal = Seal(key, place.start)
        timeout = config.network.timeout_seconds
        hosting = nodes_of_ranks(build_topology(config).num_nodes, place.world_size)
        store.set_timeout(timedelta(seconds=timeout))
        health = Health(
            lambda: place.open_store(timeout), place.rank, hosting, timeout, seal=board.seal
        )
        name, linger = label(hosting[place.rank], place.rank), health.linger
        outcome = _session(
            ProcessContext(place, store, board, health, config, key, assignment.quiet),
            assignment,
            assignment.out,
        )
        health.stop()
        leave_group()
        with suppress(
            RuntimeError
        ):  # all is written: who still serves the store does not matter any more
            exit_barrier(board, place.world_size, timeout if place.hosts_store else 0)
        return outcome
    except BaseException as error:
        # Texts of this package are written to be told; those of other code may quote what it worked
        # on.
        text = str(error) if isinstance(error, DpcsgpError) else type(error).__name__
        _tell_the_others(board, place.world_size, f"{name} gave up: {text}", linger)
        raise


def worker_command(*arguments: Any) -> dict[str, Any]:
    """Do what `worker_session` does; an error ends the process at once.

    Taking down torch's threads with half-dead connections takes seconds and can abort the process
    with another code."""
    try:
        return worker_session(*arguments)
    except DpcsgpError as error:
        if isinstance(error, PrivateStepError):
            print(
                f"reason, for this machine only: {error.__cause__!r}", file=sys.stderr, flush=True
            )
        end_process(str(error), error.exit_code)
    except KeyboardInterrupt:
        end_process("stopped at once; continue from the last checkpoint with --resume", 130)
    except Exception as error:
        traceback.print_exc()
        end_process(f"{type(error).__name__}: {error}")


def _tell_the_others(board: Board, world_size: int, cause: str, linger: float) -> None:
    """Leave the cause (the first one counts), let go of all connections, and stay until the others
    have read it."""
    try:
        announce(board, cause, board.rank)
        leave_group()
        exit_barrier(board, world_size, linger)
    except RuntimeError:
        pass  # the store has gone: everybody notices that without being told


def _session(party: ProcessContext, assignment: RunRequest, out: Path) -> Outcome:
    """Meet the others, train, and put the results together."""
    config, rank, world_size = party.config, party.place.rank, party.place.world_size
    resume = assignment.resume
    design, data = assignment.prepare(config)
    party.console.print(plan_table(design))
    network = _meet(party, design, resume)
    folder = _results_folder(network, rank, out, config, resume)
    shared = SharedFolder.join(
        folder.path, rank, network.gather_values("name of this start", os.urandom(8).hex())[0]
    )
    run = build_run(
        design, data, assignment.wrap(network), folder.path, folder.run_id, rank, world_size
    )
    run = replace(run, on_row=assignment.on_row)
    pace = Pace.of(design)
    run = _with_parts(
        run, folder, party.place, pace.checkpoints_to_keep(config.run.checkpoint_every)
    )
    snapshot = load_checkpoint(run) if resume else None
    network.gather_values("ready", True, START_SECONDS)
    states = StateFiles.of(folder.path, rank, world_size, design)
    if snapshot is None:
        start_ND = run.anchor_D.expand(len(network.nodes), -1)
        states.keep(0, run.algorithm.init(start_ND, run.anchor_D))
    progress = _train(party, run, pace, states, snapshot, assignment.should_stop)
    part = write_part(design, run, progress, states)
    parts = network.gather_values(
        "results", part | {"bytes_between_processes": network.bytes_to_processes}
    )
    sharers = shared.ranks
    if rank == sharers[0]:
        summary = merge_parts(folder, run, progress, parts, states, sharers)
    else:
        summary = merge_summaries(parts, merge_rows([part["rows"][-1] for part in parts]))
    network.gather_values("merged", True)
    shared.leave()
    if not party.quiet and PARENT not in os.environ and rank == sharers[0]:
        from dpcsgp.report import write_report  # brings matplotlib, which most processes do without

        page = write_report([folder.path])
        party.console.print(outcome_table(summary))
        party.console.print(
            f"results: {folder.path}    page: {page}", highlight=False, soft_wrap=True
        )
    return Outcome(summary, run, progress)


def _meet(party: ProcessContext, design: RunDesign, resume: bool) -> TorchDistributed:
    """Shake hands and connect; the tags of this start's frames and values in the store fit no other
    start."""
    place, board = party.place, party.board
    facts = handshake_facts(design, party.key, resume)
    run_key = handshake(board, place.world_size, facts, party.health, START_SECONDS)
    board.seal.advance(run_key)
    backend = "nccl" if party.config.run.device.startswith("cuda") else "gloo"
    return TorchDistributed(design.topology, place, party.store, party.health, run_key, backend)


def handshake_facts(design: RunDesign, key: bytes | None, resume: bool) -> dict[str, object]:
    """Return what must be equal in all processes, key by key, so that a difference can be named."""
    settings = {
        f"{section}.{name}": value
        for section, values in design.config.model_dump().items()
        for name, value in values.items()
    }
    key_check = (
        hashlib.blake2b(b"dpcsgp handshake", key=key, digest_size=8).hexdigest() if key else "none"
    )
    initial = "initial model (build it after the same torch.manual_seed)"
    return {
        **{name: value for name, value in settings.items() if name not in MACHINE_SETTINGS},
        "graph": design.topology.fingerprint,
        "mixing rate": f"{design.mixing_rate or 0:.9g}",
        "initial model" if design.facts.num_classes else initial: hashlib.blake2b(
            design.anchor_D.numpy().tobytes(), digest_size=8
        ).hexdigest(),
        "input shape": list(design.facts.input_shape),
        "examples per node": list(design.facts.num_examples),
        "key in network.key_file": key_check,
        "--resume": resume,
    }


def _results_folder(
    network: TorchDistributed, rank: int, out: Path, config: Config, resume: bool
) -> ResultsFolder:
    """Rank 0 creates or reopens the results folder; the others use it, or make their own where they
    cannot see it."""
    folder = None
    if rank == 0:
        folder = ResultsFolder.reopen(out)[0] if resume else ResultsFolder.create(out, config)
    run_id = network.gather_values("run id", folder.run_id if folder else None)[0]
    folder = folder or ResultsFolder.join(out, config, run_id)
    (folder.path / "checkpoint").mkdir(exist_ok=True)
    return folder


def _with_parts(
    run: training.Run, folder: ResultsFolder, place: ProcessEnvironment, snapshots: int
) -> training.Run:
    """Keep this process's own rows beside its snapshots, and enough snapshots to have one in common
    with the others."""
    assert run.checkpoints is not None
    return replace(
        run,
        recorder=Recorder(folder.path / "checkpoint", place.rank, place.world_size),
        checkpoints=replace(run.checkpoints, keep=snapshots),
    )


def _train(
    party: ProcessContext,
    run: training.Run,
    pace: Pace,
    states: StateFiles,
    snapshot: Any,
    also_stop: Callable[[int], bool],
) -> training.Progress:
    place, health, console = party.place, party.health, party.console
    publish = Publisher(party.board, run)
    with (
        StopSignal(console.print, also_stop) as stop,
        progress_line(console, party.config, party.board, place.world_size) as show,
    ):
        agreed = AgreedStop(party.board, place.world_size, health, stop, pace)

        def should_stop(step: int) -> bool:
            health.raise_if_failed()
            with health.limit():
                return agreed.is_set(step)  # asks the store only once somebody wants to stop

        def watch(progress: training.Progress) -> None:
            with health.limit():
                if publish(progress) and not console.quiet:
                    show()
            step = progress.state.step
            if run.recorder.rows[-1]["step"] == step and not progress.rounds_polished:
                states.keep(step, progress.state)
            pace.meet(run.network, step)

        progress = training.train(run, watch, should_stop, snapshot)
        if progress.stopped_because.startswith("diverged"):
            raise DivergenceError(progress.stopped_because)
        # the last line shows the slowest process: it must have told its last step
        run.network.gather_values("trained", True)
        if not console.quiet:
            show()
    return progress
