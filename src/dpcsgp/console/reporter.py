"""A run at the terminal: tables, download bars and one live line of progress."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dpcsgp.console.tables import outcome_table, plan_table
from dpcsgp.runs.data import Downloads
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.wording import Standing
from dpcsgp.runtime.reporting import ShowStanding, every_tenth


@final
class ConsoleReporter:
    """Shows a run on a console; without a terminal about ten plain lines of progress in all."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def downloads(self) -> Iterator[Downloads]:
        """Show a bar while data are fetched; yields a callback (text, done, total)."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        bars = Progress(*columns, console=self.console, transient=True)
        tasks: dict[str, Any] = {}

        def callback(text: str, done: int, total: int | None) -> None:
            if text not in tasks:
                tasks[text] = bars.add_task(text, total=total)
            bars.update(tasks[text], completed=done, total=total)

        with bars:
            yield callback

    def plan(self, design: RunDesign) -> None:
        """Print a table of what is about to happen."""
        self.console.print(plan_table(design))

    @contextmanager
    def progress(self) -> Iterator[ShowStanding]:
        """Show one live line: step, score, eps spent, MB per edge, time left."""
        if not self.console.is_terminal:
            yield every_tenth(self._line)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("starting", total=None)

            def show(standing: Standing) -> None:
                bar.update(
                    task,
                    completed=standing.done,
                    total=standing.total,
                    description=str(standing),
                )

            yield show

    def _line(self, standing: Standing) -> None:
        self._print(str(standing))
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Print one sentence."""
        self.console.print(Text(text, style="yellow"))

    def outcome(self, summary: Mapping[str, Any], folder: Path, page: Path | None) -> None:
        """Print the closing table, and where results and page are."""
        self.console.print(outcome_table(summary))
        if summary.get("processes", 1) > 1 and summary.get("seconds_per_step"):
            self._print(_pace(summary))
        self._print(f"results: {folder}" + (f"    page: {page}" if page else ""))

    def _print(self, text: str) -> None:
        self.console.print(Text(text), highlight=False, soft_wrap=True)


def _pace(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['seconds_per_step']:.3f} s per step with {summary['processes']} processes, "
        f"evaluations included; {summary['bytes_between_processes'] / 1e6:.3f} MB of frames "
        "between them"
    )
