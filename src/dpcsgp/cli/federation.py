"""`dpcsgp federation columns | new | show | amend | demo`: rosters from a plan and cards."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.exit_codes import CodedGroup
from dpcsgp.cli.options import AsJson
from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.federation.roster import Roster

app = typer.Typer(
    cls=CodedGroup,
    no_args_is_help=True,
    help="Make and read the roster of a federation.",
    rich_markup_mode=None,
)


@app.command("columns")
def columns(
    file: Annotated[Path, typer.Argument(help="A table with a line of names.", metavar="FILE.csv")],
    target: Annotated[
        list[str] | None, typer.Option(help="Column with the targets; default: the last one.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Column that says whose a row is: no input.")
    ] = None,
) -> None:
    """Write the lines of [data] that name the columns; only the line of names is read.

    Example:

    ```
    dpcsgp federation columns data.csv --target label
    ```
    """
    from dpcsgp.federation.data_shape import column_lines
    from dpcsgp.runs.table_columns import Places, TableForm, read_header

    names, wanted = read_header(file), tuple(target or ())
    shape = (len(wanted),) if len(wanted) > 1 else None
    found = Places.of(names, len(names), TableForm(wanted, unit, target_shape=shape), file)
    lines = column_lines(found.input_names or (), found.target_names or ())
    typer.echo("\n".join(lines))


@app.command("new")
def new(
    plan_file: Annotated[Path, typer.Argument(help="Settings, as for `run`.", metavar="PLAN.toml")],
    card_files: Annotated[
        list[Path], typer.Argument(help="Cards of all parties, in node order.", metavar="CARDS...")
    ],
    out: Annotated[Path, typer.Option(help="The new roster.")] = Path("federation.toml"),
    ends: Annotated[
        str | None, typer.Option(help="Last day, such as 2030-12-31; default: a year from now.")
    ] = None,
) -> None:
    """Make a roster from a plan and the parties' cards; what cannot work is refused.

    Example:

    ```
    dpcsgp federation new plan.toml cards/*.card.toml --out federation.toml
    ```
    """
    from rich.console import Console

    from dpcsgp.console.federations import overview
    from dpcsgp.federation.cards import Card
    from dpcsgp.federation.founding import Plan, found

    plan, cards = Plan.load(plan_file), [Card.load(path) for path in card_files]
    agreement = found(plan, cards, _day(ends))
    _write_new(out, agreement.roster.text())
    Console().print(overview(agreement), soft_wrap=True)
    for note in plan.notes(cards):
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {out}; give it to every party: dpcsgp party approve {out}")


@app.command("show")
def show(
    roster_files: Annotated[
        list[Path],
        typer.Argument(help="One roster, or two to be compared.", metavar="FEDERATION.toml..."),
    ],
    firewall: Annotated[
        bool,
        typer.Option("--firewall", help="Show who calls whom at which port: what IT has to open."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show who takes part, on what terms, and what it costs; or how two rosters differ.

    Exit code 1: the two rosters differ.

    Example:

    ```
    dpcsgp federation show federation.toml
    ```
    """
    from dpcsgp.federation.roster import Roster

    if len(roster_files) > 2:
        raise ConfigError(f"{len(roster_files)} rosters: give one, or two to be compared")
    if firewall and len(roster_files) != 1:
        raise ConfigError(f"--firewall takes one roster, not {len(roster_files)}")
    rosters = [Roster.load(path) for path in roster_files]
    if firewall:
        _show_firewall(rosters[0], as_json)
        return
    if len(rosters) == 2:
        _compare(rosters[0], rosters[1], as_json)
        return
    from rich.console import Console

    from dpcsgp.console.federations import overview
    from dpcsgp.federation.agreement import examine

    agreement = examine(rosters[0])
    if as_json:
        typer.echo(strict_json(agreement.answer()))
    else:
        Console().print(overview(agreement), soft_wrap=True)


@app.command("amend")
def amend(
    roster_file: Annotated[
        Path, typer.Argument(help="The version that is in force.", metavar="OLD.toml")
    ],
    at_round: Annotated[
        int, typer.Option(help="Takes effect after so many rounds, counted from the first.")
    ],
    out: Annotated[Path, typer.Option(help="The new version.")],
    leave: Annotated[list[str] | None, typer.Option(help="A party that leaves then.")] = None,
    gone: Annotated[
        list[str] | None, typer.Option(help="A party that is not heard any more; nobody waits.")
    ] = None,
    join: Annotated[
        list[Path] | None, typer.Option(help="Card of a new party.", metavar="CARD")
    ] = None,
    replace: Annotated[
        list[Path] | None, typer.Option(help="New card of one that stays.", metavar="CARD")
    ] = None,
    rejoin: Annotated[
        list[str] | None, typer.Option(help="A party that lost its newest ledger.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")
    ] = None,
    ends: Annotated[str | None, typer.Option(help="Last day; default: as before.")] = None,
) -> None:
    """Make the next version of a roster: parties leave, join or come back, settings change.

    Every party of it approves it; ledgers, budgets and models go on.

    Example:

    ```
    dpcsgp federation amend v1.toml --leave b --at-round 9 --out v2.toml
    ```
    """
    from rich.console import Console

    from dpcsgp.console.federations import changed_fields, overview
    from dpcsgp.federation.amending import Amendment
    from dpcsgp.federation.amending import amend as amended
    from dpcsgp.federation.cards import Card
    from dpcsgp.federation.roster import Roster

    old = Roster.load(roster_file)
    wanted = Amendment(
        at_round,
        tuple(leave or ()),
        tuple(gone or ()),
        tuple(Card.load(path) for path in join or ()),
        tuple(Card.load(path) for path in replace or ()),
        tuple(rejoin or ()),
        tuple(settings or ()),
        _day(ends),
    )
    agreement = amended(old, wanted)
    _write_new(out, agreement.roster.text())
    Console().print(overview(agreement), soft_wrap=True)
    typer.echo(changed_fields(old, agreement.roster))
    typer.echo(f"wrote {out}; give it to every party: dpcsgp party approve {out}")


@app.command("demo")
def demo(
    out: Annotated[
        Path | None, typer.Option(help="New folder; default: a new one under runs/.")
    ] = None,
) -> None:
    """Five parties on this machine train together; one is killed and starts again.

    Exit code 0: all ended, and nobody released anything twice.

    Example:

    ```
    dpcsgp federation demo
    ```
    """
    from rich.console import Console

    from dpcsgp.console.federation_demo import DemoView, demo_table
    from dpcsgp.federation.demonstration import demonstrate

    root = out or Path("runs") / f"federation-{time.strftime('%Y%m%d-%H%M%S')}"
    console = Console()
    started = time.monotonic()
    with DemoView(console) as view:
        results = demonstrate(root, view.show, view.say)
    console.print(demo_table(results))
    seconds = time.monotonic() - started
    console.print(f"{seconds:.0f} s; everything is in {root}", soft_wrap=True, highlight=False)
    if any(result.faults for result in results):
        raise typer.Exit(1)


def _show_firewall(roster: Roster, as_json: bool) -> None:
    """Print every connection that the roster needs."""
    from rich.console import Console

    from dpcsgp.console.federations import firewall_table
    from dpcsgp.federation.firewall import connections

    found = connections(roster)
    if as_json:
        typer.echo(strict_json({"connections": [vars(each) for each in found]}))
    else:
        Console().print(firewall_table(found), soft_wrap=True)


def _compare(first: Roster, second: Roster, as_json: bool) -> None:
    """Print every field in which two rosters differ."""
    from dpcsgp.console.federations import difference_lines
    from dpcsgp.federation.differences import differences

    found = differences(first, second)
    if as_json:
        typer.echo(strict_json({"equal": not found, "differences": [vars(each) for each in found]}))
    else:
        typer.echo(difference_lines(found))
    if found:
        raise typer.Exit(1)


def _day(text: str | None) -> datetime.date | None:
    try:
        return None if text is None else datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--ends {text}: expected a day such as 2030-12-31") from None


def _write_new(path: Path, text: str) -> None:
    """Write a file that must not exist: an approved roster is never overwritten."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise ConfigError(f"--out {path}: it exists already; choose another name") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
