"""Many processes, one results folder: rows, models and summaries of all parts are put together.

Processes that see the same folder write one set of results in it; on machines that share no disk
each folder gets the rows of all nodes and the models of its own.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from dpcsgp.runs.design import RunDesign
from dpcsgp.records.files import write_atomically
from dpcsgp.records.metrics import plain, write_json
from dpcsgp.runs.folder import ResultsFolder, releases, summarise
from dpcsgp.training import Progress, Run

_FINAL = ("_node_mean", "_node_min", "_average_model")
_MOST_BYTES = 10**9


@dataclass(frozen=True)
class SharedFolder:
    """Finds out which ranks write to the same folder: each leaves a mark under a name that only
    this start knows."""

    path: Path
    rank: int
    start: str

    @classmethod
    def join(cls, folder: Path, rank: int, start: str) -> SharedFolder:
        """Leave this rank's mark, and take away those that it left at earlier starts."""
        path = folder / "checkpoint"
        for old in path.glob(f".rank-{rank}.*"):
            old.unlink(missing_ok=True)
        (path / f".rank-{rank}.{start}").touch()
        return cls(path, rank, start)

    @property
    def ranks(self) -> list[int]:
        """Ranks that share the folder, ascending; complete once all have joined."""
        marks = self.path.glob(f".rank-*.{self.start}")
        return sorted(int(mark.name.split(".")[1].removeprefix("rank-")) for mark in marks)

    def leave(self) -> None:
        """Take the mark away."""
        (self.path / f".rank-{self.rank}.{self.start}").unlink(missing_ok=True)


@dataclass(frozen=True)
class StateFiles:
    """States of one process at its evaluations and at the end, for whoever averages the models of
    all processes."""

    path: Path
    part: int
    num_parts: int
    fields: tuple[str, ...]  # of the state: what models and average follow from
    every_row: bool = True  # False: only the last row gets to know the average model

    @classmethod
    def of(cls, folder: Path, part: int, num_parts: int, design: RunDesign) -> StateFiles:
        """Keep the state at every evaluation if those of all nodes fit into a gigabyte."""
        config = design.config
        evaluations = 1 + config.algorithm.steps // (config.run.evaluate_every or config.algorithm.steps)
        fits = evaluations * 4 * design.dim * design.topology.num_nodes <= _MOST_BYTES
        return cls(folder / "checkpoint", part, num_parts, design.algorithm.model_fields, fits)

    def name(self, moment: int | str, part: int) -> Path:
        """Return the file of a step (or "final") and part."""
        return self.path / f"state-{moment}.part-{part}-of-{self.num_parts}.safetensors"

    def keep(self, moment: int | str, state: Any) -> None:
        """Write what the models and their average follow from."""
        if not self.every_row and moment != "final":
            return
        tensors = {name: getattr(state, name).cpu().contiguous() for name in self.fields}
        write_atomically(self.name(moment, self.part), save(tensors))

    def joined(self, moment: int | str, ranks: Sequence[int], template: Any) -> Any:
        """Return the state of these ranks' nodes together, otherwise like the template; None if a
        part is missing."""
        files = [self.name(moment, rank) for rank in ranks]
        if not all(file.exists() for file in files):
            return None
        loaded = [load_file(file) for file in files]
        tensors = {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}
        return template._replace(**tensors)

    def forget(self, ranks: Sequence[int], moment: str = "*") -> None:
        """Remove the files of a moment, of all by default."""
        for rank in ranks:
            for file in self.path.glob(self.name(moment, rank).name):
                file.unlink(missing_ok=True)


def write_part(design: RunDesign, run: Run, progress: Progress, states: StateFiles) -> dict[str, Any]:
    """Write this process's final state beside its snapshots; return its rows and summary for
    merging."""
    states.keep("final", progress.state)
    summary = summarise(design, run.recorder.rows[-1], progress, releases(run), run.private.reproducible)
    return {"rows": plain(run.recorder.rows), "summary": plain(summary)}


def merge_parts(
    folder: ResultsFolder,
    run: Run,
    progress: Progress,
    parts: Sequence[Mapping[str, Any]],
    states: StateFiles,
    ranks: Sequence[int],
) -> dict[str, Any]:
    """Write `metrics.jsonl`, `model.safetensors` and `summary.json` as one process would have;
    return the summary.

    `ranks` are those whose states are in this folder.
    """
    rows = [merge_rows(same) for same in zip(*(part["rows"] for part in parts), strict=True)]
    final = states.joined("final", ranks, progress.state)
    models_ND = run.algorithm.model(final)
    if len(ranks) == len(parts):
        folder.write_model(run.algorithm.average(final), models_ND)
        for row in rows[:-1]:
            _add_average(row, run, states.joined(row["step"], ranks, progress.state))
        _add_average(rows[-1], run, final)
    else:  # nobody has all models, so nobody can average them
        write_atomically(folder.path / "model.safetensors", save({"node_models": models_ND.contiguous()}))
    summary = merge_summaries(parts, rows[-1])
    write_atomically(folder.path / "metrics.jsonl", "".join(json.dumps(plain(row)) + "\n" for row in rows).encode())
    write_json(folder.path / "summary.json", summary)
    # A run that was interrupted will be asked for its earlier rows again.
    states.forget(ranks, "final" if progress.stopped_because.startswith("interrupted") else "*")
    return summary


def _add_average(row: dict[str, Any], run: Run, state: Any) -> None:
    """Add what only somebody with all models can tell: the average model's score, and the
    disagreement."""
    if state is None:
        return
    models_ND = run.algorithm.model(state)
    for name, values in run.task.evaluate(run.algorithm.average(state)[None]).items():
        row[f"{name}_average_model"] = float(values[0])
    row["disagreement"] = float((models_ND - models_ND.mean(0)).pow_(2).sum(1).mean().sqrt())


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows that the processes wrote at the same step."""
    merged = dict(rows[0])
    for key in [key for key in merged if key == "nodes" or key.endswith("_nodes")]:
        merged[key] = [value for row in rows for value in row[key]]
        if f"{key[:-1]}_mean" in merged:
            # the same sum in the same precision as in one process
            values = torch.tensor(merged[key])
            merged[f"{key[:-1]}_mean"], merged[f"{key[:-1]}_min"] = float(values.mean()), float(values.min())
    if "residual_ratio" in merged:
        sizes = [len(row["bytes_sent_nodes"]) for row in rows]
        total = sum(row["residual_ratio"] * size for row, size in zip(rows, sizes, strict=True))
        merged["residual_ratio"] = total / sum(sizes)
    merged["seconds"] = max(row["seconds"] for row in rows)
    return merged


def merge_summaries(parts: Sequence[Mapping[str, Any]], last_row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of the whole run from those of its parts and the last row of all."""
    summaries = [part["summary"] for part in parts]
    seconds, steps = max(summary["seconds"] for summary in summaries), summaries[0]["steps"]
    return {
        **summaries[0],
        **{key: value for key, value in last_row.items() if key.endswith(_FINAL)},
        "epsilon": plain(max(float(summary["epsilon"]) for summary in summaries)),
        "private": all(summary["private"] for summary in summaries),
        "seeded": any(summary["seeded"] for summary in summaries),
        "releases": [count for summary in summaries for count in summary["releases"]],
        "disagreement": last_row.get("disagreement"),
        "bytes_sent_per_node": max(last_row["bytes_sent_nodes"]),
        "seconds": seconds,
        "seconds_per_step": seconds / steps if steps else None,
        "processes": len(parts),
        "bytes_between_processes": sum(part["bytes_between_processes"] for part in parts),
    }
