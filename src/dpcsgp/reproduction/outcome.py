"""From finished runs to what people look at: tables over repeats, curves, figures, text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.records.ending import Ending
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.reproduction.grid import Done

SCORES = ("accuracy_node_mean", "accuracy_node_min")  # columns that every table shows
TOO_FAR_APART = 1e6  # models of norm below a hundred cannot be that far from one another
MEASURES: Mapping[str, Callable[[Done], float]] = {
    "accuracy_node_mean": lambda done: as_float(done.summary["accuracy_node_mean"]),
    "accuracy_node_min": lambda done: as_float(done.summary["accuracy_node_min"]),
    "accuracy_average_model": lambda done: as_float(done.summary["accuracy_average_model"]),
    "bytes_per_edge": lambda done: as_float(done.summary["bytes_per_edge"]),
    "epsilon_claimed": lambda done: as_float(done.summary["epsilon_claimed"]),
    "epsilon_verified": lambda done: as_float(done.summary["epsilon"]),
    "epsilon_all_collude": lambda done: as_float(
        done.summary.get("epsilon_all_collude", done.summary["epsilon"])
    ),
    "disagreement": lambda done: as_float(done.summary.get("disagreement")),
}


def as_float(value: Any) -> float:
    """Return a number of a summary; infinities were written as words, missing ones are nan."""
    return math.nan if value is None else float(value)


def table(runs: Sequence[Done]) -> list[dict[str, Any]]:
    """Return one row per tag set: tags, mean and spread over repeats, how many diverged."""
    # repeats of a cell have the same tags and different seeds
    groups: dict[tuple[tuple[str, Any], ...], list[Done]] = {}
    for run in runs:
        groups.setdefault(tuple(run.tags.items()), []).append(run)
    rows = []
    for tags, members in groups.items():
        row: dict[str, Any] = dict(tags)
        row |= {"repeats": len(members), "steps": members[0].summary["steps"]}
        # a diverged repeat counts: its infinity or nan shows in the mean
        for name, read in MEASURES.items():
            values = [read(run) for run in members]
            row[name] = statistics.fmean(values)
            if name.startswith("accuracy") and len(values) > 1:
                row[f"{name}_sd"] = statistics.stdev(values)
        row["diverged"] = sum(has_diverged(run) for run in members)
        rows.append(row)
    return rows


def has_diverged(run: Done) -> bool:
    """Say whether a run stopped as diverged, or its nodes ended far beyond one another."""
    apart = as_float(run.summary.get("disagreement"))
    return Ending.of(run.summary["stopped_because"]) is Ending.DIVERGED or apart > TOO_FAR_APART


def raw_rows(runs: Sequence[Done]) -> list[dict[str, Any]]:
    """Return every evaluation of every run, for the CSV."""
    keys = ("step", "bytes_per_edge", *SCORES, "accuracy_average_model", "disagreement")
    return [
        dict(run.tags)
        | {"seed": seed_of(run), "final": bool(row.get("final"))}
        | {key: row.get(key) for key in keys}
        | {"epsilon": max(as_float(value) for value in row["epsilon_nodes"])}
        for run in runs
        for row in run.rows
    ]


def seed_of(run: Done) -> int:
    """Return the seed of a run, as its folder says."""
    return int(run.folder.name.split("-")[-2])  # the last part is the fingerprint


def curves(runs: Sequence[Done], label: str, measure: str = "accuracy_node_mean") -> list[Curve]:
    """Return accuracy in percent against megabits per edge, one curve per tag `label`."""
    groups: dict[str, list[Done]] = {}
    for run in runs:
        groups.setdefault(str(run.tags[label]), []).append(run)
    found = []
    for name, members in groups.items():
        # a repeat that diverged ends early; all send the same bytes up to there
        shortest = min(len(run.rows) for run in members)
        bits = [8e-6 * row["bytes_per_edge"] for row in members[0].rows[:shortest]]
        values = [
            [100 * as_float(row.get(measure)) for row in run.rows[:shortest]] for run in members
        ]
        found.append(Curve(name, np.array(bits), np.array(values)))
    return found


def write_outcome(
    out: Path,
    runs: Sequence[Done],
    panel: str,
    label: str,
    *,
    log_x: bool = True,
    show: Callable[[Any], str] = str,
) -> list[Path]:
    """Write `table.csv`, `curves.csv` and a figure with one panel per value of `panel`."""
    titles = dict.fromkeys(run.tags[panel] for run in runs)
    panels = {
        show(value): curves([run for run in runs if run.tags[panel] == value], label)
        for value in titles
    }
    figure = accuracy_panels(
        panels, "communicated Mbit per edge", "node mean accuracy, %", log_x=log_x
    )
    return [
        write_csv(out / "table.csv", table(runs)),
        write_csv(out / "curves.csv", raw_rows(runs)),
        *save_figure(figure, out / "figure"),
    ]


def markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as a table in Markdown; accuracies in percent, bytes in MB."""
    lines = [
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|---" * len(columns) + "|",
    ]
    lines += ["| " + " | ".join(_cell(column, row) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(column: str, row: Mapping[str, Any]) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if column.startswith("accuracy"):
        spread = row.get(f"{column}_sd")
        return f"{100 * value:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")
    if column == "bytes_per_edge":
        return f"{value / 1e6:.3f} MB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
