"""Quantised block gossip: its law against a Kronecker product, simulation and the algorithm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpcsgp.algorithms import DPBlock
from dpcsgp.compression import parse_compressor
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.graphs import (
    Topology,
    block_disagreement,
    block_radius,
    block_spread,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    random_digraph,
    star,
)
from dpcsgp.graphs.spectrum import stationary
from dpcsgp.graphs.stability import GossipMoments
from dpcsgp.network import Simulator
from dpcsgp.planning import declared_facts
from dpcsgp.randomness import PublicRandomness
from dpcsgp.runs.design import design_run

GRAPHS = {
    "exponential": directed_exponential(5),
    "ring": directed_ring(4),
    "star": star(5),
    "irregular": random_digraph(6, 0.3, seed=2),
}
LAWS = [(1.0, 0.0), (1.0, 0.3), (0.64, 0.23), (0.5, 0.25), (1.0, 1.5)]


def kronecker_radius(topology: Topology, gain: float, noise: float) -> float:
    """Return the root spectral radius of V -> M V M' + noise B diag(V) B' on zero-sum moments."""
    n = topology.num_nodes
    apart = topology.weights - np.eye(n)
    mean = np.eye(n) + gain * apart
    zero_sum = np.eye(n) - np.outer(stationary(topology), np.ones(n))
    operator = np.kron(mean, mean)
    for j in range(n):
        operator[:, j * n + j] += noise * np.kron(apart[:, j], apart[:, j])
    projection = np.kron(zero_sum, zero_sum)
    return math.sqrt(np.abs(np.linalg.eigvals(projection @ operator @ projection)).max())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("gain", "noise"), LAWS)
def test_the_radius_is_that_of_the_second_moment_operator(
    name: str, gain: float, noise: float
) -> None:
    found = GossipMoments(GRAPHS[name], gain, noise, 1.0, whole_values=True).radius
    assert found == pytest.approx(kronecker_radius(GRAPHS[name], gain, noise), rel=1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_spread_and_the_disagreement_are_those_of_a_simulated_law(name: str) -> None:
    """One block with gain and noise as stated; a shared displacement of 3, or unit noise."""
    topology, gain, noise = GRAPHS[name], 0.8, 0.1
    gossip = GossipMoments(topology, gain, noise, 1.0, whole_values=True)
    scale = topology.num_nodes * stationary(topology)[:, None]
    random = np.random.default_rng(1)
    apart = topology.weights - np.eye(topology.num_nodes)
    for drive, shared, predicted in (
        (0.0, 3.0, 9 * gossip.persistent_spread**2),
        (1.0, 0.0, gossip.disagreement),
    ):
        x = np.zeros((topology.num_nodes, 20_000)) + shared * scale
        seen = []
        for round_ in range(400):
            x += drive * random.standard_normal(x.shape)
            # the law leaves out the drift of the mean
            x -= drive * stationary(topology)[:, None] * x.sum(0)
            size = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
            x += apart @ (gain * x + math.sqrt(noise) * size * random.standard_normal(x.shape))
            if round_ >= 200:
                seen.append(np.mean((x / scale - x.mean(0)) ** 2))
        assert np.mean(seen) == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize(("spec", "num_blocks"), [("rot:2", 2), ("gsgd:8/64", 3), ("rand:0.5", 1)])
def test_the_spread_is_what_real_messages_leave(spec: str, num_blocks: int) -> None:
    topology, compressor, dim = directed_exponential(6), parse_compressor(spec), 3000
    algorithm, network, random = (
        DPBlock(1.0, num_blocks, compressor=compressor),
        Simulator(topology),
        PublicRandomness(1, range(6)),
    )
    shared = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    state = algorithm.init(shared.expand(6, dim).clone())
    seen = []
    for round_ in range(60 * num_blocks):
        state = algorithm.gossip(state, network, random)
        if round_ >= 20 * num_blocks:
            models = algorithm.model(state)
            seen.append(float((models - models.mean(0)).square().mean()))
    size = float(algorithm.average(state).square().mean())
    assert math.sqrt(np.mean(seen) / size) == pytest.approx(
        block_spread(topology, compressor, num_blocks, dim), rel=0.05
    )


@pytest.mark.parametrize("topology", [directed_exponential(6), random_digraph(6, 0.3, seed=2)])
def test_exact_blocks_disagree_as_in_a_simulation(topology: Topology) -> None:
    num_blocks, exact = 4, parse_compressor("none")
    random = np.random.default_rng(1)
    x = np.zeros((6, 3000))
    scale = 6 * stationary(topology)[:, None]
    seen = []
    for round_ in range(400):
        x += random.standard_normal(x.shape)
        block = slice(round_ % num_blocks, None, num_blocks)
        x[:, block] = topology.weights @ x[:, block]
        if round_ >= 100:
            seen.append(((x / scale - x.mean(0)) ** 2).mean())
    assert block_disagreement(topology, exact, num_blocks, 1000) == pytest.approx(
        np.mean(seen), rel=0.02
    )
    assert block_spread(topology, exact, num_blocks, 1000) == 0.0


def test_no_law_no_answer() -> None:
    setting = (directed_ring(4), parse_compressor("top:0.1"), 2, 1000)
    assert all(
        math.isnan(answer(*setting)) for answer in (block_radius, block_disagreement, block_spread)
    )


def test_many_nodes_are_answered_by_walking() -> None:
    compressor = parse_compressor("gsgd:8/64")
    assert block_radius(directed_exponential(200), compressor, 10, 100_000) < 1
    assert block_spread(complete(80), compressor, 1, 100_000) == pytest.approx(
        block_spread(complete(20), compressor, 1, 100_000), rel=0.1
    )


@pytest.mark.parametrize("spec", ["none", "rot:2"])
def test_blocks_drawn_at_random_are_slower(spec: str) -> None:
    """A simulation of the law: one of K blocks a round by lot, unit noise in every round."""
    topology, num_blocks, compressor, random = (
        directed_exponential(6),
        5,
        parse_compressor(spec),
        np.random.default_rng(2),
    )
    moments = compressor.moments(400)
    assert moments is not None
    apart, coordinates = topology.weights - np.eye(6), 20_000
    x, seen = np.zeros((6, coordinates)), []
    for round_ in range(400):
        x += random.standard_normal(x.shape)
        x -= x.mean(0)  # the drift of the mean is left out
        chosen = random.integers(num_blocks, size=coordinates) == 0
        size = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        noise = math.sqrt(moments.noise) * size * random.standard_normal(x.shape)
        x += np.where(chosen, apart @ (moments.gain * x + noise), 0.0)
        if round_ >= 100:
            seen.append(np.mean(x**2))
    setting = (topology, compressor, num_blocks, 2000)
    assert block_disagreement(*setting, "random") == pytest.approx(np.mean(seen), rel=0.03)
    in_turn, by_lot = block_radius(*setting), block_radius(*setting, "random")
    assert by_lot == pytest.approx(math.sqrt(1 - (1 - in_turn ** (2 * num_blocks)) / num_blocks))
    assert in_turn < by_lot < 1


@pytest.mark.parametrize("spec", ["none", "gsgd:8/64", "rot:1", "rand:0.5"])
def test_one_node_agrees_with_itself(spec: str) -> None:
    setting = (complete(1), parse_compressor(spec), 2, 100)
    assert [answer(*setting) for answer in (block_radius, block_disagreement, block_spread)] == [
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
def test_exact_averaging_leaves_nothing(num_nodes: int) -> None:
    assert block_radius(complete(num_nodes), parse_compressor("none"), 30, 100) == 0.0


def test_a_graph_without_eigenvectors_has_the_same_law() -> None:
    edges = [(0, 2), (0, 3), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (3, 1)]
    topology = from_edges(4, edges)
    for noise in (0.3, 5.0, 6.0):
        found = GossipMoments(topology, 1.0, noise, 1.0, whole_values=True).radius
        assert found == pytest.approx(kronecker_radius(topology, 1.0, noise), rel=1e-6)


BLOCKS = ["task.name=digits", "graph.num_nodes=4", "privacy.epsilon=4", "algorithm.name=dp-block"]


@pytest.mark.parametrize("field", ["compression.spec", "algorithm.polish_compression"])
def test_a_run_with_growing_blocks_is_refused_before_it_starts(field: str) -> None:
    config = load_config(None, [*BLOCKS, "algorithm.polish_rounds=2", f"{field}=gsgd:2"])
    with pytest.raises(
        UnstableError, match=rf"{field} = 'gsgd:2'.*grows.*gsgd:8/64.*--allow-divergence"
    ):
        design_run(config, declared_facts(config))
    with pytest.warns(UserWarning, match="apart"):
        design_run(config, declared_facts(config), allow_divergence=True)


@pytest.mark.parametrize(("spec", "words"), [("sign", "no law"), ("rot:1", "nodes stay 47% apart")])
def test_blocks_that_leave_the_nodes_apart_are_warned_of(spec: str, words: str) -> None:
    config = load_config(None, [*BLOCKS, f"compression.spec={spec}"])
    with pytest.warns(UserWarning, match=rf"compression.spec = '{spec}'.*{words}"):
        design_run(config, declared_facts(config))


def test_more_blocks_than_coordinates_are_refused() -> None:
    config = load_config(None, [*BLOCKS, "algorithm.num_blocks=100000"])
    with pytest.raises(
        ConfigError, match=r"algorithm.num_blocks = 100000: expected from 1 to 9610"
    ):
        design_run(config, declared_facts(config))
