"""One training session, from a request to a finished results folder, in one process.

This process hosts all nodes; `runtime.process` is the same for one of several processes. The
command line, the API and the grids all come through here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.compression import frames
from dpcsgp.errors import ConfigError
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.records.ending import Ending
from dpcsgp.records.trackers import Trackers, check_trackers
from dpcsgp.runs.build import build_run
from dpcsgp.runs.folder import ResultsFolder, new_folder, previous_processes
from dpcsgp.runs.simulated_lateness import with_lateness
from dpcsgp.runs.simulation import simulated_network
from dpcsgp.runs.summary import write_results
from dpcsgp.runs.wording import standing
from dpcsgp.runtime.reporting import Reporter, Silent
from dpcsgp.runtime.requests import RunRequest
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import Progress, Run, train

SILENT: Final = Silent()

OnRow = Callable[[dict[str, Any]], None]


@final
@dataclass(frozen=True)
class Hooks:
    """What a caller adds to a session.

    Attributes:
        reporter: hears how the run goes.
        should_stop: asked with the number of steps done; True pauses the run there, "finish"
            brings it to its end (`records.ending.Stop`).
        on_start: called with the results folder before training; returns what sees every row.
        write_page: whether `report.html` is written at the end.
        trackers: further ones beside those of `run.trackers`.
    """

    reporter: Reporter = SILENT
    should_stop: Callable[[int], object] = lambda step: False
    on_start: Callable[[Path], OnRow] = lambda folder: lambda row: None
    write_page: bool = False
    trackers: tuple[str, ...] = ()


NO_HOOKS: Final = Hooks()


@final
@dataclass(frozen=True)
class Outcome:
    """What a session left: the summary, the run's parts in the state they ended in, and where."""

    summary: dict[str, Any]
    run: Run
    progress: Progress
    folder: Path
    stop_asked: bool = False  # by a signal


def run_simulated(request: RunRequest, hooks: Hooks = NO_HOOKS) -> Outcome:
    """Train all nodes in this process; write model, rows, summary and, if asked for, a page."""
    reporter = hooks.reporter
    # Settings, data, design: everything that can be refused is refused before a folder is made.
    config = request.config()
    tracker_names = (*config.run.trackers, *hooks.trackers)
    check_trackers(tracker_names)
    with reporter.downloads() as downloads:
        design, data = request.prepare(config, downloads)
    reporter.plan(design)
    # Folder, network, and the parts of the run.
    folder = ResultsFolder.open(request.out or new_folder(config), config, request.resume)
    key_file = config.network.key_file
    key = frames.load_key(Path(key_file)) if key_file else None
    network, on_row = simulated_network(design, key), hooks.on_start(folder.path)
    trackers = Trackers(tracker_names, folder.path, folder.run_id, config.flat())
    with StopSignal(reporter.say, hooks.should_stop) as stop, trackers:
        run = build_run(design, data, network, folder, on_row=also_tracked(on_row, trackers))
        run = with_lateness(run, config)
        try:
            checkpoint = newest_checkpoint(run) if request.resume else None
            with reporter.progress() as show:
                progress = train(run, lambda now: show(standing(run, now)), stop.is_set, checkpoint)
            summary = write_results(folder, design, run, progress)
            trackers.close(progress.stopped_because)
            if progress.ending is not Ending.INTERRUPTED:
                run.gradients.forget_all()
        finally:
            run.gradients.ledger.close()  # so that this very process can resume
    page = write_page(folder.path) if hooks.write_page else None
    reporter.outcome(summary, folder.path, page)
    return Outcome(summary, run, progress, folder.path, stop.asked)


def also_tracked(on_row: OnRow, trackers: Trackers, prefix: str = "") -> OnRow:
    """Return a function that shows a row to the trackers, then to the caller's own."""

    def both(row: dict[str, Any]) -> None:
        trackers.write(row, prefix)
        on_row(row)

    return both


def newest_checkpoint(run: Run) -> Checkpoint | None:
    """Return the newest checkpoint that all processes of the run have complete."""
    assert run.checkpoints is not None
    previous, now = previous_processes(run.checkpoints.path), run.checkpoints.world_size
    if previous and now not in previous:
        number = max(previous)
        alone = "dpcsgp run --resume"
        command = alone if number == 1 else f"dpcsgp launch --resume --processes {number}"
        raise ConfigError(
            f"--resume: this run was made by {number} processes, not {now}; "
            f"continue it with `{command}`"
        )
    complete = run.checkpoints.complete_steps()
    return run.checkpoints.load_common(run.network.gather_values("whole checkpoints", complete))


def write_page(folder: Path) -> Path:
    """Write `report.html` of a results folder."""
    from dpcsgp.report import write_report  # brings matplotlib, which most processes do without

    return write_report([folder])
