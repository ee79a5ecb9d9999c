"""Many processes, one results folder: rows, models and summaries of all ranks are put together.

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

from dpcsgp.evaluation import average_scores
from dpcsgp.records.ending import Ending
from dpcsgp.records.files import write_atomically
from dpcsgp.records.metrics import plain
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import merge_summaries, summarise
from dpcsgp.training import Progress, Run

_MOST_BYTES = 10**9


@dataclass(frozen=True)
class SharedFolder:
    """Finds out which ranks write to the same folder, by marks that only this start knows."""

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
    """States of one process at its evaluations and at the end, for whoever averages all models."""

    path: Path
    rank: int
    world_size: int
    fields: tuple[str, ...]  # of the state: what models and average follow from
    every_row: bool = True  # False: only the last row gets to know the average model

    @classmethod
    def of(cls, folder: Path, rank: int, world_size: int, design: RunDesign) -> StateFiles:
        """Keep the state at every evaluation if those of all nodes fit into a gigabyte."""
        # Four bytes per coordinate, for every evaluation and node.
        steps = design.config.algorithm.steps
        evaluations = 1 + steps // (design.config.run.evaluate_every or steps)
        models = evaluations * design.topology.num_nodes
        fits = 4 * models * design.dim <= _MOST_BYTES
        return cls(folder / "checkpoint", rank, world_size, design.algorithm.model_fields, fits)

    def name(self, moment: int | str, rank: int) -> Path:
        """Return the file of a step (or "final") and rank."""
        return self.path / f"state-{moment}.part-{rank}-of-{self.world_size}.safetensors"

    def keep(self, moment: int | str, state: Any) -> None:
        """Write what the models and their average follow from."""
        if not self.every_row and moment != "final":
            return
        tensors = {name: getattr(state, name).cpu().contiguous() for name in self.fields}
        write_atomically(self.name(moment, self.rank), save(tensors))

    def joined(self, moment: int | str, ranks: Sequence[int], template: Any) -> Any:
        """Return the state of these ranks' nodes, otherwise like the template.

        None means that the file of one of them is missing.
        """
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


def write_part(
    design: RunDesign, run: Run, progress: Progress, states: StateFiles
) -> dict[str, Any]:
    """Write this process's final state beside its checkpoints; return its rows and summary."""
    states.keep("final", progress.state)
    summary = summarise(design, run, progress)
    return {"rows": plain(run.recorder.rows), "summary": plain(summary)}


def merge_parts(
    folder: ResultsFolder,
    run: Run,
    progress: Progress,
    parts: Sequence[Mapping[str, Any]],
    states: StateFiles,
    ranks: Sequence[int],
) -> dict[str, Any]:
    """Write rows, models and summary as one process would have.

    Args:
        folder: where.
        run: this process's part of the run: its method and its public test data are used.
        progress: where it ended.
        parts: what `write_part` returned in every process, by rank.
        states: files of the ranks' final states.
        ranks: those whose states are in this folder.

    Returns:
        The summary of the whole run.
    """
    # Every process wrote a row at the same steps, about its own nodes.
    rows = [merge_rows(same) for same in zip(*(part["rows"] for part in parts), strict=True)]
    final = states.joined("final", ranks, progress.state)
    average_D = None
    nodes = [node for rank in ranks for node in parts[rank]["rows"][-1]["nodes"]]
    if len(ranks) == len(parts):  # otherwise nobody has all models, and nobody can average them
        average_D = run.algorithm.average(final)
        moments = [states.joined(row["step"], ranks, progress.state) for row in rows[:-1]]
        for row, state in zip(rows, [*moments, final], strict=True):
            if state is not None:
                row |= average_scores(run, state)
    # Models, rows and summary, each by an atomic write; the summary last, as the sign of the end.
    complete = average_D is not None
    folder.write_model(average_D, run.algorithm.model(final), None if complete else nodes)
    lines = "".join(json.dumps(plain(row)) + "\n" for row in rows)
    write_atomically(folder.path / "metrics.jsonl", lines.encode())
    summary = merge_summaries(parts, rows[-1])
    folder.write_summary(summary)
    # A run that was interrupted will be asked for its earlier rows again.
    states.forget(ranks, "final" if progress.ending is Ending.INTERRUPTED else "*")
    return summary


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows that the processes wrote at the same step."""
    # Lists over nodes are joined in the order of ranks; the rest is rank 0's, but for two below.
    merged = dict(rows[0])
    for key in [key for key in merged if key == "nodes" or key.endswith("_nodes")]:
        merged[key] = [value for row in rows for value in row[key]]
        mean, least = f"{key[:-1]}_mean", f"{key[:-1]}_min"
        if mean in merged:
            values = torch.tensor(merged[key])  # the same sum and precision as in one process
            merged[mean], merged[least] = float(values.mean()), float(values.min())
    if "residual_ratio" in merged:  # a mean over nodes: weighted by how many each process hosts
        sizes = [len(row["bytes_sent_nodes"]) for row in rows]
        total = sum(row["residual_ratio"] * size for row, size in zip(rows, sizes, strict=True))
        merged["residual_ratio"] = total / sum(sizes)
    merged["seconds"] = max(row["seconds"] for row in rows)
    return merged
