"""Directed communication graphs with column-stochastic weights.

`weights[i, j]` is the share of sender j's mass that receiver i takes. Columns sum to one, so mass
is conserved, and a node that splits its mass evenly needs to know nothing but its own out-degree.
Reference: Nedic and Olshevsky, "Distributed optimization over time-varying directed graphs", 2014.

Legend: N nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from dpcsgp.errors import TopologyError

_SUM_TOLERANCE: Final = 1e-8


@final
@dataclass(frozen=True, eq=False)
class Topology:
    """Hold a strongly connected digraph with column-stochastic weights.

    The weights are copied, checked and made read-only. Two topologies are equal when their weights
    are.

    Args:
        weights: (N, N); `weights[i, j]` is the share of sender j's mass that receiver i takes.
            Columns sum to one, and every node keeps a share of its own.
        name: shown in tables and errors.

    Raises:
        TopologyError: the matrix is not square, not column-stochastic, has a zero on its diagonal,
            or the graph is not strongly connected.

    >>> pair = Topology(np.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> pair.senders_to(0), pair.edges, pair.is_doubly_stochastic
    ((0, 1), [(0, 1), (1, 0)], True)
    """

    weights: np.ndarray
    name: str = "custom"

    def __post_init__(self) -> None:
        weights_NN = _as_square(self.weights)
        _check_entries(weights_NN)
        _check_strongly_connected(weights_NN)
        weights_NN.setflags(write=False)
        object.__setattr__(self, "weights", weights_NN)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.weights.shape[0]

    def senders_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes whose messages reach `node`, itself included, in ascending order."""
        return _row(self._links, self._checked(node))

    def receivers_from(self, node: int) -> tuple[int, ...]:
        """Return the nodes that hear `node`, itself included, in ascending order."""
        return _row(self._links_reversed, self._checked(node))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Return all (sender, receiver) pairs without self-loops, in ascending order."""
        # Transposed, so that the rows are senders and the pairs come sorted by sender.
        sender, receiver = np.nonzero(self.weights.T)
        keep = sender != receiver
        return list(zip(sender[keep].tolist(), receiver[keep].tolist(), strict=True))

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Tell whether rows sum to one too; then every push-sum weight stays 1."""
        return bool(np.all(np.abs(self.weights.sum(axis=1) - 1.0) <= _SUM_TOLERANCE))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hex digest of the weights, for nodes to compare before they start."""
        # Little-endian float64 bits: processes on different machines compare exact weights.
        digest = hashlib.blake2b(
            self.num_nodes.to_bytes(8, "little"), digest_size=16, person=b"dpcsgp graph"
        )
        digest.update(self.weights.astype("<f8").tobytes())
        return digest.hexdigest()

    # Compressed rows: the senders of a node, and reversed its receivers, without a scan of N.
    @cached_property
    def _links(self) -> sparse.csr_matrix:
        return sparse.csr_matrix(self.weights)

    @cached_property
    def _links_reversed(self) -> sparse.csr_matrix:
        return sparse.csr_matrix(self.weights.T)

    def _checked(self, node: int) -> int:
        if not 0 <= node < self.num_nodes:
            raise TopologyError(f"node = {node}: this graph has nodes 0 to {self.num_nodes - 1}")
        return node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Topology(name={self.name!r}, num_nodes={self.num_nodes}, num_edges={len(self.edges)})"
        )


def _row(links: sparse.csr_matrix, node: int) -> tuple[int, ...]:
    return tuple(sorted(links.indices[links.indptr[node] : links.indptr[node + 1]].tolist()))


def _as_square(weights: Any) -> np.ndarray:
    """Return a float64 copy, or refuse what is not a square matrix with at least one row."""
    try:
        weights_NN = np.array(weights, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise TopologyError(
            f"graph.weights: expected a square matrix of numbers ({error})"
        ) from error
    if weights_NN.ndim != 2 or weights_NN.shape[0] != weights_NN.shape[1]:
        raise TopologyError(
            f"graph.weights has shape {weights_NN.shape}: expected a square matrix (n, n)"
        )
    if weights_NN.shape[0] < 1:
        raise TopologyError("graph.num_nodes = 0: a graph needs at least one node")
    return weights_NN


def _check_entries(weights_NN: np.ndarray) -> None:
    """Refuse weights that are not finite shares of mass, or columns that do not sum to one."""
    for bad_NN, problem in (
        (~np.isfinite(weights_NN), "must be a finite number"),
        (weights_NN < 0, "must not be negative"),
    ):
        if bad_NN.any():
            receiver, sender = np.argwhere(bad_NN)[0]
            value = weights_NN[receiver, sender]
            raise TopologyError(
                f"graph.weights[{receiver}, {sender}] = {value:g}: a share of mass {problem}"
            )
    sums_N = weights_NN.sum(axis=0)
    sender = int(np.argmax(np.abs(sums_N - 1.0)))
    if abs(sums_N[sender] - 1.0) > _SUM_TOLERANCE:
        raise TopologyError(
            f"graph.weights: column {sender} sums to {sums_N[sender]:.9g}, expected 1; divide "
            f"what node {sender} sends by its total "
            "(column j holds the shares of sender j, row i those of receiver i)"
        )
    # A self-loop at every node makes the chain aperiodic: push-sum then converges.
    if (np.diagonal(weights_NN) == 0).any():
        node = int(np.argmin(np.diagonal(weights_NN)))
        raise TopologyError(
            f"graph.weights[{node}, {node}] = 0: every node must keep a share of its own mass"
        )


def _check_strongly_connected(weights_NN: np.ndarray) -> None:
    """Refuse a graph in which some node cannot be reached, and name it."""
    # Strongly connected: node 0 reaches all nodes along the edges, and all nodes reach node 0.
    receivers_of = sparse.csr_matrix(weights_NN.T > 0)
    reached = csgraph.breadth_first_order(receivers_of, 0, directed=True, return_predecessors=False)
    reaching = csgraph.breadth_first_order(
        receivers_of.T.tocsr(), 0, directed=True, return_predecessors=False
    )
    num_nodes = weights_NN.shape[0]
    for nodes, text in (
        (reached, "node {other} cannot be reached from node 0"),
        (reaching, "node 0 cannot be reached from node {other}"),
    ):
        if len(nodes) < num_nodes:
            other = int(np.setdiff1d(np.arange(num_nodes), nodes)[0])
            raise TopologyError(
                f"graph is not strongly connected: {text.format(other=other)}"
                f" ({num_nodes - len(nodes)} of {num_nodes} nodes are affected); add a path of "
                "links between them"
            )
