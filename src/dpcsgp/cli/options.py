"""Options that several commands share, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Argument(help="TOML file; without it the defaults are used.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, may be repeated.", metavar="KEY=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
