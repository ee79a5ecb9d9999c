"""`dpcsgp run`: train in one process, with a live line of progress and a closing table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpcsgp.cli.ledger import ExpectHead, check_expected

EXAMPLES = """
Examples:

    dpcsgp run                                                   # the demo's settings
    dpcsgp run my.toml --set privacy.epsilon=1 --out runs/first
    dpcsgp run --set task.name=digits --set graph.num_nodes=4    # needs no download
    dpcsgp run --resume --out runs/first                         # after Ctrl-C or a crash
    dpcsgp run --tensorboard --out runs/first                    # then: tensorboard --logdir runs/first
"""


def run(
    config_file: Annotated[
        Path | None, typer.Argument(help="TOML file; without it the defaults are used.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder; default: a new one under runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the --out folder.")
    ] = False,
    expect_head: ExpectHead = None,
    allow_divergence: Annotated[
        bool, typer.Option("--allow-divergence", help="Run even if gossip is known to diverge.")
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Also write TensorBoard events into the results folder."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")
    ] = False,
) -> None:
    """Train privately over a graph of nodes, all simulated in this process.

    Started by torchrun, it trains this process's share of the nodes (see `dpcsgp launch --help`).
    """
    from dpcsgp.console.session import run_session
    from dpcsgp.network.torch_distributed import ProcessEnvironment

    check_expected(out, resume, expect_head)
    place = ProcessEnvironment.from_environment()
    if place is None:
        summary = run_session(
            config_file, settings or [], out, resume, allow_divergence, as_json, tensorboard
        )
    else:
        from dpcsgp.runtime.process import worker_command

        summary = worker_command(place, config_file, settings or [], out, resume, allow_divergence)
    if as_json and (place is None or place.rank == 0):
        typer.echo(json.dumps(summary))
    if str(summary["stopped_because"]).startswith(("diverged", "interrupted")):
        raise typer.Exit(1 if str(summary["stopped_because"]).startswith("diverged") else 130)


run.__doc__ = (run.__doc__ or "") + "\n" + EXAMPLES
