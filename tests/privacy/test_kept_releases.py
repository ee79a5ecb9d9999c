"""The folder of kept releases, shared by all processes of a run on one machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import torch

from dpcsgp.privacy.kept_releases import KeptReleases, Release

RANKS, TIMES = 4, 150


def test_processes_that_end_together_all_clear_the_folder(tmp_path: Path) -> None:
    together = Barrier(RANKS)

    def live_and_end(rank: int) -> None:
        kept = KeptReleases(tmp_path / "kept", "run", (rank,), rank, RANKS)
        for step in range(TIMES):
            kept.keep(step, Release(torch.zeros(1, 3), (None,), 1))
            together.wait(20)
            kept.clear()
            together.wait(20)
            assert not (tmp_path / "kept").exists()
            together.wait(20)

    # Threads race for the folder as processes do: every call to the system lets the others run.
    with ThreadPoolExecutor(RANKS) as ranks:
        list(ranks.map(live_and_end, range(RANKS)))


def test_who_ends_first_leaves_what_the_others_keep(tmp_path: Path) -> None:
    first, second = (KeptReleases(tmp_path, "run", (rank,), rank, 2) for rank in range(2))
    for kept in (first, second):
        kept.keep(7, Release(torch.ones(1, 3), (None,), 1))
    (tmp_path / ".step-000008.part-1-of-2.safetensors.99.tmp").write_bytes(b"half")
    first.clear()
    assert (first.steps_from(0), second.steps_from(0)) == ([], [7])
    assert len(list(tmp_path.iterdir())) == 2
    second.clear()
    assert not tmp_path.exists()
