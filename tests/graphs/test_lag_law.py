"""The law of late messages: that in step at lag 0, confirmed by simulation, and the rate."""

from __future__ import annotations

import numpy as np
import pytest

from dpcsgp.compression import parse_compressor
from dpcsgp.errors import UnstableError
from dpcsgp.graphs import (
    Topology,
    best_mixing_rate,
    directed_exponential,
    directed_ring,
    mixing_radius,
    random_digraph,
    require_stable,
    stability_report,
    star,
)
from dpcsgp.graphs.lag import LaggedMoments, edges_into, lagged_moments, weight_floors, worst_delays
from dpcsgp.graphs.stability import GossipMoments

GRAPHS = (directed_exponential(6), directed_ring(5), star(5), random_digraph(6, 0.3, 1))
DIM = 5000


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("law", [(0.637, 0.231), (0.5, 0.25), (1.0, 0.0)])
def test_without_delay_it_is_the_law_in_step(topology: Topology, law: tuple[float, float]) -> None:
    for rate in (0.2, 0.4):
        late, in_step = lagged_moments(topology, *law, rate, 0), GossipMoments(topology, *law, rate)
        assert late.is_stable == in_step.is_stable
        assert late.disagreement == pytest.approx(in_step.disagreement, rel=1e-6)
        assert late.radius == pytest.approx(in_step.radius, rel=0.02)


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("lag", [1, 4])
def test_the_law_foretells_a_simulation(topology: Topology, lag: int) -> None:
    """Walk the recursion itself with noise, and compare the steady state."""
    gain, noise, rate, num_nodes = 0.6, 0.2, 0.15, topology.num_nodes
    delays = np.full((num_nodes,) * 2, lag)
    law = LaggedMoments(topology, gain, noise, rate, delays)
    chance, columns, rounds = np.random.default_rng(0), 400, 700
    off = rate * topology.weights * (1 - np.eye(num_nodes))
    leaves = rate * (1 - np.diag(topology.weights))[:, None]
    x, hats, found = np.zeros((num_nodes, columns)), [np.zeros((num_nodes, columns))], []
    y, sent = np.ones(num_nodes), []
    for t in range(rounds):
        found.append(((x / y[:, None] - x.sum(0) / y.sum()) ** 2).mean())
        x = x + chance.standard_normal(x.shape)
        error = x - hats[t]
        hats.append(
            hats[t] + gain * error + np.sqrt(noise) * error * chance.standard_normal(x.shape)
        )
        sent.append(y)
        x, y = x - leaves * hats[t + 1], y - leaves[:, 0] * y
        if t >= lag:
            x, y = x + off @ hats[t + 1 - lag], y + off @ sent[t - lag]
    # x / y of what is not under way is measured against the average of that: a little closer.
    assert np.mean(found[300:]) == pytest.approx(law.disagreement, rel=0.15)


def test_all_edges_late_is_the_worst_of_the_constant_delays() -> None:
    for topology in GRAPHS:
        for rate in np.geomspace(0.2, 1.0, 9):
            first, *others = (
                LaggedMoments(topology, 0.637, 0.231, float(rate), delays).is_stable
                for delays in worst_delays(topology, 5)
            )
            assert not first or all(others), (topology.name, rate)


@pytest.mark.parametrize("spec", ["rot:1", "rand:0.5", "top:0.1"])
def test_the_rate_falls_with_the_lag_and_is_stable(spec: str) -> None:
    compressor, topology = parse_compressor(spec), directed_exponential(6)
    rates = [best_mixing_rate(topology, compressor, DIM, max_lag=lag) for lag in (0, 1, 3, 8)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.8 * rates[0]
    assert rates[0] == best_mixing_rate(topology, compressor, DIM)
    for lag, rate in zip((0, 1, 3, 8), rates, strict=True):
        require_stable(topology, compressor, rate, DIM, lag)
        # Safety: half as much again is stable as well.
        require_stable(topology, compressor, min(1.5 * rate, 1.0), DIM, lag)


@pytest.mark.parametrize(
    "topology", [directed_exponential(10), directed_ring(10), star(8)], ids=str
)
def test_the_rate_is_good_in_step_and_with_all_messages_late(topology: Topology) -> None:
    """No other rate is better in both cases, nor much better in the worse of them."""
    compressor, lag = parse_compressor("rot:1"), 3
    moments = compressor.moments(DIM)
    assert moments is not None
    chosen = best_mixing_rate(topology, compressor, DIM, max_lag=lag)

    def costs(rate: float) -> np.ndarray:
        laws = (lagged_moments(topology, moments.gain, moments.noise, rate, k) for k in (0, lag))
        return np.array([law.disagreement for law in laws])

    rates = [*np.geomspace(0.1, 1.0, 24), chosen]
    stable = [
        lagged_moments(topology, moments.gain, moments.noise, min(1.5 * r, 1.0), lag).is_stable
        for r in rates
    ]
    found = np.array([costs(float(rate)) for rate in rates])
    regrets = (found / found.min(axis=0)).max(axis=1)
    assert stable[-1] and regrets[-1] <= 1.02 * regrets[np.array(stable)].min()
    assert regrets[-1] < 1.6, regrets


def test_the_doctor_refuses_a_rate_that_only_lag_makes_diverge() -> None:
    graph, compressor = star(6), parse_compressor("rot:1")
    require_stable(graph, compressor, 0.9, DIM)
    with pytest.raises(UnstableError, match="messages that are all 3 rounds late"):
        require_stable(graph, compressor, 0.9, DIM, 3)
    report = stability_report(graph, compressor, DIM, 0.9, 3)
    assert report.verdict == "divergent" and not report.healthy and report.advised_rate < 0.6
    assert mixing_radius(graph, compressor, report.advised_rate, DIM, 3) < 1.0


def test_large_graphs_get_the_rule() -> None:
    ring, compressor = directed_ring(80), parse_compressor("rot:1")
    in_step = best_mixing_rate(ring, compressor, DIM)
    rate = best_mixing_rate(ring, compressor, DIM, max_lag=5)
    assert rate == pytest.approx(in_step / 3, rel=1e-5)  # six digits are kept
    require_stable(ring, compressor, rate, DIM, 5)
    assert "a rule, not a law" in stability_report(ring, compressor, DIM, None, 5).explanation


def test_edges_and_floors() -> None:
    topology = star(4)
    assert edges_into(topology, [0, 2]) == [(0, 1), (0, 2), (0, 3), (2, 0)]
    assert all(0 < floor <= 0.25 for floor in weight_floors(topology))
