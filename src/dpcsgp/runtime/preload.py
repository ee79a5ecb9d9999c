"""What the fork server imports: all that a worker needs, with its inner loops compiled.

Workers are forked from it and have both at once.
"""

from __future__ import annotations

from dpcsgp.kernels.numba_loops import compile_loops
from dpcsgp.runtime.process import run_worker

__all__ = ["run_worker"]

compile_loops()
