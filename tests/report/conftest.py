"""Small results folders, written by hand the way a run writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

MakeFolder = Callable[..., Path]

CONFIG = """
[task]
name = "mnist"
partition = "{partition}"

[algorithm]
name = "{algorithm}"
steps = 30

[compression]
spec = "{compression}"

[privacy]
epsilon = 0.5
"""


def row(step: int, nodes: int, final: float, bytes_per_step: int, epsilon: float) -> dict[str, Any]:
    """Return an evaluation on a learning curve that ends at `final` after 30 steps."""
    mean = 0.1 + (final - 0.1) * (1 - math.exp(-step / 6)) / (1 - math.exp(-5))
    values = [
        mean + 0.004 * ((node * 7) % nodes - (nodes - 1) / 2) * (step > 0) for node in range(nodes)
    ]
    sent = bytes_per_step * step
    return {
        "step": step,
        "round": step,
        "nodes": list(range(nodes)),
        "accuracy_nodes": values,
        "accuracy_node_mean": sum(values) / nodes,
        "accuracy_node_min": min(values),
        "accuracy_average_model": mean + 0.006 * (step > 0),
        "disagreement": 4 * (1 - final) * step / (0.4 + 0.2 * step),
        "bytes_per_edge": sent,
        "bytes_sent_nodes": [4 * sent] * nodes,
        "epsilon_nodes": [epsilon * math.sqrt(step / 30)] * nodes
        if math.isfinite(epsilon)
        else ["inf"] * nodes,
        "seconds": 1.4 * step,
    }


def write_folder(
    parent: Path,
    name: str = "first",
    *,
    nodes: int = 10,
    final: float = 0.891,
    bytes_per_step: int = 13_667,
    epsilon: float = 0.4987,
    **changes: Any,
) -> Path:
    """Write a results folder; further keyword arguments replace entries of its summary."""
    folder = parent / name
    (folder / "ledger").mkdir(parents=True)
    rows = [row(step, nodes, final, bytes_per_step, epsilon) for step in range(0, 31, 5)]
    rows[-1]["final"] = True
    last = rows[-1]
    summary: dict[str, Any] = {
        "algorithm": "dp-csgp",
        "task": "mnist",
        "model": "mlp:128",
        "features": "standardize",
        "partition": "iid",
        "graph": "directed_exponential",
        "num_nodes": nodes,
        "steps": 30,
        "compression": "rot:1",
        "mixing_rate": 0.467,
        "mixing_radius": 0.818,
        "private": True,
        "seeded": False,
        "epsilon": epsilon if math.isfinite(epsilon) else "inf",
        "epsilon_claimed": 0.5,
        "delta": 1e-4,
        "neighbouring_relation": "add or remove one example of one node",
        "noise_multiplier": [4.321] * nodes,
        "releases": [30] * nodes,
        **{
            key: last[key]
            for key in ("accuracy_node_mean", "accuracy_node_min", "accuracy_average_model")
        },
        "disagreement": last["disagreement"],
        "bytes_per_edge": last["bytes_per_edge"],
        "bytes_sent_per_node": last["bytes_sent_nodes"][0],
        "bits_paper": 8 * last["bytes_per_edge"],
        "theorem_satisfied": None,
        "seconds": last["seconds"],
        "stopped_because": "completed",
    }
    summary |= changes
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (folder / "config.toml").write_text(CONFIG.format(**summary))
    packages = {"dpcsgp": "0.1.0", "torch": "2.9.0"}
    environment = {
        "run_id": "0",
        "python": "3.11.2",
        "platform": "Linux x86_64",
        "packages": packages,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Return a function that writes results folders side by side."""
    return partial(write_folder, tmp_path)


@pytest.fixture(scope="session")
def four_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return four runs as a reader would compare them: ours, exact, alone, the paper's noise."""
    make = partial(write_folder, tmp_path_factory.mktemp("four"))
    return [
        make("ours"),
        make("exact", algorithm="dp-sgp", compression="none", final=0.894, bytes_per_step=407_100),
        make(
            "alone",
            algorithm="local",
            compression="none",
            final=0.848,
            bytes_per_step=0,
            disagreement=None,
        ),
        make(
            "as printed",
            compression="rand:0.75",
            final=0.52,
            bytes_per_step=305_000,
            epsilon=345.2,
            private=False,
            seeded=True,
            theorem_satisfied=False,
            mixing_radius=1.08,
        ),
    ]
