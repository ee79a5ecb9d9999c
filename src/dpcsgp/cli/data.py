"""`dpcsgp data`: list the data sets and fetch them into the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from dpcsgp.tasks.downloads.datasets import DatasetStatus
    from dpcsgp.tasks.downloads.sources import Progress

app = typer.Typer(no_args_is_help=True, help="List and fetch data sets.", rich_markup_mode=None)


@app.command("list")
def list_datasets(
    as_json: AsJson = False,
) -> None:
    """List the data sets, and whether they are in the cache and undamaged.

    Example:

    ```
    dpcsgp data list
    ```
    """
    from dpcsgp.tasks.downloads.datasets import cache_folder, dataset_status

    statuses = dataset_status()
    if as_json:
        rows = [
            asdict(status) | {"path": str(status.path) if status.path else None}
            for status in statuses
        ]
        typer.echo(json.dumps({"cache": str(cache_folder()), "datasets": rows}, indent=2))
        return
    _print_table(statuses)
    typer.echo(f"cache folder: {cache_folder()}")


@app.command("fetch")
def fetch_datasets(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Fetch every data set.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch again even if the cached copy is good.")
    ] = False,
) -> None:
    """Fetch data sets into the cache and verify their checksums; good copies are left alone.

    Example:

    ```
    dpcsgp data fetch mnist fashion_mnist
    ```
    """
    from rich.console import Console

    from dpcsgp.errors import ConfigError, DataError
    from dpcsgp.tasks.downloads.datasets import DATASET_NAMES, fetch_dataset

    # Each once, in the order given.
    wanted = list(DATASET_NAMES) if every else list(dict.fromkeys(names or []))
    if not wanted:
        raise ConfigError(f"name a data set ({', '.join(DATASET_NAMES)}) or give --all")
    console = Console(stderr=True)  # the paths go to stdout
    failures = []
    for name in wanted:
        try:
            with _progress_bar(console) as progress:
                path = fetch_dataset(name, progress=progress, force=force)
        except DataError as error:  # go on: the other data sets may be reachable
            failures.append(str(error))
        else:
            typer.echo(f"{name}: {path or 'comes with scikit-learn, nothing to fetch'}")
    if failures:
        raise DataError("\n".join(failures))


def _print_table(statuses: list[DatasetStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what", "state", "train", "test", "MB", box=None, pad_edge=False)
    for status in statuses:
        megabytes = f"{status.num_bytes / 1e6:.0f}" if status.num_bytes else ""
        sizes = (f"{status.num_train:,}", f"{status.num_test:,}", megabytes)
        table.add_row(status.name, status.title, status.state, *sizes)
    Console().print(table)


@contextmanager
def _progress_bar(console: Console) -> Iterator[Progress]:
    """Show one line that says what is going on, with a bar where the amount is known."""
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking", total=None)

        def update(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update
