"""Run a small grid in the folder that is named; test_grid.py interrupts it."""

from __future__ import annotations

import sys
from pathlib import Path

from dpcsgp.reproduction.grid import Cell, GridInterruptedError, run_grid

BASE = (
    "task.name=digits",
    "task.model=mlp:16",
    "graph.num_nodes=3",
    "graph.name=directed_ring",
    "privacy.epsilon=2",
    "algorithm.steps=600",
    "run.evaluate_every=200",
    "run.checkpoint_every=20",
    "run.seed=1",
    "privacy.seed=1",
)
CELLS = [
    Cell((*BASE, f"compression.spec={spec}"), {"method": spec}) for spec in ("rot:1", "gsgd:4/64")
]


def show(text: str, done: int, total: int) -> None:
    print(f"{done} of {total} {text}", flush=True)


if __name__ == "__main__":
    try:
        run_grid(CELLS, Path(sys.argv[1]), show, processes=2)
    except GridInterruptedError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
