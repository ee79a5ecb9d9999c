"""Simulator and real processes: the same bytes on the wire and the same state to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from real_processes import all_end, processes
from twin_worker import SPECS, irregular, trace

from dpcsgp.network import Simulator


@pytest.fixture(
    scope="module", params=[5, 2], ids=["one node per process", "several nodes per process"]
)
def parts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, torch.Tensor]]:
    """Return what each process ended with, all specs of compressors in one start."""
    folder, world_size = tmp_path_factory.mktemp("twin"), request.param
    worker = str(Path(__file__).with_name("twin_worker.py"))
    with processes([[worker, str(folder)]] * world_size, folder) as children:
        all_end(children, 120)
        assert [child.code for child in children] == [0] * world_size, [
            child.said() for child in children
        ]
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_bit_identical(spec: str, parts: list[dict[str, torch.Tensor]]) -> None:
    for name, expected in trace(Simulator(irregular()), spec).items():
        real = torch.cat([part[f"{spec}/{name}"] for part in parts])
        assert torch.equal(real, expected), name
