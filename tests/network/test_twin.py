"""Simulator and real processes: the same bytes on the wire and the same state to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from twin_worker import irregular, trace

from dpcsgp.network import Simulator
from dpcsgp.network.torch_distributed import serve_store


def real_processes(spec: str, world_size: int, out: Path) -> dict[str, torch.Tensor]:
    store = serve_store()
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    worker = Path(__file__).with_name("twin_worker.py")
    children = [
        subprocess.Popen([sys.executable, str(worker), spec, str(out)], env=environment | {"RANK": str(rank)})
        for rank in range(world_size)
    ]
    codes = [child.wait(timeout=120) for child in children]
    assert codes == [0] * world_size
    parts = [load_file(out / f"rank-{rank}.safetensors") for rank in range(world_size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [5, 2])
@pytest.mark.parametrize("spec", ["none", "rand:0.3", "gsgd:4/64", "sign", "rot:1", "block none"])
def test_bit_identical(spec: str, world_size: int, tmp_path: Path) -> None:
    simulated = trace(Simulator(irregular()), spec)
    real = real_processes(spec, world_size, tmp_path)
    for name, expected in simulated.items():
        assert torch.equal(real[name], expected), name
