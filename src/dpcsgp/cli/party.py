"""`dpcsgp party new | card | approve`: one party's keys, its card, and its consent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.exit_codes import CodedGroup
from dpcsgp.errors import ConfigError

if TYPE_CHECKING:
    from dpcsgp.federation.cards import Promise

app = typer.Typer(
    cls=CodedGroup,
    no_args_is_help=True,
    help="Take part in a federation: keys, card and consent of one party.",
    rich_markup_mode=None,
)

Folder = Annotated[
    Path | None,
    typer.Option(help="The party's folder; default: this one, or the only one below it."),
]
RosterFile = Annotated[Path, typer.Argument(help="The roster.", metavar="FEDERATION.toml")]
NumExamples = Annotated[
    int | None, typer.Option(help="Declared number of examples: public, at least as many as held.")
]
Epsilon = Annotated[float | None, typer.Option(help="Budget that the party promises to keep.")]
Delta = Annotated[float | None, typer.Option(help="Well below 1 / number of examples.")]


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT at which the others can call this party.")
    ] = None,
    outbound_only: Annotated[
        bool, typer.Option("--outbound-only", help="Nobody can call this party; it calls others.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="New folder; default: NAME.")] = None,
    num_examples: NumExamples = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
) -> None:
    """Make keys, certificate and card of a new party. Keys never leave the folder.

    Example:

    ```
    dpcsgp party new hospital-a --address a.example.org:7400
    ```
    """
    from dpcsgp.federation.cards import check_address
    from dpcsgp.federation.party_folder import PartyFolder

    if outbound_only == (address is not None):
        raise ConfigError("give --address HOST:PORT or --outbound-only, one of them")
    made = PartyFolder.create(
        folder or Path(name),
        name,
        check_address(address) if address is not None else None,
        _promise(None, num_examples, epsilon, delta),
    )
    typer.echo(f"made {made.path}: private keys, which stay there, and a card for the others:")
    typer.echo(str(made.card_file))
    if made.card.promise is None:
        typer.echo("add your promise: dpcsgp party card --num-examples N --epsilon E --delta D")


@app.command("card")
def card(
    folder: Folder = None,
    num_examples: NumExamples = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
) -> None:
    """Print this party's card, or change what it promises and sign it anew.

    Example:

    ```
    dpcsgp party card --num-examples 1200 --epsilon 2 --delta 1e-5
    ```
    """
    from dpcsgp.federation.party_folder import PartyFolder, find_folder

    mine = PartyFolder.open(find_folder(folder))
    if promise := _promise(mine.card.promise, num_examples, epsilon, delta):
        mine = mine.promise(promise)
        typer.echo(
            f"# signed anew: {mine.card_file}; rosters made with the older card need the new one",
            err=True,
        )
    typer.echo(mine.card.text(), nl=False)


@app.command("approve")
def approve(
    roster_file: RosterFile,
    folder: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Approve without asking.")] = False,
) -> None:
    """Show what this party promises and what it costs, ask, and record its consent.

    Of an amended roster it shows every field that changed, and what will have been spent.

    Example:

    ```
    dpcsgp party approve federation.toml
    ```
    """
    from rich.console import Console

    from dpcsgp.console.federations import changed_fields, own_part
    from dpcsgp.federation import consent
    from dpcsgp.federation.agreement import examine
    from dpcsgp.federation.party_folder import PartyFolder, find_folder
    from dpcsgp.federation.roster import Roster
    from dpcsgp.federation.run_place import known_place
    from dpcsgp.federation.succession import refuse_wrong_history, told_ahead

    mine, roster = PartyFolder.open(find_folder(folder)), Roster.load(roster_file)
    # Whose roster this is comes first; then everything is computed anew.
    consent.check_own_card(mine, roster)
    before = refuse_wrong_history(mine, roster)
    agreement = examine(roster)
    others = {c.federation: c for c in consent.given_consents(mine) if c.federation != roster.id}
    Console().print(own_part(agreement, mine.name, [*others.values()]), soft_wrap=True)
    if before is not None:
        path = known_place(mine, roster)
        if path is not None and (text := told_ahead(path, agreement, mine.name)):
            typer.echo(text)
        typer.echo(changed_fields(before, roster))
    typer.echo("Compare these words with the other parties, by telephone or face to face.")
    if not yes:
        typer.confirm(f"Does {mine.name} take part on these terms?", abort=True)
    consent.approve(mine, roster)
    typer.echo(f"approved by {mine.name}; the consent is in {mine.consents}")


def _promise(
    old: Promise | None, num_examples: int | None, epsilon: float | None, delta: float | None
) -> Promise | None:
    """Return the old promise with what was given; None where nothing was given."""
    from dpcsgp.federation.cards import PROMISED, Promise
    from dpcsgp.federation.files import Fields

    given = dict(zip(PROMISED, (num_examples, epsilon, delta), strict=True))
    stated = {key: value for key, value in given.items() if value is not None}
    if not stated:
        return None
    values = {**(vars(old) if old else {}), **stated}
    if missing := [key for key in PROMISED if key not in values]:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise ConfigError(f"a promise is --num-examples, --epsilon and --delta: give {options} too")
    return Promise.take(Fields(values, "promise"))
