"""`dpcsgp launch`: the same training with one real process per node (or group) on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcsgp.cli.ledger import ExpectHead, check_expected
from dpcsgp.cli.options import (
    AllowDivergence,
    AsJson,
    ConfigFile,
    LogFile,
    Out,
    Resume,
    Settings,
    Verbose,
)
from dpcsgp.records.metrics import strict_json


def launch(
    config_file: ConfigFile = None,
    settings: Settings = None,
    out: Out = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes; default: one per node.", min=1)
    ] = None,
    resume: Resume = False,
    expect_head: ExpectHead = None,
    allow_divergence: AllowDivergence = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Train with one real process per node, all on this machine; they talk over TCP.

    Examples:

    ```
    dpcsgp launch my.toml
    dpcsgp launch my.toml --processes 2 --out runs/two
    dpcsgp launch --resume --out runs/two
    ```

    For several machines, start this on each of them, with RANK = 0 on the one at ADDRESS and eth0
    the interface that reaches the others (docs/multi-machine.md has more):

    ```
    GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 3 --nproc-per-node 1 \\
        --node-rank RANK --master-addr ADDRESS --master-port 29500 \\
        -m dpcsgp run my.toml --set graph.num_nodes=3 \\
        --out runs/three
    ```
    """
    from rich.console import Console

    from dpcsgp.console.reporter import ConsoleReporter
    from dpcsgp.records.ending import Ending
    from dpcsgp.runtime.launch import launch_run
    from dpcsgp.runtime.logs import open_logs
    from dpcsgp.runtime.requests import BuiltinRequest

    open_logs(verbose, log_file)
    check_expected(out, resume, expect_head)
    request = BuiltinRequest(config_file, tuple(settings or ()), out, resume, allow_divergence)
    reporter = ConsoleReporter(Console(quiet=as_json))
    summary = launch_run(request, processes, reporter, log_file=log_file)
    if as_json:
        typer.echo(strict_json(summary))
    # The workers are gone: how it ended is known from their summary.
    ending = Ending.of(summary["stopped_because"])
    if ending is not None and ending.exit_code:
        raise typer.Exit(ending.exit_code)
