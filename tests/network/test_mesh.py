"""Processes connect along the edges of the graph, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from real_processes import TINY, processes, settings, wait_for_steps

LONG = [*TINY, "algorithm.steps=100000", "graph.name=directed_ring"]


def connections(pid: int) -> int:
    """Return how many TCP connections a process has (Linux)."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    established = {words[9] for words in lines if words[3] == "01"}
    targets = [path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(target.removeprefix("socket:").strip("[]") in established for target in targets)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads connections from /proc")
def test_a_process_of_a_ring_has_two_neighbours_whatever_its_length(tmp_path: Path) -> None:
    counts = {}
    for size in (3, 6):
        out = tmp_path / f"ring-{size}"
        words = ["run", *settings(*LONG, f"graph.num_nodes={size}"), "--out", str(out)]
        folder = tmp_path / str(size)
        folder.mkdir()
        with processes([words] * size, folder) as children:
            wait_for_steps(out, 3, node=2)
            counts[size] = connections(children[2].pid)
    assert counts[6] == counts[3], counts
