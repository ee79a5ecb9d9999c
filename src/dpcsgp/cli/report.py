"""`dpcsgp report`: one page with figures from one or many results folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Results folders that `dpcsgp run` wrote.", metavar="DIR..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; default: report.html in the folder, or here if several are given.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page's path as JSON and nothing else.")
    ] = False,
) -> None:
    """Make one self-contained page: headline numbers, figures, warnings, settings, accounts.

    Examples: the page of one run, in its folder; two runs side by side:

    ```
    dpcsgp report runs/first
    dpcsgp report runs/first runs/alone --out both.html
    ```
    """
    from dpcsgp.report import write_report

    path = write_report(folders, out)
    typer.echo(
        json.dumps({"report": str(path), "folders": [str(folder) for folder in folders]})
        if as_json
        else str(path)
    )
