"""The `dpcsgp` command: mounts the commands and turns errors into one line and an exit code.

Commands import what they need when they are called, so that `--help` needs no torch.
"""

from __future__ import annotations

import sys

import typer

from dpcsgp.cli import (
    account,
    audit,
    benchmark,
    config,
    data,
    demo,
    doctor,
    federation,
    launch,
    ledger,
    party,
    party_run,
    party_watch,
    plan,
    report,
    reproduce,
    run,
)
from dpcsgp.errors import DpcsgpError
from dpcsgp.runtime.memory import keep_freed_memory

cli = typer.Typer(
    name="dpcsgp",
    help="Train one model among parties with private data: differential privacy, compressed "
    "messages, no server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
cli.command("run")(run.run)
cli.command("launch")(launch.launch)
cli.command("demo")(demo.demo)
cli.command("doctor")(doctor.doctor)
cli.command("plan")(plan.plan)
cli.command("account")(account.account)
cli.command("audit")(audit.audit)
cli.command("report")(report.report)
cli.command("benchmark")(benchmark.benchmark)
cli.command("reproduce")(reproduce.reproduce)
# Groups with commands of their own.
cli.add_typer(config.app, name="config")
cli.add_typer(ledger.app, name="ledger")
cli.add_typer(data.app, name="data")
party.app.command("check")(party_watch.check)
party.app.command("run")(party_run.run)
party.app.command("status")(party_watch.status)
party.app.command("dashboard")(party_watch.dashboard)
cli.add_typer(party.app, name="party")
cli.add_typer(federation.app, name="federation")


def app() -> None:
    """Run the command line; errors of ours become one line on stderr."""
    keep_freed_memory()
    try:
        cli()
    except DpcsgpError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red") + Text(str(error))
        )
        for note in getattr(error, "__notes__", ()):
            sys.stderr.write(f"{note}\n")
        sys.exit(error.exit_code)
    # A full or read-only disk, wherever it was met: nothing that was recorded is lost.
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sys.stderr.write(
            f"error: a file cannot be written or read{where}: {error.strerror or error}; free "
            "space or choose another "
            "--out folder. What was recorded before is intact: continue with --resume\n"
        )
        sys.exit(1)
