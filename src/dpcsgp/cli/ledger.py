"""`dpcsgp ledger head`: where ledgers stand; `--expect-head` refuses older ones.

A head is the checksum of a ledger's last line and covers all lines before it. Written down on
another machine it tells later that a folder was taken back to an older state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.options import AsJson
from dpcsgp.errors import ConfigError

if TYPE_CHECKING:
    from dpcsgp.privacy.ledger import LedgerHead

app = typer.Typer(no_args_is_help=True, help="Say where ledgers stand.", rich_markup_mode=None)

ExpectHead = Annotated[
    list[str] | None,
    typer.Option(
        "--expect-head",
        help="Refuse ledgers that do not contain this head: NODE:COUNT:HEAD, or a file that "
        "`dpcsgp ledger head --json` wrote. May be repeated.",
        metavar="HEAD|FILE",
    ),
]


@app.callback()
def ledger() -> None:
    """Say where ledgers stand."""


@app.command("head")
def head(
    folder: Annotated[Path, typer.Argument(help="A results folder or a ledger file.")],
    as_json: AsJson = False,
) -> None:
    """Print run, node, number of releases and last checksum of each ledger, after verifying them.

    Example:

    ```
    dpcsgp ledger head runs/first --json > heads.json
    ```
    """
    from dpcsgp.privacy.ledger import ledger_heads

    heads = ledger_heads(folder)
    if as_json:
        # The form that --expect-head reads back.
        fields = ("run_id", "node", "count", "head")
        rows = [{name: getattr(head, name) for name in fields} for head in heads]
        typer.echo(json.dumps({"ledgers": rows}))
        return
    typer.echo("RUN NODE:COUNT:HEAD")
    for head in heads:
        typer.echo(f"{head.run_id} {head}")


def expected_heads(words: list[str] | None) -> list[LedgerHead]:
    """Return the heads that --expect-head names, in words or in files."""
    from dpcsgp.privacy.ledger import LedgerHead

    heads: list[LedgerHead] = []
    for word in words or []:
        heads += _heads_in_file(Path(word)) if Path(word).is_file() else [LedgerHead.parse(word)]
    return heads


def _heads_in_file(path: Path) -> list[LedgerHead]:
    from dpcsgp.privacy.ledger import LedgerHead

    try:
        rows = json.loads(path.read_text())["ledgers"]
        heads = [LedgerHead.parse(f"{row['node']}:{row['count']}:{row['head']}") for row in rows]
    except (OSError, ValueError, KeyError, TypeError):  # ConfigError is a ValueError
        heads = []
    if not heads:  # an empty list would expect nothing
        raise ConfigError(
            f"--expect-head = {path}: holds no heads; `dpcsgp ledger head FOLDER --json > "
            f"{path}` writes them"
        )
    return heads


def check_expected(out: Path | None, resume: bool, words: list[str] | None) -> None:
    """Refuse to resume a run whose ledgers do not contain what --expect-head names."""
    if not words:
        return
    # Refused rather than ignored: who gives a head relies on the check.
    if not resume or out is None:
        raise ConfigError(
            "--expect-head: only with --resume --out FOLDER; a new run has no ledgers"
        )
    from dpcsgp.privacy.ledger import check_heads

    check_heads(out, expected_heads(words))
