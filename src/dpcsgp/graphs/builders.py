"""Build topologies by name, from edge lists, files and networkx graphs.

Unless stated otherwise a node splits its mass evenly: column j is 1 / (out-degree of j, itself
included). Every builder raises TopologyError where `num_nodes` is not a whole number of at least 1.

Legend: N nodes. An edge is (sender, receiver).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.errors import TopologyError
from dpcsgp.graphs.topology import Topology
from dpcsgp.randomness import numpy_generator


def directed_exponential(num_nodes: int) -> Topology:
    """Let j send to j + 2^k mod n for k = 0, 1, ... while 2^k < n.

    Args:
        num_nodes: n; out-degrees grow like log2(n), and so does the diameter.

    Returns:
        A doubly stochastic digraph.

    >>> directed_exponential(10).receivers_from(0)
    (0, 1, 2, 4, 8)
    """
    num_nodes = _count(num_nodes)
    hops = [2**k for k in range((num_nodes - 1).bit_length())]
    return _by_hops(num_nodes, hops, "directed_exponential")


def directed_ring(num_nodes: int) -> Topology:
    """Let j send to j + 1 mod n.

    Args:
        num_nodes: n; the diameter is n - 1.

    Returns:
        A doubly stochastic digraph of out-degree 1.
    """
    return _by_hops(_count(num_nodes), [1], "directed_ring")


def undirected_ring(num_nodes: int) -> Topology:
    """Let j send to both sides of a ring.

    Args:
        num_nodes: n; the diameter is floor(n / 2).

    Returns:
        A symmetric, doubly stochastic graph of degree 2.
    """
    return _by_hops(_count(num_nodes), [1, -1], "undirected_ring")


def complete(num_nodes: int) -> Topology:
    """Let everyone send to everyone.

    Args:
        num_nodes: n.

    Returns:
        The graph with all weights 1 / n; one exchange averages exactly.
    """
    return _by_hops(_count(num_nodes), range(num_nodes), "complete")


def torus(num_nodes: int) -> Topology:
    """Lay the nodes on a wrapped rectangle, nearest to a square; j sends to its four sides.

    Args:
        num_nodes: n; a prime number only fits a 1 x n rectangle, an undirected ring.

    Returns:
        A symmetric, doubly stochastic graph of degree at most 4.

    >>> torus(12).receivers_from(0)  # 3 x 4
    (0, 1, 3, 4, 8)
    """
    num_nodes = _count(num_nodes)
    # Rows: the largest divisor of n up to its square root.
    rows = max(r for r in range(1, int(num_nodes**0.5) + 1) if num_nodes % r == 0)
    cell = np.arange(num_nodes).reshape(rows, num_nodes // rows)
    linked_NN = np.eye(num_nodes, dtype=bool)
    for axis in (0, 1):
        for shift in (1, -1):
            linked_NN[np.roll(cell, shift, axis).ravel(), cell.ravel()] = True
    return _even_shares(linked_NN, "torus")


def star(num_nodes: int) -> Topology:
    """Let node 0 send to everyone and everyone send back to node 0.

    Args:
        num_nodes: n.

    Returns:
        A graph that is not doubly stochastic; push-sum weights differ between nodes.
    """
    linked_NN = np.eye(_count(num_nodes), dtype=bool)
    linked_NN[0, :] = linked_NN[:, 0] = True
    return _even_shares(linked_NN, "star")


def random_digraph(num_nodes: int, edge_probability: float, seed: int) -> Topology:
    """Draw a random cycle through all nodes, then every other link with `edge_probability`.

    The cycle makes the graph strongly connected; the free links make the out-degrees uneven.

    Args:
        num_nodes: n.
        edge_probability: from 0 to 1, for each ordered pair of nodes.
        seed: public; equal seeds give equal graphs.

    Returns:
        A strongly connected digraph.

    Raises:
        TopologyError: a number is out of range.

    >>> random_digraph(6, 0.3, seed=1) == random_digraph(6, 0.3, seed=1)
    True
    """
    num_nodes = _count(num_nodes)
    if not 0.0 <= edge_probability <= 1.0:
        raise TopologyError(
            f"graph.edge_probability = {edge_probability}: expected a number from 0 to 1"
        )
    generator = numpy_generator(seed, "random_digraph")
    # Every ordered pair by itself, then the cycle on top of them.
    cycle = generator.permutation(num_nodes)
    linked_NN = generator.random((num_nodes, num_nodes)) < edge_probability
    linked_NN[np.roll(cycle, -1), cycle] = True
    return _even_shares(linked_NN, "random_digraph")


def from_edges(num_nodes: int, edges: Iterable[tuple[int, int]], name: str = "edges") -> Topology:
    """Link every (sender, receiver) pair; repeated pairs count once, self-loops are always there.

    Args:
        num_nodes: n; nodes are numbered from 0.
        edges: (sender, receiver) pairs.
        name: shown in tables and errors.

    Returns:
        The digraph, each sender's mass split evenly.

    Raises:
        TopologyError: an edge is out of range, or the graph is not strongly connected.

    >>> from_edges(3, [(0, 1), (1, 2), (2, 0), (2, 1)]).weights[:, 2].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    linked_NN = np.eye(_count(num_nodes), dtype=bool)
    for position, edge in enumerate(edges):
        sender, receiver = _edge(edge, num_nodes, f"graph.edges[{position}] = {edge!r}")
        linked_NN[receiver, sender] = True
    return _even_shares(linked_NN, name)


def from_edges_file(path: str | Path, num_nodes: int | None = None) -> Topology:
    """Read one "sender receiver" pair per line, split by spaces, tabs, commas or semicolons.

    Empty lines and text after # are skipped, and so is a heading such as "sender,receiver" in the
    first line of data.

    Args:
        path: a text file in UTF-8.
        num_nodes: n; None: one more than the largest number in the file.

    Returns:
        The digraph, each sender's mass split evenly.

    Raises:
        TopologyError: the file cannot be read, a line is no edge (named with its number), or the
            graph is not strongly connected.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(
            f"graph.edges_file = {str(path)!r}: cannot read it ({error}); expected a text file"
        ) from error
    edges: list[tuple[int, int]] = []
    heading_allowed = True
    for number, line in enumerate(lines, start=1):
        fields = [field for field in re.split(r"[\s,;]+", line.split("#", 1)[0]) if field]
        # Words without a digit in the first line of data are a heading.
        is_heading = heading_allowed and not any(re.search(r"\d", field) for field in fields)
        if fields and not is_heading:
            where = f"{path}, line {number}: {line.strip()!r}"
            edges.append(_edge(tuple(fields), num_nodes, where))
        heading_allowed = heading_allowed and not fields
    if num_nodes is None:
        if not edges:
            raise TopologyError(
                f"graph.edges_file = {str(path)!r}: no edges in it; "
                "expected lines 'sender receiver'"
            )
        num_nodes = 1 + max(max(edge) for edge in edges)
    return from_edges(num_nodes, edges, name=f"edges:{path.name}")


def from_networkx(graph: Any) -> Topology:
    """Take the links of a networkx graph.

    Args:
        graph: directed or not; an undirected edge links both ways, edge weights are ignored. Nodes
            labelled 0 to n - 1 keep their numbers; any other labels are numbered in the graph's
            own order.

    Returns:
        The digraph, each sender's mass split evenly.

    Raises:
        TopologyError: not a networkx graph, or not strongly connected.

    >>> import networkx as nx
    >>> from_networkx(nx.cycle_graph(4)) == undirected_ring(4)
    True
    """
    import networkx as nx  # slow to import

    if not isinstance(graph, nx.Graph):
        raise TopologyError(f"graph: expected a networkx graph, got {type(graph).__name__}")
    # Labels 0 to n - 1 are node numbers already, in whatever order networkx lists them.
    labels = list(graph.nodes)
    numbers = set(range(len(labels)))
    index = {
        label: label if set(labels) == numbers else position
        for position, label in enumerate(labels)
    }
    directed = graph.to_directed()
    return from_edges(
        len(labels), [(index[s], index[r]) for s, r in directed.edges()], name="networkx"
    )


def metropolis_weights(topology: Topology) -> Topology:
    """Return the undirected version with symmetric, doubly stochastic Metropolis weights.

    A pair is linked when either sends to the other; its weight is 1 / (1 + max(degree_i, degree_j))
    without self-loops in the degrees, and a node keeps the rest.

    Args:
        topology: any strongly connected graph; only its links count.

    Returns:
        Weights that D-PSGD and CHOCO-SGD ask for; no push-sum weight is needed.

    >>> metropolis_weights(directed_ring(4)).weights[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    # Undirected links without self-loops, and their degrees.
    linked_NN = (topology.weights > 0) | (topology.weights.T > 0)
    np.fill_diagonal(linked_NN, False)
    degree_N = linked_NN.sum(axis=0)
    # The larger degree of a pair bounds both shares: rows and columns sum to less than one, and the
    # diagonal takes the rest.
    weights_NN = linked_NN / (1.0 + np.maximum(degree_N[:, None], degree_N[None, :]))
    np.fill_diagonal(weights_NN, 1.0 - weights_NN.sum(axis=0))
    return Topology(weights_NN, f"metropolis:{topology.name}")


def _by_hops(num_nodes: int, hops: Iterable[int], name: str) -> Topology:
    linked_NN = np.eye(num_nodes, dtype=bool)
    sender = np.arange(num_nodes)
    for hop in hops:
        linked_NN[(sender + hop) % num_nodes, sender] = True
    return _even_shares(linked_NN, name)


def _even_shares(linked_NN: np.ndarray, name: str) -> Topology:
    """Split every sender's mass evenly: linked[i, j] says that j sends to i."""
    linked_NN = linked_NN | np.eye(len(linked_NN), dtype=bool)
    return Topology(linked_NN / linked_NN.sum(axis=0), name)


def _count(num_nodes: int) -> int:
    """Return the number of nodes as an int, or refuse it."""
    # operator.index takes numpy integers, but neither floats nor text.
    try:
        count = operator.index(num_nodes)
    except TypeError:
        count = 0
    if count < 1:
        raise TopologyError(
            f"graph.num_nodes = {num_nodes!r}: expected a whole number of at least 1"
        )
    return count


def _edge(edge: tuple[Any, ...], num_nodes: int | None, where: str) -> tuple[int, int]:
    """Return (sender, receiver) as integers in range, or refuse and say `where` it stands."""
    try:
        sender, receiver = (
            int(end) if isinstance(end, str) else operator.index(end) for end in edge
        )
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{where}: expected two whole numbers, sender and receiver") from error
    if min(sender, receiver) < 0 or (num_nodes is not None and max(sender, receiver) >= num_nodes):
        limit = "0 or more" if num_nodes is None else f"0 to {num_nodes - 1}"
        raise TopologyError(
            f"{where}: nodes are numbered {limit}; correct the edge or graph.num_nodes"
        )
    return sender, receiver
