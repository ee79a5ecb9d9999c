"""Parties are killed at random moments: the run ends with the simulator's bits all the same."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from parties import federation
from party_process import DIM, FORKS, TENSORS, graph, method, one_step, take_part

from dpcsgp.network import Simulator
from dpcsgp.records.checkpoint import CheckpointFolder


class Tapped(Simulator):
    """A simulator that keeps a digest of every frame."""

    def exchange(self, frames_NB: torch.Tensor) -> torch.Tensor:
        self.seen = getattr(self, "seen", [])
        self.seen.append([hashlib.blake2b(row.numpy().tobytes()).hexdigest() for row in frames_NB])
        return super().exchange(frames_NB)


def kill_at_random(folder: Path, steps: int, kills: int, seed: int, outbound: list[int]) -> int:
    """Run three parties, kill one after the other at random; return how many kills there were."""
    chance, (selves, peers) = random.Random(seed), federation(3, outbound)

    def start(node: int) -> Any:
        words = (str(folder), node, peers, selves[node].key_pem, steps)
        process = FORKS.Process(target=take_part, args=words)
        process.start()
        return process

    running, done = {node: start(node) for node in range(3)}, 0
    deadline = time.monotonic() + 60 + 3 * kills
    try:
        while any((folder / peer.name / "done").exists() is False for peer in peers):
            assert time.monotonic() < deadline, {n: p.exitcode for n, p in running.items()}
            time.sleep(chance.uniform(0.02, 0.5))
            node = chance.randrange(3)
            if done < kills and running[node].exitcode is None:
                running[node].kill()
                running[node].join()
                done += 1
                running[node] = start(node)
            for node, process in running.items():
                assert process.exitcode in (None, 0), f"node {node} failed"
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return done


def check_against_simulator(folder: Path, steps: int) -> None:
    """Compare models, and every frame that left, with an undisturbed run in one process."""
    network = Tapped(graph())
    state = method().init(torch.zeros(3, DIM))
    for _ in range(steps):
        state = one_step(state, network)
    for node, name in enumerate(("anna", "bert", "carla")):
        found = CheckpointFolder(folder / name / "checkpoint", "test").load(steps)
        for tensor in set(TENSORS) - {"anchor_D"}:
            assert torch.equal(found.tensors[tensor][0], getattr(state, tensor)[node]), tensor
        lines = (folder / name / "tap").read_text().splitlines()
        seen = {(round_, start, digest) for round_, start, digest in map(json.loads, lines)}
        # One frame per round, and the simulator's: never two different ones.
        assert seen == {(t, 0, network.seen[t][node]) for t in range(steps)}


@pytest.mark.slow
@pytest.mark.parametrize("outbound", [[], [2]], ids=["all reachable", "one calls out only"])
def test_killed_parties_end_as_the_simulator_does(tmp_path: Path, outbound: list[int]) -> None:
    assert kill_at_random(tmp_path, steps=150, kills=5, seed=3, outbound=outbound) == 5
    check_against_simulator(tmp_path, 150)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
def test_over_a_hundred_kills_change_nothing(tmp_path: Path, seed: int) -> None:
    assert kill_at_random(tmp_path, 4000, kills=100, seed=seed, outbound=[seed]) == 100
    check_against_simulator(tmp_path, 4000)
