"""What the doctor finds out about one setting, from public facts alone.

It looks at the graph, the theory, stability and the price of a message.

Healthy means that gossip contracts in the mean square (or, where no law exists, that the mixing
rate is the cautious one). The conditions of the convergence theorem are reported but do not decide:
they fail for almost every compressor that trains well.

Legend: N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, final

import numpy as np

from dpcsgp.compression import Compressor, frames, parse_compressor
from dpcsgp.config import Config
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.graphs import (
    LARGEST_SPREAD,
    StabilityReport,
    TheoremReport,
    Topology,
    best_mixing_rate,
    block_disagreement,
    block_radius,
    block_spread,
    classify,
    mixing_radius,
    rounds_to_halve,
    stability_report,
    steady_state_disagreement,
    theorem_report,
)
from dpcsgp.planning.outlook import Sharing
from dpcsgp.runs.design import build_topology
from dpcsgp.runs.noise_price import noise_price

SWEEP: Final = (
    "rand:0.9", "rand:0.75", "rand:0.6", "rand:0.5", "rand:0.1",
    "gsgd:8", "gsgd:8/512", "gsgd:4/64", "rot:1", "rot:2", "rot:3", "rot:4",
)  # fmt: skip


@final
@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All findings about one setting.

    `stability` is None where nothing is compressed with error feedback.
    """

    topology: Topology
    algorithm: str
    compressor: Compressor
    dim: int
    mixing_rate: float
    stability: StabilityReport | None
    theorem: TheoremReport
    radius: float
    disagreement: float
    # what never fades, as a share of the common displacement; above 0 for quantised blocks only
    spread: float
    bytes_per_round: int
    paper_bits_per_round: int
    sharing: Sharing | None  # what shared noise does to the noise; None: it is independent
    healthy: bool
    verdict: str

    @property
    def rounds_to_halve(self) -> float:
        """Return after how many rounds the disagreement is half."""
        return rounds_to_halve(self.radius)


def diagnose(
    config: Config, dim: int, examples_per_node: int, topology: Topology | None = None
) -> Diagnosis:
    """Examine the graph, compressor and mixing rate of the settings, for `dim` coordinates.

    `topology` is that of a roster, which lists its edges; otherwise the settings name one.
    """
    if dim < 1:
        raise ConfigError(f"--dim {dim}: expected at least 1 coordinate")
    topology, method = topology or build_topology(config), config.method
    compressor = parse_compressor(config.compression.spec if method.compresses else "none")
    wanted = config.algorithm.mixing_rate
    # Error feedback has laws of its own; everything else gossips at rate 1.
    stability = None
    if method.error_feedback:
        stability = stability_report(
            topology,
            compressor,
            dim,
            None if wanted == "auto" else wanted,
            config.network.max_lag,
        )
    rate = stability.mixing_rate if stability else 1.0
    # One round sends one block; the largest is what counts.
    payload = math.ceil(dim / config.num_blocks)
    # The theorem knows one budget: the strictest node's.
    epsilon, delta = (_smallest(value) for value in (config.privacy.epsilon, config.privacy.delta))
    theorem = theorem_report(
        topology, compressor, dim, epsilon=epsilon, delta=delta,
        examples_per_node=examples_per_node, c2=config.privacy.c2, mixing_rate=rate,
    )  # fmt: skip
    # What decides is the law of the second moments, not the theorem.
    radius, disagreement, spread = _contraction(config, topology, compressor, rate, dim)
    healthy, verdict = _verdict(config, stability, radius, spread)
    return Diagnosis(
        topology, config.algorithm.name, compressor, dim, rate, stability, theorem,
        radius, disagreement, spread,
        bytes_per_round=frames.frame_bytes(compressor.num_bytes(payload)) if method.sends else 0,
        paper_bits_per_round=compressor.paper_bits(payload) if method.sends else 0,
        sharing=sharing_of(config, topology, rate, dim),
        healthy=healthy, verdict=verdict,
    )  # fmt: skip


def sharing_of(
    config: Config, topology: Topology, mixing_rate: float | None, dim: int
) -> Sharing | None:
    """Return what `privacy.max_colluders` does to the noise of equal nodes; None: nothing."""
    colluders = config.privacy.max_colluders
    if colluders == "all":
        return None
    compressor = parse_compressor(config.compression.spec)
    price = noise_price(config, topology, compressor, mixing_rate, dim)
    return sharing_among(topology.num_nodes, colluders, price)


@lru_cache(maxsize=256)
def sharing_among(num_nodes: int, max_colluders: int, price: float) -> Sharing:
    """Return the factors of `Sharing.among`, computed once."""
    return Sharing.among(num_nodes, max_colluders, price)


def _contraction(
    config: Config, topology: Topology, compressor: Compressor, rate: float, dim: int
) -> tuple[float, float, float]:
    """Return radius, disagreement in the steady state, and the spread that never fades.

    The disagreement is that under unit noise.
    """
    method = config.method
    if not method.sends:
        # Without messages a disagreement never shrinks; one node has none.
        return (1.0, math.inf, 0.0) if topology.num_nodes > 1 else (0.0, 0.0, 0.0)
    if not method.error_feedback and (method.blocks or method.compresses):
        setting = (topology, compressor, config.num_blocks, dim)
        order = config.algorithm.block_order
        return (
            block_radius(*setting, order),
            block_disagreement(*setting, order),
            block_spread(*setting),
        )
    setting = (topology, compressor, rate, dim, config.network.max_lag)
    return mixing_radius(*setting), steady_state_disagreement(*setting), 0.0


def _verdict(
    config: Config, stability: StabilityReport | None, radius: float, spread: float
) -> tuple[bool, str]:
    name, method = config.algorithm.name, config.method
    # From the strongest statement to the weakest: a law, nothing sent, exact, quantised.
    if stability is not None:
        return stability.healthy, stability.explanation
    if not method.sends:
        return (
            True,
            f"{name} exchanges nothing: there is nothing to diverge, and nothing is learned from "
            "others.",
        )
    if not (method.blocks or method.compresses):
        return (
            True,
            f"{name} gossips without compression: the disagreement shrinks by {radius:.4f} a "
            "round on this graph.",
        )
    what = f"{name} gossips on one of {config.num_blocks} blocks a round"
    if config.compression.spec == "none" or not method.compresses:
        return (
            True,
            f"{what}, exactly: the disagreement shrinks by {radius:.4f} a round on this graph.",
        )
    return _verdict_on_quantised_blocks(
        f"{what} with compression.spec = {config.compression.spec!r}", radius, spread
    )


def _verdict_on_quantised_blocks(what: str, radius: float, spread: float) -> tuple[bool, str]:
    remedy = (
        "set compression.spec = 'gsgd:8/64' (more bits, one scale per 64 coordinates) or 'none'"
    )
    # Healthy only if a law exists, contracts, and leaves the nodes close together.
    if math.isnan(radius):
        return (
            False,
            f"{what}: the error of this compressor depends on the shape of the vector, no law "
            f"exists; {remedy}.",
        )
    if radius >= 1.0:
        return (
            False,
            f"{what}: the disagreement grows by a factor of {radius:.4f} a round; {remedy}.",
        )
    law = (
        f"{what}: the disagreement shrinks by {radius:.4f} a round, down to {100 * spread:.2g} % "
        "of the displacement that "
        "all nodes share, because whole values are compressed and not differences"
    )
    return (True, f"{law}.") if spread <= LARGEST_SPREAD else (False, f"{law}; {remedy}.")


@final
@dataclass(frozen=True)
class SweepRow:
    """One compressor on one graph: what mixing rate 1 does, and the best rate.

    The best rate is nan where none is stable.
    """

    compressor: str
    radius_at_one: float
    verdict_at_one: str
    best_rate: float
    best_radius: float
    rounds_to_halve: float
    disagreement: float
    bytes_per_round: int


def sweep(
    topology: Topology, dim: int, specs: Sequence[str] = SWEEP, max_lag: int = 0
) -> list[SweepRow]:
    """Examine many compressors on one graph."""
    return [_sweep_row(topology, parse_compressor(spec), dim, max_lag) for spec in specs]


def _sweep_row(topology: Topology, compressor: Compressor, dim: int, max_lag: int) -> SweepRow:
    try:
        # The best rate, and what it brings; some compressors have none on this graph.
        rate = best_mixing_rate(topology, compressor, dim, max_lag=max_lag)
        radius = mixing_radius(topology, compressor, rate, dim, max_lag)
        disagreement = steady_state_disagreement(topology, compressor, rate, dim, max_lag)
    except UnstableError:
        rate = radius = math.nan
        disagreement = math.inf
    return SweepRow(
        compressor.spec,
        mixing_radius(topology, compressor, 1.0, dim, max_lag),
        classify(topology, compressor, 1.0, dim, max_lag),
        rate,
        radius,
        rounds_to_halve(radius),
        disagreement,
        frames.frame_bytes(compressor.num_bytes(dim)),
    )


def radius_curves(
    topology: Topology, dim: int, specs: Sequence[str], num_rates: int = 40
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return mixing rates from 0.02 to 1, and the radius at each of them.

    There is one curve for every compressor that has a law.
    """
    # Evenly spaced on a logarithmic axis, as the figure has it.
    rates = np.geomspace(0.02, 1.0, num_rates)
    curves = {}
    for spec in dict.fromkeys(specs):
        compressor = parse_compressor(spec)
        if compressor.moments(dim) is not None:
            curves[spec] = np.array(
                [mixing_radius(topology, compressor, float(rate), dim) for rate in rates]
            )
    return rates, curves


def _smallest(value: float | list[float]) -> float:
    return min(value) if isinstance(value, list) else value
