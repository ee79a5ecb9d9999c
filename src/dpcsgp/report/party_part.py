"""What a report says about one party of a federation: its own model, and whose messages are in it.

A party knows its own node only. So its figures are never called those of all nodes, and a run that
has not handed over every message is never called a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dpcsgp.report.folders import RunResults
from dpcsgp.report.formatting import as_number, plain_text
from dpcsgp.report.page_tables import Table, TableCell

_KNOWN: Final = ("party", "node", "distance", "first_round", "last_round", "rounds")
_DISTANCES: Final = {0: "itself", 1: "directly"}


def rounds_done(run: RunResults) -> str:
    """Say how far the party got."""
    done, planned = (plain_text(run.summary.get(key)) for key in ("rounds", "rounds_planned"))
    return f"{done} of {planned}"


def contribution_table(run: RunResults) -> Table | None:
    """Return one row per party: how it is heard, and which of its rounds are in the model."""
    entries = run.summary.get("contributions")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return None
    # Whatever else a summary counts per party has a column of its own.
    more = tuple(dict.fromkeys(key for entry in entries for key in entry if key not in _KNOWN))
    titles = ("Party", "Node", "Heard", "Its rounds in this model")
    columns = titles + tuple(key.replace("_", " ").capitalize() for key in more)
    return Table(columns, tuple(_row(entry, more) for entry in entries))


def _row(entry: Mapping[str, Any], more: tuple[str, ...]) -> tuple[TableCell, ...]:
    away = as_number(entry.get("distance"))
    heard = _DISTANCES.get(int(away) if away == away else -1, f"over {away:g} edges")
    others = (plain_text(entry.get(key)) for key in more)
    cells = (plain_text(entry.get("party")), plain_text(entry.get("node")), heard, _rounds(entry))
    return tuple(TableCell.word(text) for text in (*cells, *others))


def _rounds(entry: Mapping[str, Any]) -> str:
    first, last, planned = (
        plain_text(entry.get(key)) for key in ("first_round", "last_round", "rounds")
    )
    return "none" if as_number(entry.get("last_round")) < 0 else f"{first} to {last} of {planned}"
