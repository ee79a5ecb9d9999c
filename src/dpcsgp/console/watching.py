"""One progress line for a run of many processes: each tells the store where it stands, one of them
shows the slowest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dpcsgp import training
from dpcsgp.config import Config
from dpcsgp.network.agreed import whole
from dpcsgp.network.board import Board

PAUSE_SECONDS = 0.5


class Publisher:
    """Tells the store where this process stands, at most twice a second."""

    def __init__(self, board: Board, run: training.Run) -> None:
        self._board, self._run = board, run
        self._next = 0.0

    def __call__(self, progress: training.Progress) -> bool:
        """Publish after a step, unless it is too soon; say whether it was done."""
        schedule = self._run.schedule
        last = (
            progress.state.step == schedule.steps
            and progress.rounds_polished == schedule.polish_rounds
        )
        if time.monotonic() < self._next and not last:
            return False
        self._next = time.monotonic() + PAUSE_SECONDS
        facts = {
            "step": progress.state.step,
            "polished": progress.rounds_polished,
            "accuracy": self._run.recorder.rows[-1].get("accuracy_nodes"),
            "epsilon": max(self._run.epsilon_spent()),
            "bytes_per_edge": self._run.network.traffic.bytes_per_edge,
        }
        self._board.put(f"progress/{self._board.rank}", facts)
        return True


@contextmanager
def progress_line(
    console: Console, config: Config, board: Board, world_size: int
) -> Iterator[Callable[[], None]]:
    """Yield a function that brings the line up to date; without a terminal it prints about ten
    lines in all."""
    total = config.algorithm.steps + config.algorithm.polish_rounds
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    printed = -1
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting processes", total=total)

        def show() -> None:
            nonlocal printed
            found = _everybody(board, world_size)
            if found is None:
                return
            done, text = _describe(found, config)
            bar.update(task, completed=done, description=text)
            tenth = 10 * done // total
            if not console.is_terminal and tenth > printed:
                printed = tenth
                console.print(text, highlight=False, soft_wrap=True)
                sys.stdout.flush()

        yield show


def _everybody(board: Board, world_size: int) -> list[dict[str, Any]] | None:
    """Return where every process stands; None before all have made a step (or if somebody else
    wrote in its place)."""
    notes = [board.peek(f"progress/{rank}", rank, _fault) for rank in range(world_size)]
    facts = [note.value for note in notes if note]
    return facts if len(facts) == world_size else None


def _fault(value: Any) -> str | None:
    """Say what was expected in the place of a process's progress."""
    right = (
        isinstance(value, dict)
        and whole(value.get("step"))
        and whole(value.get("polished"))
        and isinstance(value.get("accuracy"), list | None)
        and all(isinstance(accuracy, float | int) for accuracy in value["accuracy"] or [])
        and isinstance(value.get("epsilon"), float | int)
        and isinstance(value.get("bytes_per_edge"), float | int)
    )
    return None if right else "step, polished, accuracy, epsilon and bytes per edge"


def _describe(facts: list[dict[str, Any]], config: Config) -> tuple[int, str]:
    slowest = min(facts, key=lambda fact: fact["step"] + fact["polished"])
    accuracies = [value for fact in facts for value in fact["accuracy"] or []]
    accuracy = f"{100 * sum(accuracies) / len(accuracies):.1f} %" if accuracies else "-"
    polish = f" + polish {slowest['polished']}" if slowest["polished"] else ""
    text = (
        f"step {slowest['step']}/{config.algorithm.steps}{polish}  accuracy {accuracy}  "
        f"eps {max(fact['epsilon'] for fact in facts):.3f}  "
        f"{slowest['bytes_per_edge'] / 1e6:.3f} MB/edge"
    )
    return slowest["step"] + slowest["polished"], text
