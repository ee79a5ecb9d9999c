"""Options that `run` and `launch` share."""

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
Out = Annotated[Path | None, typer.Option(help="Results folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the --out folder.")]
AllowDivergence = Annotated[
    bool, typer.Option("--allow-divergence", help="Run even if gossip is known to diverge.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print log lines: connected, saved, resumed ...")
]
LogFile = Annotated[
    Path | None,
    typer.Option("--log-file", help="Append log lines to this file: public facts only."),
]
