"""`dpcsgp party check | status | dashboard`: is this party ready, and how is it doing?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dpcsgp.cli.options import AsJson
from dpcsgp.cli.party import Folder, RosterFile
from dpcsgp.cli.party_run import Data, Target, Whose
from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import strict_json


def check(
    roster_file: RosterFile,
    folder: Folder = None,
    data: Data = None,
    target: Target = None,
    unit: Whose = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to listen on; default: the card's address.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Limit for each answer of a peer.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Say for every peer, and for this machine, PASS or FAIL with the remedy.

    A peer answers while its `party run` is up. Nothing is spent. Exit code 1: something failed.

    Example:

    ```
    dpcsgp party check federation.toml --data data.npz
    ```
    """
    from dpcsgp.federation.cards import check_address
    from dpcsgp.federation.party_check import check_party
    from dpcsgp.federation.party_data import OwnExamples
    from dpcsgp.federation.party_folder import PartyFolder, find_folder
    from dpcsgp.federation.party_run import PartyRequest
    from dpcsgp.federation.roster import Roster

    request = PartyRequest(
        PartyFolder.open(find_folder(folder)),
        Roster.load(roster_file),
        OwnExamples(data, target or None, unit=unit),
        listen=check_address(listen) if listen is not None else None,
    )
    found = []
    for finding in check_party(request, seconds):
        found.append(finding)
        if not as_json:
            typer.echo(f"{finding.word:<5} {finding.subject}: {finding.detail}")
    passed = all(finding.passed is not False for finding in found)
    if as_json:
        typer.echo(strict_json({"passed": passed, "findings": [vars(each) for each in found]}))
    if not passed:
        raise typer.Exit(1)


def status(
    roster_file: Annotated[
        Path | None,
        typer.Argument(help="The roster; default: the one that began last.", metavar="[ROSTER]"),
    ] = None,
    folder: Folder = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show round, eps, bytes, peers and who is waited for: public facts, read from a file.

    Exit code 1: the party is not running, and its run has not ended as planned.

    Example:

    ```
    dpcsgp party status --watch
    ```
    """
    from rich.console import Console
    from rich.live import Live

    from dpcsgp.console.statuses import status_view
    from dpcsgp.federation.party_folder import PartyFolder, find_folder
    from dpcsgp.federation.run_pointers import latest_place
    from dpcsgp.federation.status_file import STATUS, read_status

    party = PartyFolder.open(find_folder(folder))
    path = latest_place(party, _fingerprint(roster_file)) / STATUS
    found = read_status(path)
    if as_json:
        typer.echo(strict_json(found))
    elif not watch:
        Console().print(status_view(found))
    else:
        with Live(status_view(found), console=Console()) as live:
            while found["running"]:
                time.sleep(1.0)
                found = read_status(path)
                live.update(status_view(found))
    if not found["running"] and found["phase"] != "ended":
        raise typer.Exit(1)


def _fingerprint(roster_file: Path | None) -> str | None:
    """Return the fingerprint of a roster; reading one brings torch."""
    if roster_file is None:
        return None
    from dpcsgp.federation.roster import Roster

    return Roster.load(roster_file).fingerprint


def dashboard(
    out: Annotated[Path, typer.Option(help="The new file.")] = Path("dpcsgp-dashboard.json"),
) -> None:
    """Write a Grafana dashboard for the metrics of `party run --page`.

    Example:

    ```
    dpcsgp party dashboard --out dashboard.json
    ```
    """
    from importlib.resources import files

    if out.exists():
        raise ConfigError(f"--out {out}: it exists already; choose another name")
    out.write_bytes(files("dpcsgp").joinpath("federation/page/dashboard.json").read_bytes())
    typer.echo(f"wrote {out}; in Grafana: Dashboards, New, Import")
