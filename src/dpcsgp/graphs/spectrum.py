"""The stationary distribution and the eigenvalues of A, and BLAS on the right number of threads.

Legend: N nodes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final

import numpy as np
from threadpoolctl import ThreadpoolController

from dpcsgp.graphs.topology import Topology

_ONE_THREAD_NODES: Final = 300


@lru_cache(maxsize=8)
def stationary(topology: Topology) -> np.ndarray:
    """Return phi, the limit of push-sum weights over n: A phi = phi, sum phi = 1."""
    # (A - I) phi = 0 has one redundant row; sum phi = 1 takes its place.
    system_NN = topology.weights - np.eye(topology.num_nodes)
    system_NN[-1] = 1.0
    phi_N = np.linalg.solve(system_NN, np.eye(topology.num_nodes)[-1])
    phi_N.setflags(write=False)
    return phi_N


@lru_cache(maxsize=8)
def eigenvalues(topology: Topology) -> np.ndarray:
    """Return the eigenvalues of A, real where the graph is reversible (undirected)."""
    symmetric_NN = symmetrized(topology)
    return (
        np.linalg.eigvals(topology.weights)
        if symmetric_NN is None
        else np.linalg.eigvalsh(symmetric_NN)
    )


def symmetrized(topology: Topology) -> np.ndarray | None:
    """Return D^-1/2 A D^1/2 with D = diag(phi), None where that is not symmetric.

    It is symmetric for a reversible walk, so for every undirected graph.
    """
    root_N = np.sqrt(np.abs(stationary(topology)))
    similar_NN = topology.weights * root_N[None, :] / root_N[:, None]
    return similar_NN if np.allclose(similar_NN, similar_NN.T, rtol=0.0, atol=1e-12) else None


def blas_threads(num_nodes: int) -> AbstractContextManager[Any]:
    """Keep BLAS on one thread for small graphs.

    Beside other busy processes its threads wait for each other: on two busy cores the radius of 40
    nodes took 0.9 s with two threads and 0.04 s with one.
    """
    return (
        _blas().limit(limits=1, user_api="blas")
        if num_nodes <= _ONE_THREAD_NODES
        else nullcontext()
    )


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    return ThreadpoolController()
