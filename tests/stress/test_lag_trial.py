"""Random delays against the law of constant ones; `pytest -m stress -s` prints the table."""

from __future__ import annotations

import pytest
import torch

from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import Topology, directed_exponential, directed_ring
from dpcsgp.graphs.lag import FLOOR_SHARE, lagged_moments
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import Course, Pace, play
from dpcsgp.randomness import PublicRandomness

DIM, ROUNDS = 200, 800


@pytest.mark.stress
@pytest.mark.parametrize("topology", [directed_ring(10), directed_exponential(6)], ids=str)
@pytest.mark.parametrize(
    ("lag", "rate"), [(8, 0.467), (8, 0.106), (3, 0.467), (3, 0.215), (1, 0.34)]
)
@pytest.mark.parametrize("slow", [(), (3,)], ids=["jitter", "one slow"])
def test_random_delays_keep_nodes_about_as_close_as_the_law_says(
    topology: Topology, lag: int, rate: float, slow: tuple[int, ...]
) -> None:
    pace = Pace(1.0, "exponential", slow, 3.0)
    timeline = play(Course(topology, ROUNDS, 0, lag, False, rate), pace, seed=0)
    network = LateSimulator(topology, timeline, lag)
    compressor, nodes = parse_compressor("rot:1"), range(topology.num_nodes)
    # A learning rate of 1 and unit noise for gradients: the drive of the law.
    method = LaggedDPCSGP(compressor, 1.0, rate, lag).hosting(topology, nodes)
    state, public = method.init(torch.zeros(len(nodes), DIM)), PublicRandomness(0, nodes)
    chance, found, lowest = torch.Generator().manual_seed(0), [], 1.0
    for _ in range(ROUNDS):
        state = method.descend(state, torch.randn(len(nodes), DIM, generator=chance))
        state = method.gossip(state, network, public)
        models_ND = method.model(state)
        found.append(float((models_ND - models_ND.mean(0)).pow(2).mean()))
        lowest = min(lowest, float(state.y_N1.min()))
    moments = compressor.moments(DIM)
    assert moments is not None
    law = lagged_moments(topology, moments.gain, moments.noise, rate, lag).disagreement
    measured = sum(found[ROUNDS // 2 :]) / (ROUNDS // 2)
    print(f"{topology.name} {len(slow)} slow, lag {lag}, rate {rate}: {measured:.1f} / {law:.1f}")
    assert measured <= 1.5 * law
    assert lowest >= FLOOR_SHARE * 0.99
