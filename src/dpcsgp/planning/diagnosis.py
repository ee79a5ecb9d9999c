"""What the doctor finds out about one setting: graph, theory, stability and price of a message, from public facts alone.

Healthy means that gossip contracts in the mean square (or, where no law exists, that the mixing rate is the cautious
one). The conditions of the convergence theorem are reported but do not decide: they fail for almost every compressor that
trains well.

Legend: N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from dpcsgp.blueprint import build_topology
from dpcsgp.compression import Compressor, frames, parse_compressor
from dpcsgp.config import COMPRESSED, Config
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.graphs import (
    StabilityReport,
    TheoremReport,
    Topology,
    best_mixing_rate,
    block_radius,
    classify,
    mixing_radius,
    rounds_to_halve,
    stability_report,
    steady_state_disagreement,
    theorem_report,
)

SWEEP: Final = (
    "rand:0.9", "rand:0.75", "rand:0.6", "rand:0.5", "rand:0.1",
    "gsgd:8", "gsgd:8/512", "gsgd:4/64", "rot:1", "rot:2", "rot:3", "rot:4",
)  # fmt: skip
SILENT: Final = ("local", "dp-sgd")


@final
@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All findings about one setting; `stability` is None where nothing is compressed with error feedback."""

    topology: Topology
    algorithm: str
    compressor: Compressor
    dim: int
    mixing_rate: float
    stability: StabilityReport | None
    theorem: TheoremReport
    radius: float
    disagreement: float
    bytes_per_round: int
    paper_bits_per_round: int
    healthy: bool
    verdict: str

    @property
    def rounds_to_halve(self) -> float:
        """Return after how many rounds the disagreement is half."""
        return rounds_to_halve(self.radius)


def diagnose(config: Config, dim: int, examples_per_node: int) -> Diagnosis:
    """Examine the graph, compressor and mixing rate that the settings name, for `dim` coordinates."""
    if dim < 1:
        raise ConfigError(f"--dim {dim}: expected at least 1 coordinate")
    topology, name = build_topology(config), config.algorithm.name
    compressor = parse_compressor(config.compression.spec if name in (*COMPRESSED, "dp-block") else "none")
    wanted = config.algorithm.mixing_rate
    stability = None
    if name in COMPRESSED:
        stability = stability_report(topology, compressor, dim, None if wanted == "auto" else wanted)
    rate = stability.mixing_rate if stability else 1.0
    payload = math.ceil(dim / config.algorithm.num_blocks) if name == "dp-block" else dim
    epsilon, delta = (_smallest(value) for value in (config.privacy.epsilon, config.privacy.delta))
    theorem = theorem_report(
        topology, compressor, dim, epsilon=epsilon, delta=delta, examples_per_node=examples_per_node,
        c2=config.privacy.c2, mixing_rate=rate,
    )  # fmt: skip
    radius, disagreement = _contraction(config, topology, compressor, rate, dim)
    healthy, verdict = _verdict(config, stability, radius)
    return Diagnosis(
        topology, name, compressor, dim, rate, stability, theorem, radius, disagreement,
        bytes_per_round=0 if name in SILENT else frames.frame_bytes(compressor.num_bytes(payload)),
        paper_bits_per_round=0 if name in SILENT else compressor.paper_bits(payload),
        healthy=healthy, verdict=verdict,
    )  # fmt: skip


def block_disagreement(topology: Topology, num_blocks: int, dim: int) -> float:
    """Return the steady-state disagreement of exact gossip on one block per round under unit noise, mean over phases.

    A block gathers K rounds of noise between its exchanges: K times the disagreement of exact gossip just after one,
    and (K - 1) / 2 rounds of unmixed noise on average, of which 1 - 1 / n is disagreement.
    """
    exact = steady_state_disagreement(topology, parse_compressor("none"), 1.0, dim)
    return num_blocks * exact + (num_blocks - 1) / 2 * (1.0 - 1.0 / topology.num_nodes)


def _contraction(
    config: Config, topology: Topology, compressor: Compressor, rate: float, dim: int
) -> tuple[float, float]:
    name, num_blocks = config.algorithm.name, config.algorithm.num_blocks
    if name in SILENT:
        return (1.0, math.inf) if topology.num_nodes > 1 else (0.0, 0.0)
    if name == "dp-block":
        if compressor.spec != "none":
            return math.nan, math.nan
        return block_radius(topology, num_blocks), block_disagreement(topology, num_blocks, dim)
    return mixing_radius(topology, compressor, rate, dim), steady_state_disagreement(topology, compressor, rate, dim)


def _verdict(config: Config, stability: StabilityReport | None, radius: float) -> tuple[bool, str]:
    name = config.algorithm.name
    if stability is not None:
        return stability.healthy, stability.explanation
    if name in SILENT:
        return True, f"{name} exchanges nothing: there is nothing to diverge, and nothing is learned from others."
    if math.isnan(radius):
        return False, (
            f"dp-block with compression.spec = {config.compression.spec!r} compresses whole values instead of"
            " differences: its error does not fade, and no radius vouches for it. Set compression.spec = 'none'."
        )
    what = f"on one of {config.algorithm.num_blocks} blocks a round" if name == "dp-block" else "without compression"
    return True, f"{name} gossips exactly {what}: the disagreement shrinks by {radius:.4f} a round on this graph."


@final
@dataclass(frozen=True)
class SweepRow:
    """One compressor on one graph: what mixing rate 1 does, and the best rate (nan where none is stable)."""

    compressor: str
    radius_at_one: float
    verdict_at_one: str
    best_rate: float
    best_radius: float
    rounds_to_halve: float
    disagreement: float
    bytes_per_round: int


def sweep(topology: Topology, dim: int, specs: Sequence[str] = SWEEP) -> list[SweepRow]:
    """Examine many compressors on one graph."""
    return [_sweep_row(topology, parse_compressor(spec), dim) for spec in specs]


def _sweep_row(topology: Topology, compressor: Compressor, dim: int) -> SweepRow:
    try:
        rate = best_mixing_rate(topology, compressor, dim)
        radius = mixing_radius(topology, compressor, rate, dim)
        disagreement = steady_state_disagreement(topology, compressor, rate, dim)
    except UnstableError:
        rate = radius = math.nan
        disagreement = math.inf
    return SweepRow(
        compressor.spec,
        mixing_radius(topology, compressor, 1.0, dim),
        classify(topology, compressor, 1.0, dim),
        rate,
        radius,
        rounds_to_halve(radius),
        disagreement,
        frames.frame_bytes(compressor.num_bytes(dim)),
    )


def radius_curves(
    topology: Topology, dim: int, specs: Sequence[str], num_rates: int = 40
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return mixing rates from 0.02 to 1, and the radius at each of them for every compressor that has a law."""
    rates = np.geomspace(0.02, 1.0, num_rates)
    curves = {}
    for spec in dict.fromkeys(specs):
        compressor = parse_compressor(spec)
        if compressor.moments(dim) is not None:
            curves[spec] = np.array([mixing_radius(topology, compressor, float(rate), dim) for rate in rates])
    return rates, curves


def _smallest(value: float | list[float]) -> float:
    return min(value) if isinstance(value, list) else value
