"""Every row of the table of methods, and variants, through one set of laws: with one node and with
several, odd and even numbers of coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpcsgp.algorithms import (
    DPCSGP,
    SGP,
    Algorithm,
    ChocoSGD,
    DecentralizedSGD,
    DPBlock,
    LinearDecay,
    Method,
    MethodSettings,
)
from dpcsgp.algorithms import METHODS as TABLE
from dpcsgp.compression import parse_compressor
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import Topology, complete, from_edges, metropolis_weights, undirected_ring
from dpcsgp.network import Simulator
from dpcsgp.randomness import PublicRandomness

NONE, ROT = parse_compressor("none"), parse_compressor("rot:2")


def from_row(row: Method) -> Callable[[float], Algorithm[Any]]:
    compressor = ROT if row.error_feedback else NONE
    return lambda rate: row.build(MethodSettings(compressor, rate, 0.7, num_blocks=3))


METHODS: dict[str, Callable[[float], Algorithm[Any]]] = {
    **{name: from_row(row) for name, row in TABLE.items()},
    "dp-csgp none": lambda rate: DPCSGP(NONE, rate),
    "block random": lambda rate: DPBlock(rate, num_blocks=2, order="random"),
    "block gsgd": lambda rate: DPBlock(
        rate, num_blocks=2, compressor=parse_compressor("gsgd:8/64")
    ),
}
UNDIRECTED = [name for name, row in TABLE.items() if row.undirected]
SILENT = [name for name, row in TABLE.items() if not row.sends]


def irregular() -> Topology:
    return from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (0, 3)])


def network_for(name: str, num_nodes: int) -> Simulator:
    topology = irregular() if num_nodes > 1 else complete(1)
    return Simulator(metropolis_weights(topology) if name in UNDIRECTED else topology)


def run(
    method: Algorithm[Any], network: Simulator, start: torch.Tensor, grads: list[torch.Tensor]
) -> Any:
    state, random = method.init(start), PublicRandomness(3, network.nodes)
    for grad in grads:
        state = method.gossip(method.descend(state, grad), network, random)
    return state


@pytest.mark.parametrize("dim", [7, 32])
@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_gossip_keeps_the_average_and_counts_bytes(name: str, num_nodes: int, dim: int) -> None:
    torch.manual_seed(0)
    method, network = METHODS[name](0.1), network_for(name, num_nodes)
    start = torch.randn(num_nodes, dim)
    grads = [torch.randn(num_nodes, dim) for _ in range(12)]
    state = run(method, network, start, grads)
    expected = start.mean(0) - 0.1 * torch.stack(grads).sum(0).mean(0)
    assert torch.allclose(method.average(state), expected, atol=1e-5)
    assert method.model(state).shape == (num_nodes, dim)
    assert (state.step, state.round) == (12, 12)
    if "random" not in name:
        assert network.traffic.bytes_per_edge == method.wire_bytes(dim, 12)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SILENT])
def test_nodes_come_to_agree_without_gradients(name: str) -> None:
    torch.manual_seed(0)
    method, network = METHODS[name](0.1), network_for(name, 4)
    start = torch.randn(4, 16)
    state = run(method, network, start, [torch.zeros(4, 16)] * 300)
    # A quantised block keeps what it rounds off at the sender, and with nothing fed back that part
    # never mixes.
    assert float((method.model(state) - start.mean(0)).abs().max()) < (
        0.05 if name == "block gsgd" else 1e-3
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_step_does_not_change_the_state_it_was_given(name: str) -> None:
    method, network = METHODS[name](0.1), network_for(name, 4)
    state = run(method, network, torch.randn(4, 9), [torch.randn(4, 9)] * 3)
    before = {
        key: value.clone()
        for key, value in state._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    run_on = method.gossip(
        method.descend(state, torch.randn(4, 9)), network, PublicRandomness(3, range(4))
    )
    assert run_on is not state
    assert all(torch.equal(getattr(state, key), value) for key, value in before.items())


@pytest.mark.parametrize("name", METHODS)
def test_one_node_is_sgd(name: str) -> None:
    method, network = METHODS[name](0.5), network_for(name, 1)
    state = run(method, network, torch.zeros(1, 8), [torch.ones(1, 8)] * 5)
    assert torch.allclose(method.model(state), torch.full((1, 8), -2.5), atol=1e-6)


def same(
    first: Algorithm[Any], second: Algorithm[Any], topology: Topology, atol: float = 1e-5
) -> bool:
    torch.manual_seed(1)
    start, grads = (
        torch.randn(topology.num_nodes, 11),
        [torch.randn(topology.num_nodes, 11) for _ in range(10)],
    )
    models = [
        method.model(run(method, Simulator(topology), start, grads)) for method in (first, second)
    ]
    return torch.allclose(models[0], models[1], atol=atol)


def test_dp_csgp_with_exact_messages_is_sgp() -> None:
    assert same(DPCSGP(NONE, 0.1), SGP(0.1), irregular())


def test_sgp_on_doubly_stochastic_weights_is_d_psgd() -> None:
    assert same(SGP(0.1), DecentralizedSGD(0.1), metropolis_weights(irregular()))
    assert not same(SGP(0.1), DecentralizedSGD(0.1), irregular())


def test_dp_csgp_on_doubly_stochastic_weights_is_choco() -> None:
    assert same(DPCSGP(ROT, 0.1, 0.6), ChocoSGD(ROT, 0.1, 0.6), metropolis_weights(irregular()))


def test_one_block_is_sgp() -> None:
    assert same(DPBlock(0.1, num_blocks=1), SGP(0.1), irregular())


def test_learning_rate_decays_linearly() -> None:
    schedule = LinearDecay(2.0, 0.25, 5)
    assert [schedule(step) for step in range(6)] == [2.0, 1.625, 1.25, 0.875, 0.5, 0.5]
    state = SGP(schedule).init(torch.zeros(1, 1))
    moved = [
        float(SGP(schedule).descend(state._replace(step=step), torch.ones(1, 1)).x_ND)
        for step in (0, 4)
    ]
    assert moved == [-2.0, -0.5]


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.2])
def test_mixing_rates_outside_zero_to_one_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.mixing_rate"):
        DPCSGP(NONE, 0.1, rate)


def test_more_blocks_than_coordinates_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 3 coordinates"):
        DPBlock(0.1, num_blocks=4).init(torch.zeros(2, 3))


def test_rand_half_diverges_at_rate_one_and_settles_at_the_advised_rate() -> None:
    from dpcsgp.graphs import directed_exponential

    torch.manual_seed(0)
    topology, start = directed_exponential(10), torch.randn(10, 2000)
    spread = {}
    for rate in (1.0, 0.4):
        method = DPCSGP(parse_compressor("rand:0.5"), 0.1, rate)
        models = method.model(
            run(method, Simulator(topology), start, [torch.zeros_like(start)] * 100)
        )
        spread[rate] = float((models - models.mean(0)).pow(2).mean())
    assert spread[1.0] > 1e3 and spread[0.4] < 1e-6


def test_choco_on_a_ring_forgets_where_it_started() -> None:
    ring = metropolis_weights(undirected_ring(5))
    method = ChocoSGD(parse_compressor("rand:0.5"), 0.1, 0.4)
    state = run(method, Simulator(ring), torch.eye(5), [torch.zeros(5, 5)] * 300)
    assert float((method.model(state) - 0.2).abs().max()) < 1e-3
