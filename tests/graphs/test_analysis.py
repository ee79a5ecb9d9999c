"""The constants of the theory: known numbers, their defining inequalities, and plain verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from dpcsgp.compression import parse_compressor
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    graph_constants,
    random_digraph,
    star,
    theorem_report,
)

DIM = 101_770

GRAPHS = {
    "exponential": directed_exponential(10),
    "ring": directed_ring(7),
    "star": star(9),
    "complete": complete(6),
    "irregular": random_digraph(12, 0.15, seed=2),
    "defective": from_edges(
        6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (1, 4), (3, 0), (0, 3)]
    ),
}


def test_constants_of_the_exponential_graph_of_ten() -> None:
    constants = graph_constants(directed_exponential(10))
    assert constants.second_eigenvalue == pytest.approx(0.6)
    assert constants.distance_to_identity == pytest.approx(1.186, abs=5e-4)
    assert (constants.decay_spectral, constants.constant_spectral) == pytest.approx((0.6, 1.0))
    assert (constants.decay_frobenius, constants.constant_frobenius) == pytest.approx((0.6, 3.0))
    assert constants.largest_omega_spectral == pytest.approx(0.040, abs=5e-4)
    assert constants.largest_omega_frobenius == pytest.approx(0.0136, abs=5e-5)
    assert constants.smallest_mass == pytest.approx(1.0)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("mixing_rate", [1.0, 0.3])
def test_the_defining_inequalities_hold(name: str, mixing_rate: float) -> None:
    topology = GRAPHS[name]
    constants = graph_constants(topology, mixing_rate)
    identity = np.eye(topology.num_nodes)
    weights = identity + mixing_rate * (topology.weights - identity)
    limit = np.outer(constants.stationary, np.ones(topology.num_nodes))
    np.testing.assert_allclose(weights @ constants.stationary, constants.stationary, atol=1e-12)
    assert constants.stationary.sum() == pytest.approx(1.0)
    power, smallest = identity, np.inf
    for k in range(60):
        for norm, decay, constant in (
            (
                np.linalg.norm(power - limit, 2),
                constants.decay_spectral,
                constants.constant_spectral,
            ),
            (
                np.linalg.norm(power - limit),
                constants.decay_frobenius,
                constants.constant_frobenius,
            ),
        ):
            assert norm <= constant * decay**k * (1 + 1e-6) + 1e-12
        power = weights @ power
        smallest = min(smallest, power.sum(axis=1).min())
    assert constants.smallest_mass == pytest.approx(smallest, rel=1e-6)
    assert constants.smallest_mass > 0
    assert 0 < constants.largest_omega_frobenius <= constants.largest_omega_spectral


def test_a_single_node_has_constants() -> None:
    constants = graph_constants(complete(1))
    assert constants.second_eigenvalue == 0.0
    assert constants.smallest_mass == 1.0
    assert constants.largest_omega_spectral == pytest.approx(10**-0.5)


def test_numbers_of_the_theorem_for_the_small_network() -> None:
    report = theorem_report(
        directed_exponential(10),
        parse_compressor("rand:0.5"),
        DIM,
        epsilon=0.5,
        delta=1e-4,
        examples_per_node=6000,
    )
    assert report.steps == pytest.approx(9.6, abs=0.01)
    assert report.required_examples == pytest.approx(612_000, rel=1e-3)
    assert report.epsilon_floor == pytest.approx(937_000, rel=1e-3)
    assert report.learning_rate == pytest.approx(
        1 / (6000 * 0.5 / (10 * DIM * np.log(1e4)) ** 0.5 + 1)
    )
    assert [condition.holds for condition in report.conditions] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert not report.holds


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        ("gsgd:16", True),
        ("gsgd:8/512", False),
        ("rand:0.998", False),
        ("rand:0.999", True),
        ("none", True),
    ],
)
def test_which_compressors_the_theorem_covers(spec: str, holds: bool) -> None:
    report = theorem_report(
        directed_exponential(10),
        parse_compressor(spec),
        DIM,
        epsilon=0.5,
        delta=1e-4,
        examples_per_node=6000,
    )
    assert report.conditions[0].holds is holds
    assert ("not satisfied" in report.conditions[0].sentence) is not holds


def test_everything_can_hold_at_once() -> None:
    report = theorem_report(
        complete(1), parse_compressor("none"), 1, epsilon=5.0, delta=0.5, examples_per_node=10
    )
    assert report.holds


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("epsilon", {"epsilon": 0.0}),
        ("delta", {"delta": 1.0}),
        ("c2", {"c2": -1.0}),
        ("mixing_rate", {"mixing_rate": 2.0}),
    ],
)
def test_bad_settings_are_refused(field: str, change: dict[str, float]) -> None:
    settings = {"epsilon": 0.5, "delta": 1e-4, "c2": 1.0, "mixing_rate": 1.0} | change
    with pytest.raises(ConfigError, match=field):
        theorem_report(complete(3), parse_compressor("none"), 10, examples_per_node=10, **settings)


def test_large_graphs_answer() -> None:
    topology: Topology = random_digraph(250, 0.03, seed=1)
    constants = graph_constants(topology)
    assert constants.second_eigenvalue <= constants.decay_spectral < 1
    assert 0 < constants.largest_omega_frobenius < constants.largest_omega_spectral
