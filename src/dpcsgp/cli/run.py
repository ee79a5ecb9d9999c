"""`dpcsgp run`: train in one process, with a live line of progress and a closing table."""

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


def run(
    config_file: ConfigFile = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    expect_head: ExpectHead = None,
    allow_divergence: AllowDivergence = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help='Write TensorBoard events too; others: --set run.trackers=["mlflow"].',
        ),
    ] = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Train privately over a graph of nodes, all simulated in this process.

    Started by torchrun, it trains this process's share of the nodes (see `dpcsgp launch --help`).

    Examples:

    ```
    dpcsgp run                                   # the demo's settings
    dpcsgp run my.toml --set privacy.epsilon=1 --out runs/first
    dpcsgp run --set task.name=digits            # needs no download
    dpcsgp run --resume --out runs/first         # after Ctrl-C or a crash
    dpcsgp run --tensorboard --out runs/second
    tensorboard --logdir runs/second
    ```
    """
    from rich.console import Console

    from dpcsgp.console.reporter import ConsoleReporter
    from dpcsgp.network.torch_distributed import ProcessEnvironment
    from dpcsgp.runtime.logs import open_logs
    from dpcsgp.runtime.process import run_process_or_end
    from dpcsgp.runtime.requests import BuiltinRequest
    from dpcsgp.runtime.session import Hooks, run_simulated

    open_logs(verbose, log_file)
    check_expected(out, resume, expect_head)
    request = BuiltinRequest(config_file, tuple(settings or ()), out, resume, allow_divergence)
    hooks = Hooks(
        reporter=ConsoleReporter(Console(quiet=as_json)),
        trackers=("tensorboard",) if tensorboard else (),
        write_page=True,
    )
    # Started by torchrun, this process is one of several.
    environment = ProcessEnvironment.from_environment()
    if environment is None:
        outcome = run_simulated(request, hooks)
    else:
        outcome = run_process_or_end(request, environment, hooks)
    if as_json and (environment is None or environment.rank == 0):
        typer.echo(strict_json(outcome.summary))
    if code := outcome.progress.ending.exit_code:
        raise typer.Exit(code)
