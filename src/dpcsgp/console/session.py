"""One training session at the terminal: prepare, watch, stop cleanly, write the results folder,
show the outcome."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dpcsgp import training
from dpcsgp.compression import parse_compressor
from dpcsgp.config import Config, load_config
from dpcsgp.console.tables import outcome_table, plan_table
from dpcsgp.errors import ConfigError
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.records.tensorboard import tensorboard_log
from dpcsgp.runs.build import load_builtin_data
from dpcsgp.runs.design import build_topology, design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runtime.session import run_simulated
from dpcsgp.runtime.signals import StopSignal


def run_session(
    config_file: Path | None,
    settings: Sequence[str],
    out: Path | None,
    resume: bool,
    allow_divergence: bool,
    quiet: bool = False,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Train in the simulator and return the summary."""
    from dpcsgp.report import write_report  # brings matplotlib, which worker processes do without

    console = Console(quiet=quiet)
    config = open_config(config_file, settings, out, resume)
    check_quickly(config, out, resume)
    with downloads(console) as progress:
        data = load_builtin_data(config, progress)
    design = design_run(config, data.facts, allow_divergence or resume)
    console.print(plan_table(design))
    folder = (
        ResultsFolder.reopen(out)[0]
        if out and resume
        else ResultsFolder.create(out or new_folder(config), config)
    )
    on_row = tensorboard_log(folder.path) if tensorboard else lambda row: None
    with StopSignal(console.print) as stop:
        outcome = run_simulated(
            design, data, folder,
            resume=resume, watching=partial(watching, console), should_stop=stop.is_set, on_row=on_row,
        )  # fmt: skip
    summary = outcome.summary
    page = write_report([folder.path])
    console.print(outcome_table(summary))
    console.print(f"results: {folder.path}    page: {page}", highlight=False, soft_wrap=True)
    return summary


def open_config(
    config_file: Path | None, settings: Sequence[str], out: Path | None, resume: bool
) -> Config:
    """Return the settings: of the results folder when resuming, else of the file and --set."""
    if not resume:
        return load_config(config_file, settings)
    if out is None:
        raise ConfigError("--resume needs --out FOLDER: the results folder of the run to continue")
    if config_file is not None or settings:
        raise ConfigError(
            "--resume takes its settings from the results folder; leave out the config file and "
            "--set"
        )
    config = ResultsFolder.reopen(out)[1]
    refuse_changed_settings(out, config)
    return config


def refuse_changed_settings(out: Path, config: Config) -> None:
    """Refuse to go on under other settings than those the ledgers were started with."""
    started = {read_ledger(file).header.config for file in (out / "ledger").glob("node-*.jsonl")}
    # Machines of one run may differ in a few local settings, and the folder holds rank 0's: one
    # match is enough.
    if started and config.fingerprint() not in started:
        raise ConfigError(
            f"--resume: {out / 'config.toml'} is not what this run was started with; restore it, "
            "or start a new run in "
            "another --out folder (both ledgers then count: `dpcsgp account FIRST SECOND`)"
        )


def check_quickly(config: Config, out: Path | None, resume: bool) -> None:
    """Refuse what can be refused before data are fetched."""
    build_topology(config)
    parse_compressor(config.compression.spec)
    if config.algorithm.polish_compression:
        parse_compressor(config.algorithm.polish_compression)
    if out is not None and not resume and (out / "config.toml").exists():
        raise ConfigError(
            f"--out {out} already holds a run; continue it with --resume, or name another folder"
        )


def new_folder(config: Config) -> Path:
    """Return a fresh name under runs/."""
    method = config.algorithm.name.replace(":", "-")  # of a method of the user's own
    name = f"{config.task.name}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    suffixes = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))
    folders = (Path("runs") / f"{name}{suffix}" for suffix in suffixes)
    return next(folder for folder in folders if not folder.exists())


@contextmanager
def downloads(console: Console) -> Iterator[Any]:
    """Show a bar while data are fetched; yields a callback (text, done, total)."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def callback(text: str, done: int, total: int | None) -> None:
        if text not in tasks:
            tasks[text] = bars.add_task(text, total=total)
        bars.update(tasks[text], completed=done, total=total)

    with bars:
        yield callback


@contextmanager
def watching(console: Console, run: training.Run) -> Iterator[training.Watcher]:
    """Show one live line (step, accuracy, eps spent, MB per edge, time left); plain lines where
    there is no terminal."""
    total = run.schedule.steps + run.schedule.polish_rounds
    if not console.is_terminal:
        yield lambda progress: _plain_line(console, run, progress)
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=total)

        def watch(progress: training.Progress) -> None:
            done = progress.state.step + progress.rounds_polished
            bar.update(task, completed=done, description=_describe(run, progress))

        yield watch


def _describe(run: training.Run, progress: training.Progress) -> str:
    row = run.recorder.rows[-1]
    accuracy = next(
        (f"{100 * row[key]:.1f} %" for key in ("accuracy_node_mean",) if key in row), "-"
    )
    polish = f" + polish {progress.rounds_polished}" if progress.rounds_polished else ""
    return (
        f"step {progress.state.step}/{run.schedule.steps}{polish}  accuracy {accuracy}  "
        f"eps {max(run.epsilon_spent()):.3f}  {run.network.traffic.bytes_per_edge / 1e6:.3f} "
        "MB/edge"
    )


def _plain_line(console: Console, run: training.Run, progress: training.Progress) -> None:
    every = max(run.schedule.steps // 10, 1)
    done, polished = progress.state.step + progress.rounds_polished, progress.rounds_polished
    if done == run.schedule.steps + run.schedule.polish_rounds or (
        not polished and done % every == 0
    ):
        console.print(_describe(run, progress), highlight=False, soft_wrap=True)
        sys.stdout.flush()
