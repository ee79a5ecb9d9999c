"""One party in a process of its own, to be killed: trains, saves, and goes on when started again.

Gradients are functions of step and node here; that a private one is never drawn anew is the
business of the private step. Every byte of a frame that is about to leave is noted in a file.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from parties import QUICK, ROSTER

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import frames
from dpcsgp.compression.parsing import parse_compressor
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.graphs import Topology, from_edges
from dpcsgp.randomness import PublicRandomness
from dpcsgp.records.checkpoint import CheckpointFolder

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["party_process"])
SPEC, DIM, EVERY = "rot:1", 2000, 7
TENSORS = ("x_ND", "x_hat_ND", "pull_ND", "y_N1", "anchor_D")


def graph() -> Topology:
    """Return three nodes, some edges in one direction only."""
    return from_edges(3, [(0, 1), (1, 0), (1, 2), (2, 0)])


def method() -> DPCSGP:
    """Return the method of all parties."""
    return DPCSGP(parse_compressor(SPEC), learning_rate=0.1, mixing_rate=0.3)


def size() -> int:
    """Return the size of every frame in bytes."""
    return frames.frame_bytes(parse_compressor(SPEC).num_bytes(DIM))


def gradient(step: int, nodes: tuple[int, ...], model_ND: Tensor) -> Tensor:
    """Return noisy gradients of made-up losses."""
    rows = [
        torch.randn(DIM, generator=torch.Generator().manual_seed(1000 * step + n)) for n in nodes
    ]
    return model_ND - torch.stack(rows)


def one_step(state: Any, network: Any) -> Any:
    """Return the state after one step."""
    method_ = method()
    grad_ND = gradient(state.step, network.nodes, method_.model(state))
    return method_.step(state, grad_ND, network, PublicRandomness(0, network.nodes))


def take_part(folder: str, node: int, peers: list[Peer], key_pem: bytes, steps: int) -> None:
    """Train to the end from wherever the last start left off; write the last state."""
    torch.set_num_threads(1)
    own = peers[node]
    home = Path(folder) / own.name
    home.mkdir(exist_ok=True)
    tap(home / "tap")
    myself = Self(node, own.name, key_pem, own.certificate_pem, own.address)
    checkpoints = CheckpointFolder(home / "checkpoint", "test")
    network = PartyNetwork(
        myself,
        peers,
        graph(),
        ROSTER,
        home / "journal",
        lambda round_: size() if round_ < steps else 0,
        steps,
        timing=QUICK,
    )
    with closing(network):
        state = _restored(network, checkpoints)
        while state.step < steps:
            state = one_step(state, network)
            if state.step % EVERY == 0 or state.step == steps:
                _save(state, network, checkpoints)
            time.sleep(0.004)
        network.finish()
    (home / "done").touch()


def _restored(network: PartyNetwork, checkpoints: CheckpointFolder) -> Any:
    state = method().init(torch.zeros(1, DIM))
    complete = checkpoints.complete_steps()
    if not complete:
        return state
    found = checkpoints.load(complete[-1])
    network.traffic.restore(**found.meta["traffic"])
    return state._replace(**found.tensors, step=found.step, round=found.meta["round"])


def _save(state: Any, network: PartyNetwork, checkpoints: CheckpointFolder) -> None:
    tensors = {name: getattr(state, name) for name in TENSORS}
    meta = {"round": state.round, "traffic": network.traffic.as_dict()}
    checkpoints.save(state.step, tensors, meta)
    # Two checkpoints are kept; a damaged one would mean to resume from the one before.
    network.forget_before(min(checkpoints.complete_steps()))


def tap(path: Path) -> None:
    """Note every piece of a frame before it leaves."""
    tap = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    piece = Journal.piece

    def noted(self: Journal, round_: int, start: int, size: int) -> bytes:
        content = piece(self, round_, start, size)
        line = [round_, start, hashlib.blake2b(content).hexdigest()]
        os.write(tap, json.dumps(line).encode() + b"\n")
        return content

    Journal.piece = noted
