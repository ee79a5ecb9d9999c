"""The advised rate: never unstable, close to the best, honest where nothing is known."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from dpcsgp.compression import Compressor, parse_compressor
from dpcsgp.errors import UnstableError
from dpcsgp.graphs import (
    Topology,
    best_mixing_rate,
    cautious_mixing_rate,
    classify,
    complete,
    directed_exponential,
    directed_ring,
    mixing_radius,
    random_digraph,
    require_stable,
    rounds_to_halve,
    stability_report,
    star,
    steady_state_disagreement,
    torus,
)
from dpcsgp.graphs.spectrum import stationary
from dpcsgp.randomness import PublicRandomness

DIM = 101_770
GRAPHS = {
    "exponential": directed_exponential(10),
    "ring": directed_ring(10),
    "irregular": random_digraph(12, 0.1, seed=3),
    "star": star(10),
    "torus": torus(12),
    "pair": complete(2),
}
LAWFUL = [
    "none",
    "rand:0.9",
    "rand:0.5",
    "rand:0.1",
    "rand:0.01",
    "gsgd:8/512",
    "gsgd:4/64",
    "gsgd:3/64",
    "rot:1",
]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("spec", LAWFUL)
def test_the_best_rate_is_stable_and_no_other_is_much_better(name: str, spec: str) -> None:
    topology, compressor = GRAPHS[name], parse_compressor(spec)
    rate = best_mixing_rate(topology, compressor, DIM)
    assert 0.0 < rate <= 1.0
    assert mixing_radius(topology, compressor, rate, DIM) < 1.0
    best = steady_state_disagreement(topology, compressor, rate, DIM)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        if rate * factor <= 1.0:
            assert (
                best <= steady_state_disagreement(topology, compressor, rate * factor, DIM) * 1.001
            )


def test_exact_messages_need_no_damping() -> None:
    for topology in GRAPHS.values():
        assert best_mixing_rate(topology, parse_compressor("none"), DIM) == 1.0


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_for_large_graphs_is_stable_and_nearly_best(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = random_digraph(4 + 2 * seed, 0.15, seed)
    for spec in ("rand:0.7", "rand:0.2", "gsgd:4/64", "gsgd:3/64", "rot:1", "rot:3"):
        compressor = parse_compressor(spec)
        best = steady_state_disagreement(
            topology, compressor, best_mixing_rate(topology, compressor, DIM), DIM
        )
        with monkeypatch.context() as patch:
            patch.setattr("dpcsgp.graphs.mixing_rate.EXPLICIT_NODES", 1)
            rate = best_mixing_rate(topology, compressor, DIM)
        assert steady_state_disagreement(topology, compressor, rate, DIM) < 1.5 * best


@pytest.mark.parametrize("spec", ["gsgd:8", "gsgd:2/512"])
def test_a_dither_that_adds_more_than_it_removes_has_no_rate(spec: str) -> None:
    with pytest.raises(UnstableError, match=r"no mixing rate is stable .*one scale per bucket"):
        best_mixing_rate(directed_exponential(10), parse_compressor(spec), DIM)
    report = stability_report(directed_exponential(10), parse_compressor(spec), DIM)
    assert math.isnan(report.advised_rate)
    assert report.verdict == "divergent"
    assert not report.healthy
    assert "No mixing rate" in report.explanation


def test_the_default_is_quick() -> None:
    topology, start = random_digraph(10, 0.3, seed=0), time.process_time()
    best_mixing_rate(topology, parse_compressor("rand:0.5"), DIM)
    assert time.process_time() - start < 0.5


@pytest.mark.slow
def test_a_thousand_nodes_still_get_a_rate() -> None:
    topology, start = directed_exponential(1000), time.process_time()
    assert best_mixing_rate(topology, parse_compressor("rand:0.5"), DIM) == pytest.approx(
        1 / 3, rel=1e-3
    )
    assert time.process_time() - start < 20.0


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.62, "stable"),
        (0.58, "heavy-tailed"),
        (0.56, "heavy-tailed"),
        (0.45, "divergent"),
        (0.1, "divergent"),
    ],
)
def test_heavy_tails_are_told_from_divergence(share: float, verdict: str) -> None:
    assert (
        classify(directed_exponential(10), parse_compressor(f"rand:{share}"), 1.0, DIM) == verdict
    )


def test_quantisers_are_never_called_heavy_tailed() -> None:
    # radius 1.0052
    assert classify(directed_ring(10), parse_compressor("rot:1"), 1.0, DIM) == "divergent"
    assert classify(directed_ring(10), parse_compressor("sign:512"), 1.0, DIM) == "no law"


def test_an_unstable_setting_is_refused_with_the_remedy() -> None:
    topology, compressor = directed_exponential(10), parse_compressor("rand:0.5")
    require_stable(topology, compressor, 0.4, DIM)
    with pytest.raises(
        UnstableError,
        match=r"mixing_rate = 1 .*grows by 1\.0753.*Use mixing_rate = 0\.379 or 'auto'",
    ):
        require_stable(topology, compressor, 1.0, DIM)


def test_the_report_holds_together() -> None:
    topology, compressor = directed_exponential(10), parse_compressor("rand:0.5")
    report = stability_report(topology, compressor, DIM, mixing_rate=1.0)
    assert (report.verdict, report.healthy, report.rounds_to_halve) == (
        "divergent",
        False,
        math.inf,
    )
    assert report.radius == report.radius_at_one == pytest.approx(1.0753, abs=1e-4)
    assert (
        report.advised_radius == mixing_radius(topology, compressor, report.advised_rate, DIM) < 1.0
    )
    assert report.advised_rounds_to_halve == pytest.approx(
        math.log(2) / -math.log(report.advised_radius)
    )
    advised = stability_report(topology, compressor, DIM)
    assert (advised.verdict, advised.healthy) == ("stable", True)
    assert advised.mixing_rate == report.advised_rate


def test_without_a_law_the_report_says_so() -> None:
    compressor = parse_compressor("top:0.1")
    report = stability_report(directed_ring(5), compressor, 1000)
    assert report.verdict == "no law"
    assert math.isnan(report.radius)
    assert report.healthy
    assert "Watch the residual" in report.explanation
    assert not stability_report(directed_ring(5), compressor, 1000, mixing_rate=0.9).healthy


def test_cautious_rates() -> None:
    assert cautious_mixing_rate(parse_compressor("top:0.1"), 1000) == pytest.approx(0.1 / 1.9)
    assert cautious_mixing_rate(parse_compressor("sign:512"), 5120) < 0.01
    assert cautious_mixing_rate(parse_compressor("sign:512"), 5120, isotropic_noise=True) == 0.15


def test_rounds_to_halve() -> None:
    assert rounds_to_halve(0.5) == 1.0
    assert rounds_to_halve(0.0) == 1.0
    assert rounds_to_halve(0.5**0.25) == pytest.approx(4.0)
    assert rounds_to_halve(1.0) == math.inf
    assert math.isnan(rounds_to_halve(math.nan))


def late_over_early(topology: Topology, compressor: Compressor, rate: float, noise: float) -> float:
    """Return the disagreement (mean square) of the last rounds over its maximum early on."""
    dim, rounds = 512, 1500
    generator, streams = (
        torch.Generator().manual_seed(1),
        PublicRandomness(1, range(topology.num_nodes)),
    )
    phi = torch.tensor(stationary(topology), dtype=torch.float32)[:, None]
    pull = rate * torch.tensor(topology.weights - np.eye(topology.num_nodes), dtype=torch.float32)
    x = torch.randn(topology.num_nodes, dim, generator=generator)
    x -= phi * x.sum(0)
    public, spread = torch.zeros_like(x), []
    for round_ in range(rounds):
        x = x + noise * torch.randn(x.shape, generator=generator)
        wire = compressor.encode(x - public, streams, round_)
        public = public + compressor.decode(wire, dim, streams, round_)
        x = x + pull @ public
        # its walk is no disagreement, and float32 should not have to carry it
        mean = phi * x.sum(0)
        x, public = x - mean, public - mean
        spread.append(float(x.square().mean()))
    settling = 0.5 / rate  # the noise needs about that long to pile up
    return max(spread[-100:]) / max(spread[: max(rounds // 10, min(int(settling), rounds // 2))])


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("ring", "top:0.1"),
        *((name, "sign:32") for name in ("exponential", "ring", "irregular", "star")),
    ],
)
def test_cautious_rates_stay_bounded(name: str, spec: str, noise: float) -> None:
    compressor = parse_compressor(spec)
    rate = best_mixing_rate(GRAPHS[name], compressor, 512)
    assert late_over_early(GRAPHS[name], compressor, rate, noise) < (1.0 if noise == 0.0 else 4.0)


@pytest.mark.slow
def test_a_bold_rate_breaks_plain_sign() -> None:
    assert not late_over_early(directed_ring(10), parse_compressor("sign:32"), 0.5, 0.0) < 1e3


@pytest.mark.parametrize("spec", ["rot:1", "gsgd:4/64", "rand:0.5"])
def test_the_rate_has_no_digits_that_depend_on_the_processor(spec: str) -> None:
    """Push-sum weights in frames follow from it, and every party works it out itself."""
    for topology in (random_digraph(4, 0.3, seed=3), directed_ring(5)):
        for lag in (0, 2):
            rate = best_mixing_rate(topology, parse_compressor(spec), DIM, max_lag=lag)
            assert rate == float(f"{rate:.6g}")
