"""`dpcsgp config new`: a settings file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcsgp.cli.options import Settings
from dpcsgp.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Write settings files.", rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Write settings files."""


@app.command("new")
def new(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("my.toml"),
    settings: Settings = None,
) -> None:
    """Write a TOML file with every setting, its default and a line that explains it.

    Example:

    ```
    dpcsgp config new my.toml --set task.name=digits
    ```
    """
    from dpcsgp.config import load_config
    from dpcsgp.records.files import write_atomically
    from dpcsgp.runs.starting_config import commented_toml

    text = commented_toml(load_config(None, settings or ()))
    if file.exists():
        raise ConfigError(f"{file} exists already; name another file")
    write_atomically(file, text.encode())
    typer.echo(f"{file}: train with `dpcsgp run {file}`, or `dpcsgp launch {file}`")
