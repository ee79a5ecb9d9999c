"""Many processes, one results folder: rows, models and summaries of all parts are put together.

Processes that see the same folder write one set of results in it; on machines that share no disk each folder gets the
rows of all nodes and the models of its own.

Legend: N nodes, D coordinates; a tensor whose name has `_N` in it has one row per node of its process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dpcsgp.assembly import Blueprint
from dpcsgp.files import write_atomically
from dpcsgp.recording import plain, write_json
from dpcsgp.results import ResultsFolder, releases, summarise
from dpcsgp.training import Progress, Run

_FINAL = ("_node_mean", "_node_min", "_average_model")


@dataclass(frozen=True)
class SharedFolder:
    """Finds out which ranks write to the same folder: each leaves a mark under a name that only this start knows."""

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


def part_file(part: int, num_parts: int) -> str:
    """Return the name of the file with one process's final state."""
    return f"state.part-{part}-of-{num_parts}.safetensors"


def write_part(
    folder: ResultsFolder, blueprint: Blueprint, run: Run, progress: Progress, part: int, num_parts: int
) -> dict[str, Any]:
    """Write this process's final state beside its snapshots; return its rows and summary for merging."""
    fields = progress.state._asdict()
    tensors = {name: value.cpu().contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    write_atomically(folder.path / "checkpoint" / part_file(part, num_parts), save(tensors))
    summary = summarise(blueprint, run.recorder.rows[-1], progress, releases(run), run.private.reproducible)
    return {"rows": plain(run.recorder.rows), "summary": plain(summary)}


def merge_parts(
    folder: ResultsFolder, run: Run, progress: Progress, parts: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> dict[str, Any]:
    """Write `metrics.jsonl`, `model.safetensors` and `summary.json` as one process would have; return the summary.

    `ranks` are those whose states are in this folder.
    """
    rows = [merge_rows(same) for same in zip(*(part["rows"] for part in parts), strict=True)]
    files = [folder.path / "checkpoint" / part_file(rank, len(parts)) for rank in ranks]
    state = _joined_state(progress, files)
    models_ND = run.algorithm.model(state)
    if len(ranks) == len(parts):
        average_D = run.algorithm.average(state)
        folder.write_model(average_D, models_ND)
        for name, values in run.task.evaluate(average_D[None]).items():
            rows[-1][f"{name}_average_model"] = float(values[0])
        rows[-1]["disagreement"] = float((models_ND - models_ND.mean(0)).pow_(2).sum(1).mean().sqrt())
    else:  # nobody has all models, so nobody can average them
        write_atomically(folder.path / "model.safetensors", save({"node_models": models_ND.contiguous()}))
    summary = merge_summaries(parts, rows[-1])
    write_atomically(folder.path / "metrics.jsonl", "".join(json.dumps(plain(row)) + "\n" for row in rows).encode())
    write_json(folder.path / "summary.json", summary)
    for file in files:
        file.unlink()
    return summary


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows that the processes wrote at the same step."""
    merged = dict(rows[0])
    for key in [key for key in merged if key == "nodes" or key.endswith("_nodes")]:
        merged[key] = [value for row in rows for value in row[key]]
        if f"{key[:-1]}_mean" in merged:
            values = torch.tensor(merged[key])  # the same sum in the same precision as in one process
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


def _joined_state(progress: Progress, files: Sequence[Path]) -> Any:
    loaded = [load_file(file) for file in files]
    tensors = {
        name: torch.cat([part[name] for part in loaded]) if "_N" in name else value for name, value in loaded[0].items()
    }
    return type(progress.state)(**tensors, step=progress.state.step, round=progress.state.round)
