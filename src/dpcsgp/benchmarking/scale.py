"""From ten to a thousand simulated nodes: cost per node and step, and peak memory.

Each size runs in a process of its own (`python -m dpcsgp.benchmarking scale 100 5 full`), so that
its peak memory is its own: whole steps of DP-CSGP with `rot:1` on the exponential graph, 784-128-10
network, expected batch 32, ledger on disk. The processes of all sizes are started in turn, several
times, and the quickest visit of each size counts.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from dpcsgp.benchmarking.peak import in_own_process, peak_bytes
from dpcsgp.benchmarking.stopwatch import Clock, Ratio, deciding_clock
from dpcsgp.benchmarking.workload import Workload

SIZES: Final = (10, 30, 100, 300, 1000)
QUICK_SIZES: Final = (2, 4)
GROWTH_LIMIT: Final = 1.5
MEMORY_LIMIT: Final = 8e9


@final
@dataclass(frozen=True)
class ScalePoint:
    """One number of nodes: seconds per node and step, peak memory, size of N x D float32."""

    num_nodes: int
    wall: float
    cpu: float
    peak: float  # bytes
    before: float  # bytes of the process before it trained
    matrix: float  # bytes of one N x D float32 tensor

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "matrices": self.matrices}

    @property
    def matrices(self) -> float:
        """Return the peak beyond the set-up (program, examples) in N x D float32 tensors."""
        return (self.peak - self.before) / self.matrix


def benchmark_scale(quick: bool = False) -> tuple[list[Ratio], list[ScalePoint]]:
    """Run all sizes and compare the largest with the smallest."""
    clock = deciding_clock()
    sizes, visits = (QUICK_SIZES, 1) if quick else (SIZES, 2)
    seen: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(visits):
        for size in sizes:
            # fewer steps of larger sizes, but enough for a median
            steps = 2 if quick else max(3, min(20, 600 // size))
            seen[size].append(
                in_own_process("scale", str(size), str(steps), "quick" if quick else "full")
            )
    points = [_quickest(size, found, clock) for size, found in seen.items()]
    return _ratios(points, clock), points


def _quickest(size: int, found: Sequence[dict[str, float]], clock: Clock) -> ScalePoint:
    best = min(found, key=lambda one: one[clock])
    return ScalePoint(size, best["wall"], best["cpu"], best["peak"], best["before"], best["matrix"])


def _ratios(points: Sequence[ScalePoint], clock: Clock) -> list[Ratio]:
    first, last = points[0], points[-1]
    values = {each: getattr(last, each) / getattr(first, each) for each in ("wall", "cpu")}
    name = f"{last.num_nodes} nodes"
    growth = Ratio.single(
        "scale",
        name,
        f"{first.num_nodes} nodes",
        values[clock],
        getattr(last, clock),
        getattr(first, clock),
        clock=clock,
        value_wall=values["wall"],
        value_cpu=values["cpu"],
        limit=GROWTH_LIMIT,
        note="growth of the cost per node and step",
    )
    share = last.peak / MEMORY_LIMIT
    note = f"peak memory; {last.matrices:.1f} tensors of N x D float32 beyond program and examples"
    memory = Ratio.single(
        "scale", name, "8 GB", share, last.peak, MEMORY_LIMIT, unit="B", limit=1.0, note=note
    )
    return [growth, memory]


def run_size(num_nodes: int, steps: int, quick: bool) -> dict[str, float]:
    """Train in this process and return medians per node and step, and the peak memory."""
    from dpcsgp.benchmarking.step import time_steps, training_run

    if quick:
        work = Workload("mlp:8", (16,), num_nodes, batch_size=4, examples_per_node=12)
    else:
        work = Workload("mlp:128", (784,), num_nodes, batch_size=32, examples_per_node=60)
    with training_run(work, steps + 1) as run:
        before = peak_bytes()
        times = time_steps(run)
        return {
            "wall": times.median("wall") / num_nodes,
            "cpu": times.median("cpu") / num_nodes,
            "peak": peak_bytes(),
            "before": before,
            "matrix": 4 * num_nodes * run.anchor_D.numel(),
        }
