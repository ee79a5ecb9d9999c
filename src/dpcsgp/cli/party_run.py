"""`dpcsgp party run`: one party takes part; the same line again goes on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcsgp.cli.exit_codes import ExitCode, code_of_ending
from dpcsgp.cli.options import AsJson, LogFile, Verbose
from dpcsgp.cli.party import Folder, RosterFile
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.console.parties import PartyReporter
    from dpcsgp.federation.party_run import PartyRequest
    from dpcsgp.federation.status_page import PageAddress

_LOG_BYTES = 5_000_000  # a party may run for weeks

Data = Annotated[
    str | None,
    typer.Option(help="Own examples: .npz (x, y), .csv, .parquet or module:function."),
]


class Tracker(StrEnum):
    """Where evaluations can be shown."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


Target = Annotated[
    list[str] | None,
    typer.Option(
        help="Column with the targets; default: the last one. Once for each number of a target."
    ),
]
Whose = Annotated[
    str | None,
    typer.Option(
        "--unit",
        help="Column (.npz: array) that says whose a row is, where a roster promises privacy to "
        "persons.",
    ),
]


def run(
    roster_file: RosterFile,
    folder: Folder = None,
    data: Data = None,
    target: Target = None,
    unit: Whose = None,
    test_data: Annotated[
        str | None, typer.Option(help="Public examples to measure the model on; same forms.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder; default: in the party's folder.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to listen on; default: the card's address.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where gradients are computed.")] = "cpu",
    seed: Annotated[
        int | None,
        typer.Option(help="For experiments: fixed private noise. The run is then not private."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of silence of a peer after which to give up; 0: never. Default: "
            "network.patience of the roster.",
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            help="Show a page and /metrics at this address of this machine; 0: any free port.",
            metavar="[HOST:]PORT",
        ),
    ] = None,
    page_anyone: Annotated[
        bool,
        typer.Option(
            "--page-anyone", help="Let --page be an address that others reach: it has no log-in."
        ),
    ] = False,
    tracker: Annotated[
        list[Tracker] | None,
        typer.Option(help="Show this party's evaluations there too; may be given twice."),
    ] = None,
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a federation. After Ctrl-C, a crash or a reboot the same line goes on.

    Exit code 0: done, and every receiver has every message. 130: stopped, to be continued. 2:
    refused, nothing was spent. Others: docs/exit-codes.md.

    Example:

    ```
    dpcsgp party run federation.toml --data data.npz --page 8080
    ```
    """
    from rich.console import Console

    from dpcsgp.console.parties import PartyReporter
    from dpcsgp.federation.cards import check_address
    from dpcsgp.federation.party_data import OwnExamples
    from dpcsgp.federation.party_folder import PartyFolder, find_folder
    from dpcsgp.federation.party_request import PartyRequest
    from dpcsgp.federation.roster import Roster
    from dpcsgp.runtime.logs import open_logs

    open_logs(verbose, log_file, most_bytes=_LOG_BYTES)
    request = PartyRequest(
        PartyFolder.open(find_folder(folder)),
        Roster.load(roster_file),
        OwnExamples(data, target or None, test_data, unit=unit),
        out,
        check_address(listen) if listen is not None else None,
        device,
        seed,
        patience,
        page=_page_address(page, page_anyone),
        trackers=tuple(each.value for each in tracker or ()),
    )
    summary, code = _taken_part(request, PartyReporter(Console(quiet=as_json)))
    if as_json:
        typer.echo(strict_json(summary))
    if code is not ExitCode.DONE:
        typer.echo(code.hint, err=True)
        raise typer.Exit(code)


def _page_address(page: str | None, anyone: bool) -> PageAddress | None:
    """Read --page; warn where others can look."""
    from dpcsgp.federation.status_page import PageAddress

    if page is None:
        return None
    address = PageAddress.parse(page, anyone)
    if not address.is_local:
        typer.echo(
            f"warning: whoever reaches {address.host} can look at the page, without a log-in or "
            "TLS; it shows public facts only, and cannot change anything",
            err=True,
        )
    return address


def _taken_part(request: PartyRequest, reporter: PartyReporter) -> tuple[dict[str, Any], ExitCode]:
    """Run a party, or show how it ended; return the summary and the exit code."""
    from dpcsgp.federation.party_request import as_leaver
    from dpcsgp.federation.party_run import prepare_party, results_folder, run_party
    from dpcsgp.federation.run_place import finished_summary
    from dpcsgp.runtime.session import Hooks

    hooks = Hooks(reporter=reporter, write_page=True)
    # Refused before a folder is made; then the run goes on where an earlier start left it.
    request = as_leaver(request)
    prepared, results = prepare_party(request, hooks), results_folder(request)
    if summary := finished_summary(results, request.roster):
        reporter.outcome(summary, results.path, None)
        return summary, ExitCode.DONE
    try:
        outcome = run_party(prepared, results, hooks)
    except KeyboardInterrupt:
        typer.echo("stopped at once; the same line goes on from the last checkpoint", err=True)
        raise typer.Exit(ExitCode.STOPPED) from None
    return outcome.summary, code_of_ending(outcome.progress.ending, outcome.summary["handed_over"])
