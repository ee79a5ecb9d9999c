"""Options that several commands share, worded once, and short options that stand for settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpcsgp.errors import ConfigError

ConfigFile = Annotated[
    Path | None, typer.Argument(help="TOML file; without it the defaults are used.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, may be repeated.", metavar="KEY=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Results folder; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the --out folder.")]
AllowDivergence = Annotated[
    bool, typer.Option("--allow-divergence", help="Run even if gossip is known to diverge.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print log lines: connected, saved, resumed ...")
]
LogFile = Annotated[
    Path | None,
    typer.Option("--log-file", help="Append log lines to this file: public facts only."),
]


RunOrFile = Annotated[
    Path | None,
    typer.Argument(
        help="TOML file, or the results folder of a run; without it the defaults are used.",
        metavar="[FILE | FOLDER]",
    ),
]


def settings_file(path: Path | None) -> Path | None:
    """Return the settings of a results folder, or the file itself.

    Raises:
        ConfigError: there is neither.
    """
    if path is None:
        return None
    way_out = "check the path; without one the defaults are used"
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such config file (TOML) or results folder; {way_out}"
        )
    if not path.is_dir():
        return path
    if not (path / "config.toml").exists():
        raise ConfigError(
            f"{path} is a folder without config.toml, so no results folder of a run; {way_out}"
        )
    return path / "config.toml"


def as_settings(shortcuts: dict[str, Any]) -> list[str]:
    """Turn the options that were given into `section.key=value`, as `--set` takes them."""
    # Only what was given: a default must not override the file.
    given = {key: value for key, value in shortcuts.items() if value is not None}
    return [f"{key}={_toml(value)}" for key, value in given.items()]


def _toml(value: Any) -> str:
    """Quote strings for TOML; one that reads as a number stays a number."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return json.dumps(value)
        return value
    return json.dumps(str(value)) if isinstance(value, Path) else str(value)
