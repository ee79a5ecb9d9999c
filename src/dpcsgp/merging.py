"""Many processes, one results folder: rows, models and summaries of all parts are put together by rank 0.

Legend: N nodes, D coordinates; a tensor whose name ends in `_N...` has one row per node of its process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dpcsgp.assembly import Blueprint
from dpcsgp.files import write_atomically
from dpcsgp.recording import plain, write_json
from dpcsgp.results import ResultsFolder, releases, summarise
from dpcsgp.training import Progress, Run

_JOINED = ("nodes", "bytes_sent_nodes", "epsilon_nodes")


def write_part(
    folder: ResultsFolder, blueprint: Blueprint, run: Run, progress: Progress, part: int, num_parts: int
) -> dict[str, Any]:
    """Write this process's final state; return its rows and summary for merging."""
    fields = progress.state._asdict()
    tensors = {name: value.cpu().contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    name = f"model.part-{part}-of-{num_parts}.safetensors"
    write_atomically(folder.path / name, save(tensors))
    summary = summarise(blueprint, run.recorder.rows[-1], progress, releases(run), run.private.reproducible)
    return {"file": name, "rows": plain(run.recorder.rows), "summary": plain(summary)}


def merge_parts(
    folder: ResultsFolder, run: Run, progress: Progress, parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write `metrics.jsonl`, `model.safetensors` and `summary.json` as one process would have; return the summary."""
    rows = [merge_rows(same) for same in zip(*(part["rows"] for part in parts), strict=True)]
    summary = _merge_summaries([part["summary"] for part in parts])
    if all((folder.path / part["file"]).exists() for part in parts):
        state = _whole_state(folder, progress, [part["file"] for part in parts])
        models_ND, average_D = run.algorithm.model(state), run.algorithm.average(state)
        folder.write_model(average_D, models_ND)
        for name, values in run.task.evaluate(average_D[None]).items():
            rows[-1][f"{name}_average_model"] = float(values[0])
        rows[-1]["disagreement"] = float((models_ND - models_ND.mean(0)).pow_(2).sum(1).mean().sqrt())
    # Machines that share no disk keep their own nodes' models; nobody has all of them, so nobody can average.
    final = {
        key: value for key, value in rows[-1].items() if key.endswith(("_node_mean", "_node_min", "_average_model"))
    }
    summary |= final | {
        "disagreement": rows[-1].get("disagreement"),
        "bytes_sent_per_node": max(rows[-1]["bytes_sent_nodes"]),
    }
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(folder.path / "metrics.jsonl", text.encode())
    write_json(folder.path / "summary.json", summary)
    return summary


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows that the processes wrote at the same step."""
    merged = dict(rows[0])
    for key in merged:
        if key in _JOINED or key.endswith("_nodes"):
            merged[key] = [value for row in rows for value in row[key]]
    for key in [key for key in merged if key.endswith("_nodes") and f"{key[:-1]}_mean" in merged]:
        values = merged[key]
        merged[f"{key[:-1]}_mean"] = sum(values) / len(values)
        merged[f"{key[:-1]}_min"] = min(values)
    merged["seconds"] = max(row["seconds"] for row in rows)
    return merged


def _merge_summaries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(summaries[0])
    merged["epsilon"] = plain(max(float(summary["epsilon"]) for summary in summaries))
    merged["private"] = all(summary["private"] for summary in summaries)
    merged["seeded"] = any(summary["seeded"] for summary in summaries)
    merged["releases"] = [count for summary in summaries for count in summary["releases"]]
    merged["seconds"] = max(summary["seconds"] for summary in summaries)
    return merged


def _whole_state(folder: ResultsFolder, progress: Progress, files: Sequence[str]) -> Any:
    loaded = [load_file(folder.path / name) for name in files]
    tensors = {
        name: torch.cat([part[name] for part in loaded]) if "_N" in name else value for name, value in loaded[0].items()
    }
    return type(progress.state)(**tensors, step=progress.state.step, round=progress.state.round)
