"""DP-CSGP against a literal Algorithm 1: every node keeps a copy per sender, in float64, straight
from the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import Topology, from_edges, random_digraph
from dpcsgp.network import Simulator
from dpcsgp.randomness import PublicRandomness

LEARNING_RATE = 0.1
STEPS = 50


def irregular() -> Topology:
    """A strongly connected digraph with uneven out-degrees: node 0 talks to all, the others pass it
    on."""
    ring = [(node, (node + 1) % 6) for node in range(6)]
    return from_edges(6, [*ring, (0, 2), (0, 3), (0, 4), (3, 1)])


def top_k(vector: np.ndarray, keep: int) -> np.ndarray:
    out = np.zeros_like(vector)
    best = np.argsort(-np.abs(vector), kind="stable")[:keep]
    out[best] = vector[best]
    return out


class LiteralAlgorithm1:
    """Lines 1 to 13 for all nodes, entered at line 9 with y = 1; `copies[i][j]` is node i's copy of
    x_hat_j."""

    def __init__(self, weights: np.ndarray, dim: int, compress, start: np.ndarray) -> None:  # noqa: ANN001
        self.weights, self.compress = weights, compress
        self.num_nodes = len(weights)
        self.w = start.astype(np.float64).copy()
        self.y = np.ones(self.num_nodes)
        self.copies = [
            {j: np.zeros(dim) for j in range(self.num_nodes) if weights[i, j] > 0}
            for i in range(self.num_nodes)
        ]

    def models(self) -> np.ndarray:
        return self.w / self.y[:, None]  # line 8

    def iterate(self, grads: np.ndarray) -> None:
        x = self.w - LEARNING_RATE * grads  # lines 9 to 12 (the noise is in the gradients)
        q = [self.compress(x[i] - self.copies[i][i]) for i in range(self.num_nodes)]  # line 2
        for i in range(self.num_nodes):
            for j in self.copies[i]:
                self.copies[i][j] = self.copies[i][j] + q[j]  # lines 3 to 5
        for i in range(self.num_nodes):  # line 6
            mixed = sum(self.weights[i, j] * copy for j, copy in self.copies[i].items())
            self.w[i] = x[i] - self.copies[i][i] + mixed
        self.y = self.weights @ self.y  # line 7


@pytest.mark.parametrize("spec", ["none", "top:0.1"])
def test_fifty_steps_equal_the_paper(spec: str) -> None:
    topology, dim = irregular(), 40
    rng = np.random.default_rng(1)
    start = rng.normal(size=(6, dim))
    compress = (lambda v: v) if spec == "none" else (lambda v: top_k(v, dim // 10))
    literal = LiteralAlgorithm1(topology.weights, dim, compress, start)
    # top:0.1 at rate 1 grows on this graph; tiny gradients and 50 steps keep both in range of
    # float32.
    method = DPCSGP(parse_compressor(spec), LEARNING_RATE, mixing_rate=1.0)
    state = method.init(torch.tensor(start, dtype=torch.float32))
    network, random = Simulator(topology), PublicRandomness(0, range(6))
    scale = 1.0
    for _ in range(STEPS):
        grads = rng.normal(size=(6, dim))
        literal.iterate(grads)
        state = method.step(state, torch.tensor(grads, dtype=torch.float32), network, random)
        scale = max(scale, float(np.abs(literal.models()).max()))
    np.testing.assert_allclose(
        method.model(state).double().numpy(), literal.models(), atol=1e-5 * scale
    )
    np.testing.assert_allclose(state.y_N1[:, 0].numpy(), literal.y, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "rate"), [("none", 1.0), ("rand:0.5", 0.3), ("gsgd:4/64", 0.5)])
def test_mass_is_conserved_over_ten_thousand_steps(spec: str, rate: float) -> None:
    topology, dim = irregular(), 32
    method = DPCSGP(parse_compressor(spec), learning_rate=1.0, mixing_rate=rate)
    torch.manual_seed(0)
    state = method.init(torch.randn(6, dim))
    before = state.x_ND.sum(0, dtype=torch.float64)
    network, random = Simulator(topology), PublicRandomness(0, range(6))
    moved = torch.zeros(dim, dtype=torch.float64)
    for _ in range(10_000):
        grad = 0.01 * torch.randn(6, dim)
        moved += grad.sum(0, dtype=torch.float64)
        state = method.step(state, grad, network, random)
    error_per_node = (state.x_ND.sum(0, dtype=torch.float64) - (before - moved)).abs().max() / 6
    # float32 rounding of x itself; losing mass in the copies gave 3e-3
    assert error_per_node < 2e-4
    assert abs(float(state.y_N1.sum()) - 6) < 1e-9
    assert float(state.y_N1.min()) > 0


def test_push_sum_removes_the_bias_of_plain_averaging() -> None:
    topology = irregular()
    start = torch.arange(6, dtype=torch.float32)[:, None].repeat(1, 3)
    method = DPCSGP(parse_compressor("none"), learning_rate=0.1)
    state = method.init(start)
    network, random = Simulator(topology), PublicRandomness(0, range(6))
    for _ in range(200):
        state = method.step(state, torch.zeros(6, 3), network, random)
    average = start.mean()
    assert float((method.model(state) - average).abs().max()) < 1e-4
    # without the division by y, nodes end far from it
    assert float((state.x_ND - average).abs().max()) > 0.3


def test_equal_displacements_stay_unbiased_on_irregular_graphs() -> None:
    method = DPCSGP(parse_compressor("none"), learning_rate=1.0)
    anchor = torch.randn(5)
    state = method.init(anchor.repeat(8, 1), anchor)
    network, random = Simulator(random_digraph(8, 0.2, 3)), PublicRandomness(0, range(8))
    for _ in range(20):
        state = method.step(state, torch.ones(8, 5), network, random)
    assert torch.allclose(method.average(state), anchor - 20, atol=1e-4)


def test_one_node_is_sgd() -> None:
    method = DPCSGP(parse_compressor("none"), learning_rate=0.5)
    from dpcsgp.graphs import complete

    state = method.init(torch.zeros(1, 4))
    for _ in range(3):
        state = method.step(
            state, torch.ones(1, 4), Simulator(complete(1)), PublicRandomness(0, [0])
        )
    assert torch.equal(method.model(state), torch.full((1, 4), -1.5))
