"""A competitor in a process of its own, timed in turn with ours.

Our command line tells the C library to keep freed memory (`dpcsgp.runtime.memory`). A user of
another library has not done that, and its speed depends on it: so it runs in a process with the
system's defaults, and waits while others are timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from dpcsgp.errors import DpcsgpError


class Peer:
    """`python -m dpcsgp.benchmarking opacus WORKLOAD MODE`, one gradient of all nodes per call."""

    def __init__(self, workload: str, mode: str) -> None:
        arguments = [sys.executable, "-m", "dpcsgp.benchmarking", "opacus", workload, mode]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name = mode

    def __call__(self) -> tuple[float, float]:
        """Compute once; return the seconds it took by the wall clock and by the processor."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            wall, cpu = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise DpcsgpError(f"Opacus {self.name} does not run beside this torch") from None
        return wall, cpu

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # it had ended before it read the last line
            self._process.stdin.close()
        self._process.stdout.close()


def serve(workload: str, mode: str) -> None:
    """Be the process of a peer: one gradient and one line of times for every line of input."""
    from dpcsgp.benchmarking.models import model_workload, one_thread
    from dpcsgp.benchmarking.workload import WORKLOADS

    if workload.startswith("model "):
        with one_thread():
            _answer(model_workload(workload.removeprefix("model ")).opacus(mode))
    else:
        _answer(WORKLOADS[workload].opacus(mode))


def _answer(gradients: Callable[[], object]) -> None:
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        gradients()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
