"""The page's tables: runs side by side, settings and their differences, accounts of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from dpcsgp.report.folders import RunResults, node_values, worst
from dpcsgp.report.formatting import (
    DASH,
    as_number,
    duration,
    epsilon,
    megabytes,
    plain_text,
    score,
    significant,
)


@final
@dataclass(frozen=True)
class TableCell:
    """What a table shows, and the value it is sorted by (None: always last)."""

    text: str
    order: float | str | None = None
    numeric: bool = False

    @classmethod
    def of(cls, value: float, text: str) -> TableCell:
        """Return the cell of a number."""
        return cls(text, None if math.isnan(value) else value, numeric=True)

    @classmethod
    def word(cls, text: str) -> TableCell:
        """Return the cell of a text."""
        return cls(text or DASH, text or None)


@final
@dataclass(frozen=True)
class Table:
    """Column titles, and rows of cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


Spell = Callable[[float], str]


def comparison(runs: Sequence[RunResults], metric: str) -> Table:
    """Put the runs side by side."""
    name = metric.replace("_", " ").capitalize()
    columns = ("Run", "Method", "Compression", f"{name}, node mean", "Worst node", "Average model")
    columns += (
        "Verified ε",
        "Claimed ε",
        "ε if all collude",
        "MB per edge",
        "Private",
        "Steps",
        "MB per node",
    )
    columns += ("Paper's Mbit per edge", "Disagreement", "Time", "Graph", "Ended")
    rows = tuple(_comparison_row(index, run, metric) for index, run in enumerate(runs))
    return Table(columns, rows)


def _comparison_row(index: int, run: RunResults, metric: str) -> tuple[TableCell, ...]:
    def number(key: str, spell: Spell = significant, unit: float = 1.0) -> TableCell:
        value = run.number(key) / unit
        return TableCell.of(value, spell(value))

    def scored(value: float) -> TableCell:
        return TableCell.of(value, score(metric, value))

    # in the order of the columns above
    private = run.summary["private"]
    return (
        TableCell(f"{index + 1} · {run.name}", index + 1.0),
        TableCell.word(run.text("algorithm")),
        TableCell.word(run.text("compression")),
        scored(final_score(run, metric, "_node_mean")),
        scored(worst_score(run, metric)),
        scored(final_score(run, metric, "_average_model")),
        number("epsilon", epsilon),
        number("epsilon_claimed"),
        TableCell.of(run.epsilon_all_collude, epsilon(run.epsilon_all_collude)),
        number("bytes_per_edge", significant, 1e6),
        TableCell("yes" if private else "no", float(private)),
        number("steps", lambda value: significant(value, 9)),
        number("bytes_sent_per_node", significant, 1e6),
        number("bits_paper", significant, 1e6),
        number("disagreement"),
        number("seconds", duration),
        TableCell.word(run.text("graph").replace("_", " ")),
        TableCell.word(run.text("stopped_because").partition(":")[0]),
    )


def final_score(run: RunResults, metric: str, ending: str) -> float:
    """Return a metric of the summary, or of the last row where the summary lacks it."""
    value = run.number(f"{metric}{ending}")
    return as_number(run.last.get(f"{metric}{ending}")) if math.isnan(value) else value


def worst_score(run: RunResults, metric: str) -> float:
    """Return the worst node's value at the end."""
    values = node_values(run.last, f"{metric}_nodes")
    if math.isnan(values[0]) and values.size == 1:
        return run.number(f"{metric}_node_min")
    return worst(metric, values)


def account(run: RunResults, metric: str) -> Table:
    """Return what each node released, spent, sent and reached at the end."""
    name = metric.replace("_", " ").capitalize()
    # Only where noise is shared do these differ from the verified eps.
    alone = run.last.get("epsilon_all_collude_nodes")
    extra = ("ε if all collude",) if alone else ()
    columns = ("Node", "Releases", "Verified ε", *extra, "Noise multiplier", "Sent", name)
    # The summary lists all nodes; a process that hosts some evaluates only those, which the last
    # row names.
    nodes = run.last.get("nodes")
    spent = run.last.get("epsilon_nodes")
    lists = [
        value for value in (run.summary.get("releases"), spent, nodes) if isinstance(value, list)
    ]
    count = max(map(len, lists), default=0)
    evaluated = nodes if isinstance(nodes, list) else list(range(count))
    scores = dict(zip(map(str, evaluated), run.last.get(f"{metric}_nodes") or [], strict=False))
    names = evaluated if len(evaluated) == count else list(range(count))
    rows = []
    for row, name in enumerate(names):
        cells = [TableCell.of(as_number(name), str(name))]
        for value, spell in (
            (_entry(run.summary.get("releases"), row), lambda value: significant(value, 9)),
            (_entry(spent, row), epsilon),
            *([(_entry(alone, row), epsilon)] if alone else []),
            (_entry(run.summary.get("noise_multiplier"), row), lambda value: significant(value, 4)),
            (_entry(run.last.get("bytes_sent_nodes"), row), megabytes),
            (as_number(scores.get(str(name))), lambda value: score(metric, value)),
        ):
            cells.append(TableCell.of(value, spell(value)))
        rows.append(tuple(cells))
    return Table(columns, tuple(rows))


def _entry(values: Any, row: int) -> float:
    """Return one node's entry of a list; a single number stands for all nodes."""
    if isinstance(values, list):
        return as_number(values[row]) if row < len(values) else math.nan
    return as_number(values)


def differing_settings(runs: Sequence[RunResults]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs, one text per run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    spelled = {key: [plain_text(run.settings.get(key)) for run in runs] for key in keys}
    return {key: texts for key, texts in spelled.items() if len(set(texts)) > 1}


def settings_by_section(run: RunResults) -> dict[str, dict[str, str]]:
    """Return the settings as the TOML file groups them."""
    sections: dict[str, dict[str, str]] = {}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = plain_text(value)
    return sections
