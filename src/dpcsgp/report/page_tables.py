"""The page's tables: runs side by side, settings and their differences, accounts of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from dpcsgp.records.names import shown_model
from dpcsgp.report.folders import RunResults, metric_of, node_values, worst
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


# Shown only where they differ between runs: a table that is too wide is cut off.
_IF_DIFFERENT = ("Compression", "Claimed ε", "Steps", "MB per node", "Graph", "Ended")


def comparison(runs: Sequence[RunResults], metrics: Sequence[str]) -> Table:
    """Put the runs side by side; each with the first of the metrics that it has."""
    rows = [_comparison_row(index, run, metrics) for index, run in enumerate(runs)]
    left_out = {name for name in _IF_DIFFERENT if len({row[name].text for row in rows}) < 2}
    if all(row["ε if all collude"].text == row["Verified ε"].text for row in rows):
        left_out.add("ε if all collude")
    columns = tuple(name for name in rows[0] if name not in left_out)
    return Table(columns, tuple(tuple(row[name] for name in columns) for row in rows))


def _comparison_row(index: int, run: RunResults, metrics: Sequence[str]) -> dict[str, TableCell]:
    metric = metric_of(run, metrics)
    result = metric.replace("_", " ").capitalize() if len(metrics) == 1 else "Result"

    def number(key: str, spell: Spell = significant, unit: float = 1.0) -> TableCell:
        value = run.number(key) / unit
        return TableCell.of(value, spell(value))

    def scored(value: float, named: bool = False) -> TableCell:
        name = f" {metric.replace('_', ' ')}" if named and len(metrics) > 1 else ""
        return TableCell.of(value, score(metric, value) + name)

    private = run.summary["private"]
    return {
        "Run": TableCell(f"{index + 1} · {run.name}", index + 1.0),
        "Method": TableCell.word(run.text("algorithm")),
        "Compression": TableCell.word(run.text("compression")),
        f"{result}, node mean": scored(final_score(run, metric, "_node_mean"), named=True),
        "Worst node": scored(worst_score(run, metric)),
        "Average model": scored(final_score(run, metric, "_average_model")),
        "Verified ε": number("epsilon", epsilon),
        "Claimed ε": number("epsilon_claimed"),
        "ε if all collude": TableCell.of(run.epsilon_all_collude, epsilon(run.epsilon_all_collude)),
        "Private": TableCell("yes" if private else "no", float(private)),
        "MB per edge": number("bytes_per_edge", significant, 1e6),
        "MB per node": number("bytes_sent_per_node", significant, 1e6),
        "Steps": number("steps", lambda value: significant(value, 9)),
        "Disagreement": number("disagreement"),
        "Time": number("seconds", duration),
        "Graph": TableCell.word(run.text("graph").replace("_", " ")),
        "Ended": TableCell.word(run.text("stopped_because").partition(":")[0]),
    }


def final_score(run: RunResults, metric: str, ending: str) -> float:
    """Return a metric of the summary, or of the last row where the summary lacks it."""
    value = run.number(f"{metric}{ending}")
    return as_number(run.last.get(f"{metric}{ending}")) if math.isnan(value) else value


def worst_score(run: RunResults, metric: str) -> float:
    """Return the worst node's value at the end."""
    values = node_values(run.last, f"{metric}_nodes")
    if math.isnan(values[0]) and values.size == 1:
        ending = "_node_worst" if run.lower_is_better(metric) else "_node_min"
        return run.number(f"{metric}{ending}")
    return worst(values, run.lower_is_better(metric))


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
    differing = {key: texts for key, texts in spelled.items() if len(set(texts)) > 1}
    if models := differing.get("task.model"):
        shown = [shown_model(text) for text in models]
        # Digests stay where they alone tell two models apart.
        differing["task.model"] = shown if len(set(shown)) == len(set(models)) else models
    return differing


def settings_by_section(run: RunResults) -> dict[str, dict[str, str]]:
    """Return the settings as the TOML file groups them."""
    sections: dict[str, dict[str, str]] = {}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        text = plain_text(value)
        sections.setdefault(section, {})[key] = shown_model(text) if key == "model" else text
    return sections
