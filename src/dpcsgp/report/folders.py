"""Read what a run left behind: summary, rows, settings and environment of a results folder."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpcsgp.algorithms.methods import METHODS
from dpcsgp.errors import DataError
from dpcsgp.records.ending import Ending
from dpcsgp.records.metrics import read_rows, usual_direction
from dpcsgp.report.formatting import as_number

Floats = NDArray[np.float64]
PREFERRED_METRIC = "accuracy"
MEAN = "_node_mean"


@final
@dataclass(frozen=True)
class RunResults:
    """One run as its files tell it; values that are missing read as nan."""

    path: Path
    name: str
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    settings: dict[str, Any]  # "section.key" -> value
    environment: dict[str, Any]
    remarks: tuple[str, ...]  # what the folder lacks

    def number(self, key: str) -> float:
        """Return a number of the summary."""
        return as_number(self.summary.get(key))

    def text(self, key: str) -> str:
        """Return a text of the summary, empty if missing."""
        value = self.summary.get(key)
        return "" if value is None else str(value)

    def column(self, key: str) -> Floats:
        """Return one number per row."""
        return np.array([as_number(row.get(key)) for row in self.rows])

    def per_node(self, key: str, pick: Callable[[Floats], float]) -> Floats:
        """Return one number per row, picked from its list over nodes (nan if missing)."""
        return np.array([pick(node_values(row, key)) for row in self.rows])

    @property
    def last(self) -> dict[str, Any]:
        """The last row: the state the run ended in."""
        return self.rows[-1]

    @property
    def metrics(self) -> list[str]:
        """Names of what was evaluated, the preferred one first."""
        names = [key.removesuffix(MEAN) for key in self.last if key.endswith(MEAN)]
        return sorted(names, key=lambda name: name != PREFERRED_METRIC)

    def lower_is_better(self, metric: str) -> bool:
        """Say whether small values of a metric are good: as the run was told, or by its name."""
        told = self.summary.get("metric_directions")
        direction = told.get(metric) if isinstance(told, dict) else None
        return (direction or usual_direction(metric)) == "lower"

    @property
    def sends_nothing(self) -> bool:
        """Whether no message ever left a node."""
        return self.number("bytes_per_edge") == 0

    @property
    def trained_alone(self) -> bool:
        """Whether each node learned from its own data only: the control of a comparison."""
        method = METHODS.get(self.text("algorithm"))
        return method is not None and not method.sends and not method.one_place

    @property
    def diverged(self) -> bool:
        """Whether a state or message became non-finite."""
        return Ending.of(self.text("stopped_because")) is Ending.DIVERGED

    @property
    def unfinished(self) -> bool:
        """Whether this is a party whose run of a federation is not over; it may have diverged."""
        return isinstance(self.summary.get("party"), str) and not self.summary.get("handed_over")

    @property
    def epsilon_all_collude(self) -> float:
        """The eps that is left if all other nodes collude; older runs had independent noise."""
        value = self.number("epsilon_all_collude")
        return self.number("epsilon") if math.isnan(value) else value

    @property
    def exceeds_claim(self) -> bool:
        """Whether the verified eps is finite and above the one that was asked for."""
        verified, claimed = self.number("epsilon"), self.number("epsilon_claimed")
        return math.isfinite(verified) and verified > claimed * (1 + 1e-9)


def node_values(row: dict[str, Any], key: str) -> Floats:
    """Return a row's list over nodes; a missing list reads as one nan."""
    values = row.get(key)
    if not isinstance(values, list) or not values:
        return np.array([math.nan])
    return np.array([as_number(value) for value in values])


def worst(values: Floats, lower_is_better: bool) -> float:
    """Return the worst node's value."""
    return float(values.max() if lower_is_better else values.min())


def is_party(run: RunResults) -> bool:
    """Tell whether this folder is that of one party."""
    return isinstance(run.summary.get("party"), str)


def read_many(folders: Sequence[Path]) -> list[RunResults]:
    """Read several folders, each once, under names that tell them apart."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    return [read_results(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_results(folder: Path, name: str) -> RunResults:
    """Read one folder; refuse a damaged summary or list of rows, remark on the rest."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "there is no such folder"
        raise DataError(f"{folder}: {found}; give a results folder that `dpcsgp run --out` wrote")
    summary = _read_summary(folder)
    rows = _read_metrics(folder / "metrics.jsonl")
    settings, settings_remark = _read_settings(folder / "config.toml")
    environment, environment_remark = _read_environment(folder / "environment.json")
    remarks = tuple(remark for remark in (settings_remark, environment_remark) if remark)
    return RunResults(folder, name, summary, rows, settings, environment, remarks)


def shown_metrics(runs: Sequence[RunResults]) -> list[str]:
    """Return the metrics that figures show.

    One, if all runs have it, accuracy first; otherwise so many that every run has one of them.
    Empty: nothing was measured.
    """
    for metric in runs[0].metrics:
        if all(metric in run.metrics for run in runs):
            return [metric]
    chosen: list[str] = []
    for run in runs:
        if run.metrics and not set(chosen) & set(run.metrics):
            chosen.append(run.metrics[0])
    return chosen


def metric_of(run: RunResults, metrics: Sequence[str]) -> str:
    """Return the metric that stands for a run among those shown; accuracy if it has none."""
    return next((metric for metric in metrics if metric in run.metrics), PREFERRED_METRIC)


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        raise DataError(f"{path} does not exist; {_remedy(folder)}")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); repeat the run or restore the file"
        ) from None
    if not isinstance(summary, dict) or not isinstance(summary.get("algorithm"), str):
        raise DataError(
            f"{path} is no summary of a run (no algorithm in it); "
            "repeat the run or restore the file"
        )
    if not isinstance(summary.get("private"), bool):
        raise DataError(
            f"{path}: private = {summary.get('private')!r}, expected true or false; "
            "restore the file"
        )
    return summary


def _remedy(folder: Path) -> str:
    """Guess what the caller meant by a folder without summary."""
    inside = sorted(path.parent.name for path in folder.glob("*/summary.json"))
    if inside:
        return (
            f"the folder holds {len(inside)} runs of its own: name them, for example "
            f"`dpcsgp report {folder}/*`"
        )
    if (folder / "config.toml").exists():
        settings, _ = _read_settings(folder / "config.toml")
        if settings.get("task.name") == "own":
            return (
                "the run has not ended: finish it by the script that started it, with "
                f"dpcsgp.train(..., out={str(folder)!r}, resume=True)"
            )
        return f"the run has not ended: finish it with `dpcsgp run --resume --out {folder}`"
    return "give a results folder that `dpcsgp run --out` wrote"


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    try:
        rows = read_rows(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; repeat the run or restore the file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); repeat the run or restore the file"
        ) from None
    if not rows:
        raise DataError(f"{path} holds no evaluation; repeat the run or restore the file")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or math.isnan(as_number(row.get("step"))):
            raise DataError(
                f"{path}, line {number} has no step; repeat the run or restore the file"
            )
    return rows


def _read_settings(path: Path) -> tuple[dict[str, Any], str]:
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}, "config.toml is missing or damaged, so the settings are unknown."
    flat: dict[str, Any] = {}
    for section, table in sections.items():
        if isinstance(table, dict):
            flat |= {f"{section}.{key}": value for key, value in table.items()}
        else:
            flat[section] = table
    return flat, ""


def _read_environment(path: Path) -> tuple[dict[str, Any], str]:
    try:
        environment = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        environment = None
    if not isinstance(environment, dict):
        return {}, "environment.json is missing or damaged, so the software versions are unknown."
    return environment, ""


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest trailing parts of the paths that differ from one another."""
    longest = max((len(path.parts) for path in paths), default=1)
    # one more folder of the path at a time, until all names differ
    names = [path.name or str(path) for path in paths]
    for depth in range(2, longest + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names
