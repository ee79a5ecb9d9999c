"""Many independent runs, each in its own results folder, on all cores; finished ones are skipped.

A run's folder is named after its settings, so experiments that need the same run share it, and a
changed setting is a new run. Runs of a grid are seeded: they can be repeated bit for bit, and are
therefore stamped `private: false`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

from dpcsgp.config import Config, load_config
from dpcsgp.errors import DpcsgpError
from dpcsgp.records.ending import Ending
from dpcsgp.records.metrics import read_rows

# (what has just ended, how many are done, how many there are)
Show = Callable[[str, int, int], None]


class GridInterruptedError(DpcsgpError):
    """Ctrl-C: what was done stays, the same command goes on from there."""

    exit_code = 130


@final
@dataclass(frozen=True)
class Cell:
    """One run of a grid: settings, and the tags under which it appears in tables and figures."""

    settings: tuple[str, ...]
    tags: Mapping[str, Any] = field(default_factory=dict)
    allow_divergence: bool = False

    @cached_property
    def config(self) -> Config:
        """The validated settings."""
        return load_config(None, self.settings)

    def folder(self, root: Path) -> Path:
        """Return where this run lives: readable, and one per setting."""
        config = self.config
        method, spec = config.algorithm.name, config.compression.spec
        words = "-".join((config.task.name, method, spec, str(config.privacy.seed)))
        readable = re.sub("[^a-z0-9.]+", "-", words)
        return root / "runs" / f"{readable}-{config.fingerprint()[:12]}"


@final
@dataclass(frozen=True)
class Done:
    """A finished run: its tags, summary and rows."""

    tags: Mapping[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    folder: Path


def run_grid(
    cells: Sequence[Cell], root: Path, show: Show, processes: int | None = None
) -> list[Done]:
    """Run what is not done yet and return all, in the order of the cells."""
    # cells with the same settings share a folder and are run once
    waiting = {cell.folder(root): cell for cell in cells if not is_done(cell.folder(root))}
    total = len({cell.folder(root) for cell in cells})
    done = total - len(waiting)
    if waiting:
        show("", done, total)
        processes = min(processes or os.cpu_count() or 1, len(waiting))
        threads = max(1, (os.cpu_count() or 1) // processes)
        # Fresh processes: forked ones would inherit torch's threads in an unknown state.
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), _prepare, (os.getpid(), threads)
        )
        try:
            futures = {
                pool.submit(run_cell, cell, folder): folder for folder, cell in waiting.items()
            }
            failures: list[DpcsgpError] = []
            for future in as_completed(futures):
                try:
                    done += _collect(future, futures[future])
                except DpcsgpError as error:  # the other runs go on
                    failures.append(error)
                show(futures[future].name, done, total)
            if failures:
                raise failures[0]
        except KeyboardInterrupt:  # the runs under way have written a checkpoint
            raise GridInterruptedError(
                f"interrupted: {done} of {total} runs are done; the same command continues"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [read_done(cell, root) for cell in cells]


def is_done(folder: Path) -> bool:
    """Say whether a run has ended in its own right (completed, budget spent, or diverged)."""
    try:
        ending = json.loads((folder / "summary.json").read_text())["stopped_because"]
    except (OSError, ValueError, KeyError):
        return False
    return Ending.of(ending) is not Ending.INTERRUPTED


def read_done(cell: Cell, root: Path) -> Done:
    """Read a finished run back."""
    folder = cell.folder(root)
    summary = json.loads((folder / "summary.json").read_text())
    return Done(cell.tags, summary, read_rows(folder / "metrics.jsonl"), folder)


def run_cell(cell: Cell, path: Path) -> bool:
    """Run or continue one cell in this process; return whether it ended in its own right."""
    from dpcsgp.runs.design import design_run
    from dpcsgp.runtime.requests import PreparedRequest
    from dpcsgp.runtime.session import Hooks, run_simulated
    from dpcsgp.runtime.signals import StopSignal

    config, resume = cell.config, (path / "config.toml").exists()
    # Ctrl-C reaches all processes: each ends its step and writes a checkpoint.
    with StopSignal() as stop:
        data = _data(config)
        design = design_run(config, data.facts, cell.allow_divergence or resume)
        run_simulated(PreparedRequest(design, data, path, resume), Hooks(should_stop=stop.is_set))
    if not is_done(path):
        return False
    shutil.rmtree(path / "checkpoint", ignore_errors=True)  # a grid of finished runs needs none
    return True


def _prepare(parent: int, num_threads: int) -> None:
    """Make a process of the grid ready: it dies with its parent, and takes its share of cores."""
    import signal

    import torch

    from dpcsgp.runtime.memory import keep_freed_memory
    from dpcsgp.runtime.workers import die_with

    die_with(parent)
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # while a run is under way, `StopSignal` listens


@lru_cache(maxsize=2)
def _data_of(key: str, config_json: str) -> Any:
    """Load the data; configurations as text, because only hashable arguments can be cached."""
    from dpcsgp.runs.data import load_builtin_data

    return load_builtin_data(Config.model_validate_json(config_json))


def _data(config: Config) -> Any:
    """Load data once per process for all runs that deal the same examples to the same nodes."""
    # everything that loading looks at must be part of the key: seed, test set, central or not
    relevant = config.model_copy(
        update={"privacy": Config().privacy, "compression": Config().compression}
    )
    key = json.dumps(
        [
            config.task.model_dump(exclude={"model"}),
            config.graph.num_nodes,
            config.run.seed,
            config.run.test_examples,
            config.method.one_place,
        ]
    )
    return _data_of(key, relevant.model_dump_json())


def _collect(future: Future[bool], folder: Path) -> int:
    """Return 1 for a run that ended; errors name its folder."""
    try:
        ended = future.result()
    except DpcsgpError as error:
        raise type(error)(f"{folder}: {error}") from None
    if not ended:
        raise KeyboardInterrupt
    return 1
