"""Every builder gives the graph that its name promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from dpcsgp.errors import TopologyError
from dpcsgp.graphs import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    from_edges_file,
    from_networkx,
    metropolis_weights,
    random_digraph,
    star,
    torus,
    undirected_ring,
)

BUILDERS: dict[str, Callable[[int], Topology]] = {
    "directed_exponential": directed_exponential,
    "directed_ring": directed_ring,
    "undirected_ring": undirected_ring,
    "complete": complete,
    "torus": torus,
    "star": star,
    "random_digraph": lambda n: random_digraph(n, 0.2, seed=n),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 10, 12, 33])
def test_every_sender_splits_its_mass_evenly(name: str, num_nodes: int) -> None:
    topology = BUILDERS[name](num_nodes)
    assert topology.name == name
    assert topology.num_nodes == num_nodes
    for sender in range(num_nodes):
        receivers = topology.receivers_from(sender)
        assert sender in receivers
        np.testing.assert_allclose(topology.weights[list(receivers), sender], 1.0 / len(receivers))


def test_links_of_the_named_graphs() -> None:
    assert directed_exponential(10).receivers_from(7) == (1, 5, 7, 8, 9)
    assert directed_ring(5).receivers_from(4) == (0, 4)
    assert undirected_ring(5).receivers_from(0) == (0, 1, 4)
    assert complete(4).receivers_from(2) == (0, 1, 2, 3)
    assert torus(12).receivers_from(5) == (1, 4, 5, 6, 9)
    assert torus(7) == undirected_ring(7)
    assert star(4).receivers_from(0) == (0, 1, 2, 3)
    assert star(4).receivers_from(3) == (0, 3)


def test_random_digraphs_are_repeatable_and_uneven() -> None:
    one = random_digraph(20, 0.2, seed=1)
    assert one == random_digraph(20, 0.2, seed=1)
    assert one != random_digraph(20, 0.2, seed=2)
    assert len({len(one.receivers_from(node)) for node in range(20)}) > 1
    assert not one.is_doubly_stochastic
    assert len(random_digraph(9, 0.0, seed=5).edges) == 9  # the cycle alone
    assert random_digraph(9, 1.0, seed=5) == complete(9)


@pytest.mark.parametrize("num_nodes", [0, -3, 2.5, "four", None])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_bad_number_of_nodes_is_refused(name: str, num_nodes: object) -> None:
    build = random_digraph if name == "random_digraph" else BUILDERS[name]
    extra = {"edge_probability": 0.2, "seed": 0} if name == "random_digraph" else {}
    with pytest.raises(TopologyError, match=r"graph.num_nodes = .*at least 1"):
        build(num_nodes, **extra)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_a_bad_probability_is_refused(probability: float) -> None:
    with pytest.raises(TopologyError, match=r"graph\.edge_probability"):
        random_digraph(5, probability, seed=0)


def test_edges_may_repeat_and_hold_self_loops() -> None:
    assert from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 1), (1, 1)]) == directed_ring(3)
    assert from_edges(1, []) == complete(1)


@pytest.mark.parametrize("edge", [(0, 3), (-1, 0), (0,), (0, 1, 2), ("x", 1), (0.5, 1)])
def test_a_bad_edge_is_named(edge: tuple[object, ...]) -> None:
    with pytest.raises(TopologyError, match=r"graph.edges\[1\] = "):
        from_edges(3, [(0, 1), edge])  # pyright: ignore[reportArgumentType]


def test_edge_files_in_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "ring.csv"
    for text in (
        "0 1\n1 2\n2 0\n",
        "\ufeffsender,receiver\n0,1\n1,2\n2,0",
        "# a ring\n\n0\t1  # first\n1;2\n  2 , 0 \n",
    ):
        path.write_text(text, encoding="utf-8")
        assert from_edges_file(path) == directed_ring(3)
        assert from_edges_file(str(path), 3) == directed_ring(3)


@pytest.mark.parametrize(
    ("text", "num_nodes", "message"),
    [
        ("0 1\n1 zero\n", None, "line 2: '1 zero': expected two whole numbers"),
        ("0 1\nsender receiver\n", None, "line 2"),
        ("0 1\n\n1 0 5\n", None, "line 3"),
        ("0 1\n1 -2\n", None, "line 2: .* numbered 0 or more"),
        ("0 1\n1 9\n", 4, "line 2: .* numbered 0 to 3"),
        ("# nothing\n", None, "no edges in it"),
        ("0 1\n1 0\n3 0\n", None, "cannot be reached"),
    ],
)
def test_bad_edge_files_are_refused(
    tmp_path: Path, text: str, num_nodes: int | None, message: str
) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        from_edges_file(path, num_nodes)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9c")
    for path in (tmp_path / "absent.txt", tmp_path, tmp_path / "binary"):
        with pytest.raises(TopologyError, match=r"graph.edges_file = .*cannot read it"):
            from_edges_file(path)


def test_networkx_graphs_keep_numbers_and_order() -> None:
    directed = nx.DiGraph([(2, 0), (0, 1), (1, 2)])
    assert from_networkx(directed) == directed_ring(3)
    named = nx.DiGraph([("c", "a"), ("a", "b"), ("b", "c")])  # order of appearance: c, a, b
    assert from_networkx(named) == directed_ring(3)
    assert from_networkx(nx.complete_graph(5)) == complete(5)
    with pytest.raises(TopologyError, match="networkx"):
        from_networkx([(0, 1)])


def test_metropolis_weights_are_symmetric_and_doubly_stochastic() -> None:
    source = random_digraph(15, 0.15, seed=4)
    topology = metropolis_weights(source)
    np.testing.assert_allclose(topology.weights, topology.weights.T, atol=0)
    np.testing.assert_allclose(topology.weights.sum(axis=1), 1.0)
    linked = (source.weights > 0) | (source.weights.T > 0)
    assert ((topology.weights > 0) == linked).all()
    degree = linked.sum(axis=0) - 1
    sender, receiver = source.edges[0]
    assert topology.weights[receiver, sender] == pytest.approx(
        1 / (1 + max(degree[sender], degree[receiver]))
    )
    assert metropolis_weights(complete(1)) == complete(1)
