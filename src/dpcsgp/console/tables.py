"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.wording import outcome_rows, plan_rows


def plan_table(design: RunDesign) -> Table:
    """Say what is about to happen and what it will cost."""
    table = Table(title="about to train", show_header=False, title_justify="left")
    for name, value in plan_rows(design).items():
        table.add_row(name, Text(value))  # as it is: `:m:` in a name is no emoji
    return table


def outcome_table(*summaries: Mapping[str, Any]) -> Table:
    """Show closing numbers side by side, one column per run."""
    table = Table(title="outcome", title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(str(summary["algorithm"]), justify="right")
    columns = [outcome_rows(summary) for summary in summaries]
    for name in _names(columns):
        table.add_row(name, *(Text(column.get(name, "-")) for column in columns))
    return table


def _names(columns: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))
