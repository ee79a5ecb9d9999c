"""Radius and steady state against a Kronecker product, simulations and the known table."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from dpcsgp.compression import Moments, parse_compressor
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import (
    Topology,
    block_radius,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    mixing_radius,
    random_digraph,
    second_eigenvalue,
    second_moments,
    star,
    steady_state_disagreement,
    torus,
)
from dpcsgp.graphs import stability as stability_module
from dpcsgp.graphs.second_moments import modal_energies
from dpcsgp.graphs.spectrum import stationary
from dpcsgp.graphs.stability import GossipMoments

DIM = 101_770
EXACT = parse_compressor("none")
LAWS = [
    (0.5, 0.25, 1.0),
    (0.1, 0.09, 0.05),
    (1.0, 0.3, 0.7),
    (0.9, 0.09, 1.0),
    (0.98, 0.4, 0.4),
    (0.7, 0.0, 0.5),
]
DEFECTIVE = from_edges(6, [(0, 3), (3, 0), (0, 1), (1, 2), (2, 4), (4, 5), (5, 0), (1, 5)])
SMALL = {
    "exponential": directed_exponential(5),
    "ring": directed_ring(4),
    "star": star(5),
    "complete": complete(3),
    "pair": complete(2),
    "irregular": random_digraph(6, 0.3, seed=2),
    "chain with shortcuts": DEFECTIVE,
}


def kronecker_radius(topology: Topology, gain: float, noise: float, rate: float) -> float:
    """Return the radius from the full second-moment operator, built as a matrix."""
    n = topology.num_nodes
    identity, pull = np.eye(n), rate * (topology.weights - np.eye(n))
    step = np.block(
        [[identity + gain * pull, (1 - gain) * pull], [gain * identity, (1 - gain) * identity]]
    )
    into, out = np.vstack([pull, identity]), np.hstack([identity, -identity])
    zero_sum = np.linalg.svd(np.ones((1, n)))[2][1:].T
    basis = np.block([[zero_sum, np.zeros((n, n))], [np.zeros((n, n - 1)), identity]])
    step, into, out = basis.T @ step @ basis, basis.T @ into, out @ basis
    operator = np.kron(step, step)
    for node in range(n):
        operator += noise * np.outer(
            np.kron(into[:, node], into[:, node]), np.kron(out[node], out[node])
        )
    return float(np.sqrt(np.abs(np.linalg.eigvals(operator)).max()))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_radius_equals_that_of_the_full_operator(
    name: str, law: tuple[float, float, float]
) -> None:
    gain, noise, rate = law
    assert GossipMoments(SMALL[name], gain, noise, rate).radius == pytest.approx(
        kronecker_radius(SMALL[name], gain, noise, rate), abs=1e-6
    )


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_single_node_follows_its_error_alone(law: tuple[float, float, float]) -> None:
    gain, noise, rate = law
    assert GossipMoments(complete(1), gain, noise, rate).radius == pytest.approx(
        math.sqrt((1 - gain) ** 2 + noise)
    )
    assert GossipMoments(complete(1), gain, noise, rate).disagreement == 0.0


@pytest.mark.parametrize(
    ("graph", "radii"),
    [
        (directed_exponential(10), (0.68, 0.88, 1.01, 1.08, 1.19)),
        (directed_ring(10), (0.96, 0.98, 1.02, 1.06, 1.15)),
    ],
    ids=["directed exponential", "directed ring"],
)
def test_radii_of_random_masks_at_rate_one(graph: Topology, radii: tuple[float, ...]) -> None:
    for share, radius in zip((0.9, 0.75, 0.6, 0.5, 0.1), radii, strict=True):
        found = mixing_radius(graph, parse_compressor(f"rand:{share}"), 1.0, DIM)
        assert found == pytest.approx(radius, abs=0.0051)


def test_published_radii_of_a_random_digraph_are_typical_of_such_graphs() -> None:
    """The published graph has no recorded seed: its radii must lie among those of forty draws."""
    graphs = [random_digraph(10, 0.2, seed) for seed in range(40)]
    published = {
        (0.9, 1.0): 0.70,
        (0.75, 1.0): 0.89,
        (0.6, 1.0): 1.01,
        (0.5, 1.0): 1.08,
        (0.1, 1.0): 1.19,
    }
    for (share, rate), radius in (published | {(0.5, 0.3): 0.901, (0.1, 0.05): 0.983}).items():
        found = [
            mixing_radius(graph, parse_compressor(f"rand:{share}"), rate, DIM) for graph in graphs
        ]
        assert min(found) - 0.005 <= radius <= max(found) + 0.005
        assert np.median(found) == pytest.approx(radius, abs=0.03)


def test_radii_of_random_masks_at_better_rates() -> None:
    half, tenth = parse_compressor("rand:0.5"), parse_compressor("rand:0.1")
    assert mixing_radius(directed_exponential(10), half, 0.3, DIM) == pytest.approx(0.866, abs=5e-4)
    assert mixing_radius(directed_exponential(10), tenth, 0.05, DIM) == pytest.approx(
        0.979, abs=5e-4
    )
    assert mixing_radius(directed_ring(10), half, 0.3, DIM) == pytest.approx(0.984, abs=5e-4)
    assert mixing_radius(directed_ring(10), tenth, 0.05, DIM) == pytest.approx(0.997, abs=5e-4)


@pytest.mark.parametrize(
    ("graph", "rate", "radius", "distance"),
    [
        (directed_exponential(10), 1.0, 0.984, 3.6),
        (directed_exponential(10), 0.467, 0.818, 1.46),
        (directed_exponential(10), 0.3, 0.869, 1.61),
        (directed_ring(10), 1.0, 1.0052, math.inf),
        (directed_ring(10), 0.467, 0.977, 2.67),
        (directed_ring(10), 0.3, 0.980, 2.88),
    ],
)
def test_rotated_sign(graph: Topology, rate: float, radius: float, distance: float) -> None:
    compressor = parse_compressor("rot:1")
    assert mixing_radius(graph, compressor, rate, 4096) == pytest.approx(radius, abs=6e-4)
    # The distances were measured as a root mean square after the noise, which adds 1 - 1/n to the
    # mean square.
    mean_square = steady_state_disagreement(graph, compressor, rate, 4096)
    assert math.sqrt(mean_square + 0.9) == pytest.approx(distance, rel=0.02)


@pytest.mark.parametrize("spec", ["sign", "sign:512", "top:0.1"])
def test_no_law_no_radius(spec: str) -> None:
    assert math.isnan(mixing_radius(directed_ring(4), parse_compressor(spec), 0.5, 1000))
    assert math.isnan(
        steady_state_disagreement(directed_ring(4), parse_compressor(spec), 0.5, 1000)
    )


def test_exact_messages_decay_with_the_second_eigenvalue() -> None:
    for topology in (*SMALL.values(), random_digraph(20, 0.1, seed=1)):
        found = mixing_radius(topology, parse_compressor("none"), 1.0, 10)
        assert found == pytest.approx(second_eigenvalue(topology), abs=1e-9)


def test_block_gossip_decays_once_per_turn() -> None:
    topology = directed_exponential(10)
    assert block_radius(topology, EXACT, 1, 100) == pytest.approx(0.6)
    assert block_radius(topology, EXACT, 10, 100) == pytest.approx(0.6**0.1)
    assert block_radius(complete(1), EXACT, 4, 100) == 0.0
    with pytest.raises(ConfigError, match="num_blocks"):
        block_radius(topology, EXACT, 0, 100)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="mixing_rate"):
        mixing_radius(complete(3), parse_compressor("none"), rate, 10)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("name", ["exponential", "star", "irregular", "chain with shortcuts"])
def test_stable_exactly_when_the_radius_is_below_one(
    name: str, law: tuple[float, float, float]
) -> None:
    gossip = GossipMoments(SMALL[name], *law)
    assert gossip.is_stable == (gossip.radius < 1.0)
    assert math.isfinite(gossip.disagreement) == gossip.is_stable


@pytest.mark.parametrize("num_nodes", [64, 200])
def test_a_slow_graph_is_still_stable(num_nodes: int) -> None:
    gossip = GossipMoments(directed_ring(num_nodes), 0.1, 0.09, 0.05)
    assert gossip.is_stable
    assert gossip.linear_radius <= gossip.radius < 1.0


def simulated_disagreement(
    topology: Topology, moments: Moments, rate: float, rounds: int = 400
) -> float:
    """Return the mean square of z - z_bar of masked gossip under unit noise, over late rounds."""
    generator = np.random.default_rng(0)
    n, mass = topology.num_nodes, topology.num_nodes * stationary(topology)[:, None]
    x = np.zeros((n, 4000))
    public, found = np.zeros_like(x), []
    for round_ in range(rounds):
        x += generator.standard_normal(x.shape)
        public += (generator.random(x.shape) < moments.gain) * (x - public)
        x += rate * (topology.weights @ public - public)
        if round_ >= rounds // 2:
            found.append(np.mean((x / mass - x.mean(axis=0)) ** 2))
    return float(np.mean(found))


@pytest.mark.parametrize("name", ["exponential", "star", "irregular", "chain with shortcuts"])
def test_steady_state_equals_a_simulation(name: str) -> None:
    moments = Moments(0.5, 0.25)
    predicted = GossipMoments(SMALL[name], moments.gain, moments.noise, 0.3).disagreement
    assert predicted == pytest.approx(simulated_disagreement(SMALL[name], moments, 0.3), rel=0.02)


@pytest.mark.parametrize(
    "topology", [directed_exponential(20), random_digraph(20, 0.1, seed=4), torus(20), star(20)]
)
def test_all_ways_to_sum_agree(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    assert modal_energies(topology) is not None
    for gain, noise, rate in LAWS:
        exact = GossipMoments(topology, gain, noise, rate)
        answers = exact.radius, exact.disagreement
        with (
            monkeypatch.context() as patch
        ):  # as for graphs of 65 to 150 nodes: operators instead of matrices
            patch.setattr(second_moments, "EXPLICIT_NODES", 1)
            patch.setattr(stability_module, "EXPLICIT_NODES", 1)
            operators = GossipMoments(topology, gain, noise, rate)
            assert operators.radius == pytest.approx(answers[0], abs=1e-6)
            assert operators.disagreement == pytest.approx(answers[1], rel=1e-3)
        with monkeypatch.context() as patch:  # as for graphs without eigenvectors
            patch.setattr(stability_module, "modal_energies", lambda _: None)
            stepped = GossipMoments(topology, gain, noise, rate)
            assert stepped.radius == pytest.approx(answers[0], abs=3e-4)
            assert stepped.disagreement == pytest.approx(answers[1], rel=1e-3)


def test_no_eigenvectors_no_problem() -> None:
    assert modal_energies(random_digraph(6, 0.2, seed=1)) is None  # two eigenvectors coincide
    assert GossipMoments(random_digraph(6, 0.2, seed=1), 0.5, 0.25, 1.0).radius == pytest.approx(
        kronecker_radius(random_digraph(6, 0.2, seed=1), 0.5, 0.25, 1.0), abs=3e-4
    )


@pytest.mark.slow
def test_three_hundred_nodes_take_seconds() -> None:
    topology, start = random_digraph(300, 0.02, seed=1), time.process_time()
    assert GossipMoments(topology, 0.5, 0.25, 1.0).radius > 1.0
    assert GossipMoments(topology, 0.5, 0.25, 0.33).radius < 1.0
    assert time.process_time() - start < 20.0  # of processor time, for two questions
