"""What a report says about one party of a federation: its own model, and whose messages are in it.

A party knows its own node only. So its figures are never called those of all nodes, and a run that
has not handed over every message is never called a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dpcsgp.report.folders import RunResults
from dpcsgp.report.formatting import as_number, plain_text
from dpcsgp.report.gradient_counts import told
from dpcsgp.report.page_tables import Table, TableCell

_KNOWN: Final = ("party", "node", "distance", "first_round", "last_round", "rounds", "gradients")
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
    # Counted only where gradients may be late.
    counted = any(entry.get("gradients") is not None for entry in entries)
    titles += ("Gradients put in",) if counted else ()
    columns = titles + tuple(key.replace("_", " ").capitalize() for key in more)
    rows = []
    for entry in entries:
        gradients = (TableCell.word(told(run, entry.get("gradients"))),) if counted else ()
        rows.append((*_first_cells(entry), *gradients, *_other_cells(entry, more)))
    return Table(columns, tuple(rows))


def rule_of_arrival(run: RunResults) -> str:
    """Say when a message is in the model."""
    lag = as_number(run.summary.get("max_lag"))
    if not lag > 0:
        return (
            "A message of round t from a party that is d edges away is in this model after round "
            "t + d - 1"
        )
    return (
        f"Messages may be {lag:g} rounds late at every edge; the table has the rounds that are in "
        "this model for certain"
    )


def _first_cells(entry: Mapping[str, Any]) -> tuple[TableCell, ...]:
    away = as_number(entry.get("distance"))
    heard = _DISTANCES.get(int(away) if away == away else -1, f"over {away:g} edges")
    cells = (plain_text(entry.get("party")), plain_text(entry.get("node")), heard, _rounds(entry))
    return tuple(TableCell.word(text) for text in cells)


def _other_cells(entry: Mapping[str, Any], more: tuple[str, ...]) -> tuple[TableCell, ...]:
    return tuple(TableCell.word(plain_text(entry.get(key))) for key in more)


def _rounds(entry: Mapping[str, Any]) -> str:
    first, last, planned = (
        plain_text(entry.get(key)) for key in ("first_round", "last_round", "rounds")
    )
    return "none" if as_number(entry.get("last_round")) < 0 else f"{first} to {last} of {planned}"
