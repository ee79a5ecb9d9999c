"""One process of test_twin.py: the simulator's gossip between real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dpcsgp.algorithms import DPCSGP, DPBlock, Network
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import Topology, from_edges
from dpcsgp.network import Traffic
from dpcsgp.network.health import Health
from dpcsgp.network.torch_distributed import ProcessEnvironment, TorchDistributed, nodes_of_ranks
from dpcsgp.randomness import PublicRandomness, numpy_generator

DIM, STEPS, NUM_NODES = 193, 25, 5
SPECS = ["none", "rand:0.3", "gsgd:4/64", "sign", "rot:1", "block none"]


def irregular() -> Topology:
    ring = [(node, (node + 1) % NUM_NODES) for node in range(NUM_NODES)]
    return from_edges(NUM_NODES, [*ring, (0, 2), (0, 3), (3, 1)])


def gradients(step: int, nodes: tuple[int, ...]) -> torch.Tensor:
    rows = [numpy_generator(step * 100 + node, "gradient").normal(size=DIM) for node in nodes]
    return torch.tensor(np.stack(rows), dtype=torch.float32)


class Recorded:
    """A network that keeps the frames its nodes sent."""

    def __init__(self, network: Network) -> None:
        self.network, self.sent = network, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.network, name)

    def exchange(self, frames_NB: torch.Tensor) -> torch.Tensor:
        self.sent.append(frames_NB.clone())
        return self.network.exchange(frames_NB)


def trace(network: Network, spec: str) -> dict[str, torch.Tensor]:
    """Run the steps; return the hosted nodes' final state, their frames, and the bytes counted."""
    recorded = Recorded(network)
    compressor = parse_compressor(spec.removeprefix("block "))
    method = (
        DPBlock(0.1, 3, compressor=compressor)
        if spec.startswith("block ")
        else DPCSGP(compressor, 0.1, 0.5)
    )
    state = method.init(torch.zeros(len(network.nodes), DIM))
    random = PublicRandomness(7, network.nodes)
    for step in range(STEPS):
        grad_ND = gradients(step, network.nodes)
        state = method.step(state, grad_ND, recorded, random)  # type: ignore[arg-type]
    tensors = {
        name: value
        for name, value in state._asdict().items()
        if isinstance(value, torch.Tensor) and "_N" in name
    }
    frames = torch.cat([frame.flatten(1) for frame in recorded.sent], dim=1)
    sent = torch.tensor(network.traffic.bytes_sent)  # type: ignore[attr-defined]
    models = method.model(state)  # type: ignore[arg-type]
    return {**tensors, "models": models, "frames": frames, "bytes": sent}


def main(out: str) -> None:
    place = ProcessEnvironment.from_environment()
    assert place is not None
    health = Health(
        lambda: place.open_store(30), place.rank, nodes_of_ranks(NUM_NODES, place.world_size), 30
    )
    network = TorchDistributed(irregular(), place, place.open_store(30), health)
    results = {}
    for spec in SPECS:
        network.traffic = Traffic.of(irregular(), network.nodes)
        results |= {
            f"{spec}/{name}": tensor.contiguous() for name, tensor in trace(network, spec).items()
        }
    save_file(results, Path(out) / f"rank-{place.rank}.safetensors")
    network.gather_values("done", True)


if __name__ == "__main__":
    main(sys.argv[1])
