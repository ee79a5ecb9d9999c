"""Compiled loops run where there is nowhere to keep them, and keep to the order of arithmetic as
written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.kernels.numba_loops import compiled


def test_a_loop_without_a_file_of_its_own_is_compiled_all_the_same() -> None:
    found: dict[str, Any] = {}
    exec("def halve(x):\n    for i in range(x.size):\n        x[i] /= 2\n", found)
    halve: Callable[[np.ndarray], None] = compiled("void(float64[::1])")(found["halve"])
    values = np.array([3.0, 5.0])
    halve(values)
    assert values.tolist() == [1.5, 2.5]


@compiled("void(float32[::1], float32[::1], float32[::1])")
def _accumulate(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = (x[i] + y[i]) - x[i]


def test_sums_are_not_simplified() -> None:
    """(x + y) - x is y only in real numbers; a compiler that thinks so would make machines
    disagree."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((2, 1000)) * [[1e6], [1.0]]).astype(np.float32)
    out = np.empty_like(x)
    _accumulate(x, y, out)
    assert np.array_equal(out, (x + y) - x)
    assert not np.array_equal(out, y)


def test_damaged_files_of_an_earlier_process_do_not_matter(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import numpy as np; from dpcsgp.kernels.hadamard import flip; x = np.ones(64, 'f4'); "
        "flip(x, np.array([1], 'u8'), 4); print(x[0])",
    ]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for expected in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "-0.5", done.stderr
        kept = [*tmp_path.rglob("*.nbc"), *tmp_path.rglob("*.nbi")]
        assert len(kept) >= 2, expected
        for file in kept:
            file.write_bytes(file.read_bytes()[:50])


def test_importing_the_api_loads_neither_numba_nor_the_slow_parts_of_scipy() -> None:
    """They take a second and more; whoever uses a loop or an accountant loads them then."""
    code = (
        "import sys, dpcsgp; dpcsgp.train; "
        "print([name for name in ('numba', 'scipy.signal', 'scipy.stats', 'scipy.optimize', "
        "'networkx', 'matplotlib', 'pandas', 'sklearn', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
