"""The results folder: settings, environment, rows, ledger, checkpoints, model and summary.

`summary.json` holds the three numbers that must be trusted: eps as verified by the accountant from
the ledger, bytes as counted when frames were sent, accuracy on public test data. """

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from dpcsgp.runs.build import new_run_id
from dpcsgp.runs.design import RunDesign
from dpcsgp.compression import parse_compressor
from dpcsgp.config import Config, load_config, per_node, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.records.files import write_atomically
from dpcsgp.graphs import graph_constants
from dpcsgp.privacy import neighbouring_relation
from dpcsgp.records.metrics import environment, write_json
from dpcsgp.training import Progress, Run


@dataclass(frozen=True)
class ResultsFolder:
    """A folder that belongs to exactly one run."""

    path: Path
    run_id: str

    @classmethod
    def create(cls, path: Path, config: Config) -> ResultsFolder:
        """Start a new folder; one that already holds a run is refused, so that nothing is
        overwritten."""
        if (path / "config.toml").exists():
            raise ConfigError(f"--out {path} already holds a run; continue it with --resume, or "
                              "name another folder")
        folder = cls(path, new_run_id())
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "environment.json", {"run_id": folder.run_id, **environment()})
            write_atomically(path / "config.toml", to_toml(config).encode())
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another "
                              "folder") from None
        return folder

    @classmethod
    def reopen(cls, path: Path) -> tuple[ResultsFolder, Config]:
        """Open the folder of a run that is to be continued."""
        try:
            run_id = json.loads((path / "environment.json").read_text())["run_id"]
        except (OSError, ValueError, KeyError):
            raise ConfigError(f"--resume: {path} holds no run (environment.json is missing or "
                              "damaged)") from None
        return cls(path, run_id), load_config(path / "config.toml")

    @classmethod
    def join(cls, path: Path, config: Config, run_id: str) -> ResultsFolder:
        """Use the folder that rank 0 made; on a machine that does not share its disk, make one of
        the same run."""
        if not (path / "environment.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "environment.json", {"run_id": run_id, **environment()})
            write_atomically(path / "config.toml", to_toml(config).encode())
        return cls(path, run_id)

    def finish(self, design: RunDesign, run: Run, progress: Progress) -> dict[str, Any]:
        """Write the model and the summary of a run that one process hosted; return the summary."""
        self.write_model(run.algorithm.average(progress.state), run.algorithm.model(progress.state))
        summary = summarise(design, run.recorder.rows[-1], progress, releases(run), run.private.reproducible)
        write_json(self.path / "summary.json", summary)
        return summary

    def write_model(self, average_D: Tensor, models_ND: Tensor) -> None:
        """Write the average model and every node's model as flat vectors in the order of the
        module's parameters."""
        tensors = {"average_model": average_D.cpu().contiguous(), "node_models": models_ND.cpu().contiguous()}
        write_atomically(self.path / "model.safetensors", save(tensors))


def releases(run: Run) -> list[int]:
    """Return how many releases each hosted node has made, replayed ones included."""
    return [sum(count for _, count in run.ledger.releases(node)) for node in run.network.nodes]


def theorem_satisfied(design: RunDesign) -> bool | None:
    """Say whether the compressor's omega is within what Theorem 1 permits; None if nothing is
    compressed."""
    if design.mixing_rate is None:
        return None
    if design.topology.num_nodes == 1:
        return True
    constants = graph_constants(design.topology, design.mixing_rate)
    compressor = parse_compressor(design.config.compression.spec)
    return compressor.omega_squared(design.dim) <= constants.largest_omega_spectral**2


def summarise(
    design: RunDesign, row: Mapping[str, Any], progress: Progress, counts: list[int], seeded: bool
) -> dict[str, Any]:
    """Put together what was released, sent and reached."""
    config, state = design.config, progress.state
    num_nodes = design.topology.num_nodes
    epsilon = max(row["epsilon_nodes"])
    claimed = max(per_node(config.privacy.epsilon, num_nodes)) if config.privacy.noise != "none" else math.inf
    claims = [per_node(config.privacy.epsilon, num_nodes)[node] for node in row["nodes"]]
    kept = config.privacy.noise != "none" and all(
        spent <= claim * (1 + 1e-9) for spent, claim in zip(row["epsilon_nodes"], claims, strict=True)
    )
    polished = progress.rounds_polished
    return {
        "algorithm": config.algorithm.name,
        "task": config.task.name,
        "model": config.task.model,
        "features": config.task.features,
        "partition": config.task.partition,
        "graph": config.graph.name,
        "num_nodes": num_nodes,
        "num_coordinates": design.dim,
        "steps": state.step,
        "compression": config.compression.spec,
        "mixing_rate": design.mixing_rate,
        "mixing_radius": design.mixing_radius,
        "theorem_satisfied": theorem_satisfied(design),
        "private": not seeded and math.isfinite(epsilon) and kept,
        "seeded": seeded,
        "epsilon": epsilon,
        "epsilon_claimed": claimed,
        "delta": max(per_node(config.privacy.delta, num_nodes)),
        "neighbouring_relation": neighbouring_relation(config.privacy.sampling),
        "noise_multiplier": list(design.mechanism.noise_multipliers),
        "releases": counts,
        **{key: value for key, value in row.items() if key.endswith(("_node_mean", "_node_min", "_average_model"))},
        "disagreement": row.get("disagreement"),
        "bytes_per_edge": row["bytes_per_edge"],
        "bytes_sent_per_node": max(row["bytes_sent_nodes"]),
        "bits_paper": design.paper_bits(state.round - polished, polished),
        "seconds": row["seconds"],
        "seconds_per_step": row["seconds"] / max(state.step, 1),
        "stopped_because": progress.stopped_because,
    }
