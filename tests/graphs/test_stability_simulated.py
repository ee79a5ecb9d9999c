"""The acceptance test of the radius: predicted growth or decay is what simulated gossip does.

210 random triples of digraph (3 to 40 nodes), compressor (random masks or dither) and mixing rate.
Masks are drawn here with numpy, which is several times faster than through bytes; dithers go
through the real encoder and decoder.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from dpcsgp.compression import Compressor, parse_compressor
from dpcsgp.graphs import Topology, mixing_radius, random_digraph
from dpcsgp.graphs.spectrum import stationary
from dpcsgp.randomness import PublicRandomness

COORDINATES = 20_000
FROM, TO = 20, 60
GREY = (0.95, 1.06)


class Case(NamedTuple):
    topology: Topology
    spec: str
    rate: float


def draw_case(index: int) -> Case:
    """Return the same random triple for the same index; two in three are masks."""
    generator = np.random.default_rng([2024, index])
    num_nodes = int(np.exp(generator.uniform(np.log(3), np.log(41))))
    topology = random_digraph(num_nodes, float(generator.uniform(0.02, 0.5)), seed=index)
    rate = float(np.exp(generator.uniform(np.log(0.05), 0.0)))
    if index % 3:
        return Case(topology, f"rand:{generator.uniform(0.05, 0.95):.3f}", rate)
    return Case(topology, f"gsgd:{generator.integers(2, 7)}/{2 ** generator.integers(4, 10)}", rate)


def compress(
    compressor: Compressor, error: torch.Tensor, generator: torch.Generator, round_: int
) -> torch.Tensor:
    """Return what receivers add."""
    if compressor.spec.startswith("rand"):
        share = compressor.moments(COORDINATES)
        assert share is not None
        return error * (torch.rand(error.shape, generator=generator) < share.gain)
    streams = PublicRandomness(7, range(len(error)))
    return compressor.decode(
        compressor.encode(error, streams, round_), COORDINATES, streams, round_
    )


def simulated_growth(case: Case) -> float:
    """Return the growth per round of the root mean square of x between rounds FROM and TO."""
    compressor, generator = parse_compressor(case.spec), torch.Generator().manual_seed(3)
    phi = torch.tensor(stationary(case.topology), dtype=torch.float32)[:, None]
    pull = case.rate * torch.tensor(
        case.topology.weights - np.eye(case.topology.num_nodes), dtype=torch.float32
    )
    x = torch.randn(case.topology.num_nodes, COORDINATES, generator=generator)
    public = torch.zeros_like(x)
    mean_square = {}
    for round_ in range(TO + 1):
        x -= phi * x.sum(0)  # zero sum, against rounding
        if round_ in (FROM, TO):
            mean_square[round_] = float(x.double().square().mean())
        public += compress(compressor, x - public, generator, round_)
        x += pull @ public
    return (mean_square[TO] / mean_square[FROM]) ** (0.5 / (TO - FROM))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_predicted_growth_is_simulated_growth(part: int) -> None:
    decided, wrong = 0, []
    for index in range(35 * part, 35 * (part + 1)):
        case = draw_case(index)
        radius = mixing_radius(case.topology, parse_compressor(case.spec), case.rate, COORDINATES)
        if GREY[0] <= radius <= GREY[1]:
            continue
        decided += 1
        growth = simulated_growth(case)
        if (growth < 1.0) != (radius < 1.0):
            wrong.append(
                (
                    index,
                    case.topology.num_nodes,
                    case.spec,
                    round(case.rate, 3),
                    round(radius, 4),
                    growth,
                )
            )
    assert not wrong
    assert decided >= 18


@pytest.mark.parametrize("spec", ["rand:0.5", "rand:0.3", "gsgd:4/64", "rot:1"])
def test_decay_of_stable_gossip_is_met_in_value(spec: str) -> None:
    case = Case(random_digraph(8, 0.3, seed=1), spec, 0.25)
    radius = mixing_radius(case.topology, parse_compressor(spec), case.rate, COORDINATES)
    assert simulated_growth(case) == pytest.approx(radius, abs=0.02)
