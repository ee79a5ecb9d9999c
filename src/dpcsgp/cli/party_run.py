"""`dpcsgp party run`: one party takes part; the same line again goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcsgp.cli.options import AsJson, LogFile, Verbose
from dpcsgp.cli.party import Folder, RosterFile
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.console.parties import PartyReporter
    from dpcsgp.federation.party_run import PartyRequest

Data = Annotated[
    str | None,
    typer.Option(help="Own examples: .npz (x, y), .csv, .parquet or module:function."),
]
Target = Annotated[str | None, typer.Option(help="Column with the targets; default: the last one.")]


def run(
    roster_file: RosterFile,
    folder: Folder = None,
    data: Data = None,
    target: Target = None,
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
    verbose: Verbose = False,
    log_file: LogFile = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a federation. After Ctrl-C, a crash or a reboot the same line goes on.

    Exit code 130: stopped, to be continued. 2: refused, nothing was spent. 1: failed.

    Example: dpcsgp party run federation.toml --data data.npz
    """
    from rich.console import Console

    from dpcsgp.console.parties import PartyReporter
    from dpcsgp.federation.cards import check_address
    from dpcsgp.federation.party_data import OwnExamples
    from dpcsgp.federation.party_folder import PartyFolder, find_folder
    from dpcsgp.federation.party_run import PartyRequest
    from dpcsgp.federation.roster import Roster
    from dpcsgp.runtime.logs import open_logs

    open_logs(verbose, log_file)
    request = PartyRequest(
        PartyFolder.open(find_folder(folder)),
        Roster.load(roster_file),
        OwnExamples(data, target, test_data),
        out,
        check_address(listen) if listen is not None else None,
        device,
        seed,
        patience,
    )
    summary, code = _taken_part(request, PartyReporter(Console(quiet=as_json)))
    if as_json:
        typer.echo(strict_json(summary))
    if code:
        raise typer.Exit(code)


def _taken_part(request: PartyRequest, reporter: PartyReporter) -> tuple[dict[str, Any], int]:
    """Run a party, or show how it ended; return the summary and the exit code."""
    from dpcsgp.federation.party_run import prepare_party, results_folder, run_party
    from dpcsgp.federation.run_place import finished_summary
    from dpcsgp.runtime.session import Hooks

    hooks = Hooks(reporter=reporter, write_page=True)
    # Refused before a folder is made; then the run goes on where an earlier start left it.
    prepared, results = prepare_party(request, hooks), results_folder(request)
    if summary := finished_summary(results):
        reporter.outcome(summary, results.path, None)
        return summary, 0
    try:
        outcome = run_party(prepared, results, hooks)
    except KeyboardInterrupt:
        typer.echo("stopped at once; the same line goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None
    return outcome.summary, outcome.progress.ending.exit_code
