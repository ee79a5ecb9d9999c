"""`dpcsgp reproduce`: the paper's figures and ours, each by one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dpcsgp.reproduction.grid import Show


def reproduce(
    name: Annotated[
        str, typer.Argument(help="The experiment; `list` names them all, `all` runs them all.")
    ] = "list",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps or settings; the page says so.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(help="Seeds per setting; default 5, with --quick 1.", min=1)
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for tables and figures; runs go to OUT/runs.")
    ] = Path("results"),
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; default: one per core.", min=1)
    ] = None,
) -> None:
    """Run an experiment as a grid of runs and write tables, figures and a page.

    What is already done is skipped, so an interrupted command goes on where it stopped.

    Examples: claimed against verified eps, in seconds; a figure of the paper with few steps, in
    minutes; where collaboration pays; everything:

    ```
    dpcsgp reproduce privacy
    dpcsgp reproduce fig1 --quick
    dpcsgp reproduce skew --repeats 3
    dpcsgp reproduce all --repeats 5
    ```
    """
    import torch
    from rich.console import Console

    from dpcsgp.errors import ConfigError
    from dpcsgp.reproduction import EXPERIMENTS, Experiment

    # what is computed here is small, and two threads may fight for a busy machine
    torch.set_num_threads(1)
    console = Console()
    if name == "list":
        for key, experiment in EXPERIMENTS.items():
            summary = (experiment.__doc__ or "").splitlines()[0]
            console.print(f"{key:10} {summary}", highlight=False, soft_wrap=True)
        return
    names = list(EXPERIMENTS) if name == "all" else [name]
    if name != "all" and name not in EXPERIMENTS:
        raise ConfigError(f"NAME = {name!r}: expected one of {', '.join(EXPERIMENTS)}, all, list")
    for each in names:
        with _progress(console, each) as show:
            experiment = Experiment(
                each, out, repeats or (1 if quick else 5), quick, show, console.print, processes
            )
            files = EXPERIMENTS[each](experiment)
        for file in files:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)


@contextmanager
def _progress(console: Console, name: str) -> Iterator[Show]:
    """Show how many runs are done: a bar on a terminal, lines in a file."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    description = TextColumn("{task.description}")
    columns = (description, BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name)
            if not console.is_terminal:
                console.print(f"{name}: {done} of {total}  {text}", highlight=False, soft_wrap=True)

        yield show
