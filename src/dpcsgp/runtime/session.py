"""One run in one process, from a checked design to a finished results folder: for the command line,
the API and grids."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcsgp import training
from dpcsgp.compression import frames
from dpcsgp.errors import ConfigError
from dpcsgp.network import Simulator
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.runs.build import RunData, build_run
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder


@dataclass(frozen=True)
class Outcome:
    """What a run left: its summary, and its parts in the state they ended in."""

    summary: dict[str, Any]
    run: training.Run
    progress: training.Progress


Watching = Callable[[training.Run], AbstractContextManager[training.Watcher]]


def run_simulated(
    design: RunDesign,
    data: RunData,
    folder: ResultsFolder,
    *,
    resume: bool = False,
    watching: Watching = lambda run: nullcontext(lambda progress: None),
    should_stop: Callable[[int], bool] = lambda step: False,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Outcome:
    """Train all nodes in this process and write model and summary; `watching` shows the progress of
    the run."""
    key_file = design.config.network.key_file
    key = frames.load_key(Path(key_file)) if key_file else None
    run = build_run(design, data, Simulator(design.topology, key), folder.path, folder.run_id)
    run = replace(run, on_row=on_row)
    try:
        snapshot = load_checkpoint(run) if resume else None
        with watching(run) as watch:
            progress = training.train(run, watch, should_stop, snapshot)
        return Outcome(folder.finish(design, run, progress), run, progress)
    finally:
        run.ledger.close()  # so that this very process can resume


def load_checkpoint(run: training.Run) -> Checkpoint | None:
    """Return the newest snapshot that all processes of the run have whole."""
    assert run.checkpoints is not None
    previous, now = previous_processes(run.checkpoints.path), run.checkpoints.num_parts
    if previous and now not in previous:
        number = max(previous)
        command = (
            "dpcsgp run --resume" if number == 1 else f"dpcsgp launch --resume --processes {number}"
        )
        raise ConfigError(
            f"--resume: this run was made by {number} processes, not {now}; continue it with "
            f"`{command}`"
        )
    return run.checkpoints.load_common(
        run.network.gather_values("whole checkpoints", run.checkpoints.complete_steps())
    )


def previous_processes(checkpoints: Path) -> set[int]:
    """Return how many processes wrote the snapshots in a folder (empty: there are none)."""
    return {
        int(path.stem.rpartition("-of-")[2]) for path in checkpoints.glob("step-*.part-*-of-*.json")
    }
