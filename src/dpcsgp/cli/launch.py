"""`dpcsgp launch`: the same training with one real process per node (or per group of nodes) on this
machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpcsgp.cli.ledger import ExpectHead, check_expected


def launch(
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
    processes: Annotated[
        int | None, typer.Option(help="Number of processes; default: one per node.", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the --out folder.")
    ] = False,
    expect_head: ExpectHead = None,
    allow_divergence: Annotated[
        bool, typer.Option("--allow-divergence", help="Run even if gossip is known to diverge.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")
    ] = False,
) -> None:
    """Train with one real process per node, all on this machine; they talk over TCP.

    Examples:

        dpcsgp launch configs/demo.toml
        dpcsgp launch configs/demo.toml --processes 2 --out runs/two
        dpcsgp launch --resume --out runs/two

    For several machines, start this line on each of them, with RANK = 0 on the one at ADDRESS and
    eth0 the interface that reaches the others (docs/multi-machine.md has more):

        GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 3 --nproc-per-node 1 --node-rank RANK
        --master-addr ADDRESS \\
            --master-port 29500 -m dpcsgp run configs/demo.toml --set graph.num_nodes=3 --out
            runs/three
    """
    from dpcsgp.runtime.launch import launch_session

    check_expected(out, resume, expect_head)
    summary = launch_session(
        config_file, settings or [], out, processes, resume, allow_divergence, quiet=as_json
    )
    if as_json:
        typer.echo(json.dumps(summary))
    reason = str(summary["stopped_because"])
    if reason.startswith(("diverged", "interrupted")):
        raise typer.Exit(1 if reason.startswith("diverged") else 130)
