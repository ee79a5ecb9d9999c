"""Peak memory of one piece of work, measured in a process of its own (see `__main__`)."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from dpcsgp.errors import DpcsgpError


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    # On Linux, getrusage would start from the size of the process that started this one.
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def in_own_process(*arguments: str) -> dict[str, float]:
    """Run `python -m dpcsgp.benchmarking arguments`; return the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", "dpcsgp.benchmarking", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise DpcsgpError(
            f"benchmark {' '.join(arguments)}: its process ended with {done.returncode}: "
            f"{lines[-1]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def gradient_memory(workload: str, way: str) -> float:
    """Return the bytes of private gradients beyond the set-up; `way`: ours, plain, a mode."""
    return in_own_process("memory", workload, way)["bytes"]


def measure_gradient_memory(workload: str, way: str) -> dict[str, float]:
    """Compute two gradients in this process and return how far its peak rose."""
    from dpcsgp.benchmarking.workload import WORKLOADS

    work = WORKLOADS[workload]
    ways = {"ours": lambda: work.private(secure=True), "plain": work.plain}
    gradients = ways[way]() if way in ways else work.opacus(way)
    before = peak_bytes()
    gradients()
    gradients()
    return {"bytes": peak_bytes() - before}
