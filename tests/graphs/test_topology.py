"""What a topology promises, and what it refuses."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dpcsgp.errors import TopologyError
from dpcsgp.graphs import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    random_digraph,
    star,
)


def test_senders_and_receivers_follow_the_weights() -> None:
    topology = random_digraph(12, 0.2, seed=3)
    for node in range(12):
        assert topology.senders_to(node) == tuple(np.flatnonzero(topology.weights[node]))
        assert topology.receivers_from(node) == tuple(np.flatnonzero(topology.weights[:, node]))
        assert node in topology.senders_to(node)
    assert topology.edges == sorted(
        (j, i) for j in range(12) for i in topology.receivers_from(j) if i != j
    )


def test_a_single_node_is_a_graph() -> None:
    for build in (directed_exponential, directed_ring, complete, star):
        topology = build(1)
        assert topology.weights.tolist() == [[1.0]]
        assert topology.senders_to(0) == topology.receivers_from(0) == (0,)
        assert topology.edges == []


def test_weights_are_a_read_only_copy() -> None:
    source = np.full((2, 2), 0.5)
    topology = Topology(source)
    source[0, 0] = 7.0
    assert topology.weights[0, 0] == 0.5
    assert topology.weights.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        topology.weights[0, 0] = 1.0


def test_equality_and_fingerprint_depend_on_the_weights_alone() -> None:
    one, other = Topology(np.full((3, 3), 1 / 3), "a"), Topology(np.full((3, 3), 1 / 3), "b")
    assert one == other
    assert hash(one) == hash(other)
    assert one.fingerprint == complete(3).fingerprint
    assert one.fingerprint != complete(4).fingerprint
    assert one.fingerprint != directed_ring(3).fingerprint
    assert one != "a graph"


def test_double_stochasticity_is_seen() -> None:
    assert directed_exponential(10).is_doubly_stochastic
    assert not star(4).is_doubly_stochastic


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.empty((0, 0)), "at least one node"),
        (np.ones((2, 3)), "square"),
        (np.ones(3), "square"),
        ([["a"]], "square matrix of numbers"),
        ([[0.5, 0.5], [0.5, np.nan]], r"weights\[1, 1\] = nan: .* finite"),
        ([[0.5, np.inf], [0.5, 0.5]], r"weights\[0, 1\] = inf"),
        ([[1.5, 0.5], [-0.5, 0.5]], r"weights\[1, 0\] = -0.5: .* negative"),
        ([[0.5, 0.4], [0.5, 0.5]], "column 1 sums to 0.9, expected 1"),
        ([[0.0, 0.5], [1.0, 0.5]], r"weights\[0, 0\] = 0: every node must keep"),
    ],
)
def test_bad_weights_are_refused(weights: object, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(weights)  # pyright: ignore[reportArgumentType]


def test_a_node_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(TopologyError, match=r"node 2 cannot be reached from node 0 \(1 of 3 nodes"):
        from_edges(3, [(0, 1), (1, 0), (2, 0)])
    with pytest.raises(TopologyError, match="node 0 cannot be reached from node 2"):
        from_edges(3, [(0, 1), (1, 0), (0, 2)])


def test_unknown_node_is_refused() -> None:
    with pytest.raises(TopologyError, match="node = 3: this graph has nodes 0 to 2"):
        complete(3).senders_to(3)


def test_a_thousand_nodes_are_quick() -> None:
    start = time.process_time()
    topology = random_digraph(1000, 0.02, seed=0)
    heard = sum(len(topology.senders_to(node)) for node in range(1000))
    assert heard == len(topology.edges) + 1000
    assert time.process_time() - start < 3.0
