"""Choose the mixing rate, and say in plain words whether a setting is healthy.

The rate trades two evils: a high one feeds what the compressor left out back into the network, a
low one mixes slowly. `best_mixing_rate` takes the rate that keeps the nodes closest together when
every round adds noise, which is what private training does. A rule of thumb starts the search and
replaces it on large graphs:

    rate = min(c / (2 - c), gain / (2 - gain)),   c = 1 - (1 - gain)^2 - noise

where c is the share of a squared error that one message removes. For random masks of a share a both
are a / (2 - a). The second bound is exact for the mean: up to it the averaged recursion is stable
on every strongly connected graph.

Legend: N nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

import numpy as np
from scipy import sparse

from dpcsgp.errors import UnstableError
from dpcsgp.graphs.lag import MOST_EXAMINED, lagged_moments, rule_of_lag, slower_rate
from dpcsgp.graphs.second_moments import EXPLICIT_NODES
from dpcsgp.graphs.spectrum import blas_threads, stationary
from dpcsgp.graphs.stability import GossipMoments, mixing_radius
from dpcsgp.graphs.topology import Topology
from dpcsgp.randomness import numpy_generator

if TYPE_CHECKING:
    from dpcsgp.compression.base import Compressor, Moments

Verdict = Literal["stable", "heavy-tailed", "divergent", "no law"]

SIGN_RATE_UNDER_NOISE: Final = 0.15
_MAX_HALVINGS: Final = 40
_DIGITS: Final = 6


def best_mixing_rate(
    topology: Topology,
    compressor: Compressor,
    dim: int,
    *,
    isotropic_noise: bool = False,
    max_lag: int = 0,
) -> float:
    """Return the rate with the smallest steady-state disagreement under unit noise per round.

    With `max_lag` above 0 it is good in step and with all messages late by so many rounds
    (`lag.slower_rate`); where that is not computed, the rate in step is divided by 1 + 0.4 max_lag.

    Up to 64 nodes by search; beyond, the rule of thumb after checking that it is stable. Where no
    second-moment law exists the answer is a cautious rate: see `cautious_mixing_rate`.

    Args:
        topology: the graph.
        compressor: gives gain and noise by `compressor.moments(dim)`.
        dim: coordinates of the model.
        isotropic_noise: equal Gaussian noise on all coordinates outweighs everything else; only
            `sign` makes use of it.
        max_lag: rounds that a node may be ahead of those it hears.

    Returns:
        The mixing rate, in (0, 1].

    Raises:
        UnstableError: no rate is stable with this compressor.
    """
    moments = compressor.moments(dim)
    if moments is None:
        cautious = cautious_mixing_rate(compressor, dim, isotropic_noise=isotropic_noise)
        return rule_of_lag(cautious, max_lag)
    # E|e - q|^2 = residue |e|^2: what a message leaves of a squared error, however small the rate.
    residue = (1.0 - moments.gain) ** 2 + moments.noise
    if residue >= 1.0:
        raise UnstableError(
            f"compression.spec = {compressor.spec!r}: no mixing rate is stable for {dim} "
            "coordinates, because each message adds as much error as it removes, or more "
            f"(it leaves {residue:.3g} of 1); use more bits or one scale per bucket, "
            "for example 'gsgd:8/512'"
        )
    rate = _stable_start(topology, moments)
    rate = rate if topology.num_nodes > EXPLICIT_NODES else _search(topology, moments, rate)
    found = slower_rate(topology, moments.gain, moments.noise, rate, max_lag)
    # Linear algebra rounds by the kind of processor, and every party works its rate out itself:
    # all but the last digits of a search to 1 % are the same everywhere.
    return float(f"{found:.{_DIGITS}g}")


def cautious_mixing_rate(
    compressor: Compressor, dim: int, *, isotropic_noise: bool = False
) -> float:
    """Return c / (2 - c) with c = 1 - omega^2: for compressors without a second-moment law.

    c is the share of a squared error that a message surely removes. Tested, not proven: top:0.1,
    top:0.02, sign:64 and sign:512 stayed bounded in 64 of 64 simulations of 5,000 rounds (1,024
    coordinates; a ring, an exponential graph, an irregular digraph and a star of 10 to 12 nodes; no
    noise, equal noise, noise of very unequal size, a heavy-tailed pull on every node). For sign the
    rate is so low that nodes hardly mix: buckets of 512 give 0.001.

    `isotropic_noise` says that every round adds equal Gaussian noise to all coordinates and that
    this noise outweighs everything else. Then sign gets 0.15: with sign:512, 0.2 and 0.25 stayed
    bounded over 5,000 rounds on 15 graphs, and 0.15 over 20,000 rounds on rings of 30 and 64 nodes
    (0.3 failed on 30). It is not safe otherwise: a heavy-tailed pull of a tenth of the noise made
    it blow up on a ring of 10 nodes within 3,000 rounds. A rotated quantiser such as rot:1 sends as
    few bits and has an exact law.
    """
    if isotropic_noise and compressor.spec.startswith("sign"):
        return SIGN_RATE_UNDER_NOISE
    removed = max(1.0 - compressor.omega_squared(dim), 1.0 / dim)
    return removed / (2.0 - removed)


def _rule(moments: Moments) -> float:
    """Return the rule of thumb of the module docstring."""
    removed = 1.0 - (1.0 - moments.gain) ** 2 - moments.noise
    return min(removed / (2.0 - removed), moments.gain / (2.0 - moments.gain), 1.0)


def _stable_start(topology: Topology, moments: Moments) -> float:
    """Return the rule's rate, halved until it is stable; a small enough rate always is."""
    rate = _rule(moments)
    for _ in range(_MAX_HALVINGS):
        if GossipMoments(topology, moments.gain, moments.noise, rate).is_stable:
            return rate
        rate /= 2.0
    raise UnstableError(
        f"no stable mixing rate above {rate:.1e} on graph {topology.name!r}: use a finer compressor"
    )


def _search(topology: Topology, moments: Moments, start: float) -> float:
    """Minimise the disagreement over log(rate) between a quarter of `start` and 1."""

    def cost(log_rate: float) -> float:
        gossip = GossipMoments(topology, moments.gain, moments.noise, math.exp(log_rate))
        value = gossip.disagreement
        # Finite ends for the optimiser: about the logarithms of the extreme float64 numbers.
        return math.log(value) if 0.0 < value < math.inf else (700.0 if value > 0.0 else -700.0)

    # The cost is finite around the start, so the bracket closes on it even if all else diverges.
    upper = min(0.0, math.log(start) + math.log(4.0))
    from scipy.optimize import minimize_scalar  # slow to import

    found = minimize_scalar(
        cost, bounds=(math.log(start / 4.0), upper), method="bounded", options={"xatol": 0.01}
    )
    best = min((found.x, math.log(start), upper), key=cost)
    # The paper's rate 1 where it costs less than a thousandth more.
    return 1.0 if cost(0.0) <= cost(best) + 1e-3 else math.exp(best)


@final
@dataclass(frozen=True)
class StabilityReport:
    """Say how compressed gossip behaves at a mixing rate, at rate 1 and at the advised rate.

    Attributes:
        graph: name of the topology.
        num_nodes: number of nodes.
        compressor: its spec.
        dim: coordinates of the model.
        mixing_rate: the rate that was examined.
        radius: factor of the disagreement per round at that rate; below 1 it shrinks.
        radius_at_one: the same at rate 1, the paper's.
        advised_rate: what `best_mixing_rate` returns; nan when no rate is stable.
        advised_radius: radius at the advised rate.
        rounds_to_halve: rounds after which the disagreement is half.
        advised_rounds_to_halve: the same at the advised rate.
        verdict: "stable", "heavy-tailed", "divergent" or "no law"; see `classify`.
        explanation: the verdict as one or two sentences.
    """

    graph: str
    num_nodes: int
    compressor: str
    dim: int
    mixing_rate: float
    radius: float
    radius_at_one: float
    advised_rate: float
    advised_radius: float
    rounds_to_halve: float
    advised_rounds_to_halve: float
    verdict: Verdict
    explanation: str

    @property
    def healthy(self) -> bool:
        """Tell whether a run may start."""
        # The mean square decays, or the cautious rate is kept where no law exists.
        return self.verdict == "stable" or (
            self.verdict == "no law" and self.mixing_rate <= self.advised_rate
        )


def stability_report(
    topology: Topology,
    compressor: Compressor,
    dim: int,
    mixing_rate: float | None = None,
    max_lag: int = 0,
) -> StabilityReport:
    """Examine one setting of graph, compressor and mixing rate.

    Args:
        topology: the graph.
        compressor: the compressor of the messages.
        dim: coordinates of the model.
        mixing_rate: the rate to examine, above 0; None: the advised one.
        max_lag: rounds by which messages may be late.

    Returns:
        The report; it never raises UnstableError, its verdict says so instead.
    """
    try:
        advised = best_mixing_rate(topology, compressor, dim, max_lag=max_lag)
    except UnstableError:
        advised = math.nan
    # Where no rate is stable there is nothing to advise: examine the paper's rate 1.
    rate = mixing_rate if mixing_rate is not None else (1.0 if math.isnan(advised) else advised)
    radii = {
        r: math.nan if math.isnan(r) else mixing_radius(topology, compressor, r, dim, max_lag)
        for r in {rate, 1.0, advised}
    }
    verdict = classify(topology, compressor, rate, dim, max_lag)
    return StabilityReport(
        graph=topology.name,
        num_nodes=topology.num_nodes,
        compressor=compressor.spec,
        dim=dim,
        mixing_rate=rate,
        radius=radii[rate],
        radius_at_one=radii[1.0],
        advised_rate=advised,
        advised_radius=radii[advised],
        rounds_to_halve=rounds_to_halve(radii[rate]),
        advised_rounds_to_halve=rounds_to_halve(radii[advised]),
        verdict=verdict,
        explanation=_explain(verdict, compressor.spec, rate, radii[rate], advised)
        + _about_lag(max_lag, topology.num_nodes),
    )


def require_stable(
    topology: Topology, compressor: Compressor, mixing_rate: float, dim: int, max_lag: int = 0
) -> None:
    """Raise UnstableError unless the mean square decays; it names radius, reason and remedy.

    Compressors without a second-moment law pass: nothing can be said beforehand, watch the residual
    during the run.
    """
    moments = compressor.moments(dim)
    if moments is None or _contracts(topology, moments, mixing_rate, max_lag):
        return
    report = stability_report(topology, compressor, dim, mixing_rate, max_lag)
    raise UnstableError(
        f"algorithm.mixing_rate = {mixing_rate:g} on graph {topology.name!r}: {report.explanation}"
    )


def _contracts(topology: Topology, moments: Moments, rate: float, max_lag: int) -> bool:
    """Tell whether the mean square decays, in step and with all messages late."""
    if not GossipMoments(topology, moments.gain, moments.noise, rate).is_stable:
        return False
    # Larger graphs are judged in step, at the rate that the rule of lag would have come from.
    if max_lag and topology.num_nodes > MOST_EXAMINED:
        before = min(rate / rule_of_lag(1.0, max_lag), 1.0)
        return GossipMoments(topology, moments.gain, moments.noise, before).is_stable
    return (
        not max_lag
        or lagged_moments(topology, moments.gain, moments.noise, rate, max_lag).is_stable
    )


def _about_lag(max_lag: int, num_nodes: int) -> str:
    """Say what the verdict rests on where messages may be late."""
    if not max_lag:
        return ""
    if num_nodes > MOST_EXAMINED:
        return (
            f" With network.max_lag = {max_lag} on more than {MOST_EXAMINED} nodes the rate in "
            "step is divided by 1 + 0.4 max_lag: a rule, not a law."
        )
    return f" This is for messages that are all {max_lag} rounds late (network.max_lag)."


def rounds_to_halve(radius: float) -> float:
    """Return the rounds that halve the disagreement: log 2 / -log radius, at least 1."""
    if math.isnan(radius):
        return math.nan
    if radius >= 1.0:
        return math.inf
    return 1.0 if radius <= 0.5 else math.log(2.0) / -math.log(radius)


def classify(
    topology: Topology, compressor: Compressor, mixing_rate: float, dim: int, max_lag: int = 0
) -> Verdict:
    """Name the behaviour: stable, heavy-tailed, divergent, or no law.

    Heavy-tailed: the mean square grows although single paths decay. Only random masks can be so:
    their noise multiplies each coordinate by itself. The noise of quantisers follows the norm of
    many coordinates, so that the mean square is what every path does.
    """
    moments = compressor.moments(dim)
    if moments is None:
        return "no law"
    gossip = GossipMoments(topology, moments.gain, moments.noise, mixing_rate)
    if _contracts(topology, moments, mixing_rate, max_lag):
        return "stable"
    if not max_lag and compressor.spec.startswith("rand") and gossip.linear_radius < 1.0:
        # The top Lyapunov exponent, negative by two standard errors.
        growth, error = typical_growth(topology, moments.gain, mixing_rate)
        if growth + 2.0 * error < 0.0:
            return "heavy-tailed"
    return "divergent"


def typical_growth(
    topology: Topology, share: float, mixing_rate: float, rounds: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return the mean log growth per round of single paths under random masks, and its error.

    That is the top Lyapunov exponent and its standard error, simulated on up to 256 coordinates,
    each scaled back to norm one as it goes; the first fifth of the rounds is left out.
    """
    num_nodes = topology.num_nodes
    coordinates = int(np.clip(40_000 // num_nodes, 16, 256))
    generator = numpy_generator(seed, "typical_growth")
    weights = (
        sparse.csr_matrix(topology.weights) if num_nodes > EXPLICIT_NODES else topology.weights
    )
    # Start with zero sum: the shared part neither grows nor decays.
    x_NC = generator.standard_normal((num_nodes, coordinates))
    x_NC -= stationary(topology)[:, None] * x_NC.sum(axis=0)
    public_NC = np.zeros_like(x_NC)
    log_growth_C = np.zeros(coordinates)
    with blas_threads(num_nodes):
        for round_ in range(rounds):
            # One exchange: a random share of x - x_hat arrives, then gossip on the public copies.
            kept_NC = generator.random(x_NC.shape, dtype=np.float32) < share
            public_NC += kept_NC * (x_NC - public_NC)
            x_NC += mixing_rate * (weights @ public_NC - public_NC)
            # Growth of the pair (x, x_hat), then back to norm one; never divide by zero.
            norm_C = np.sqrt((x_NC**2).sum(axis=0) + (public_NC**2).sum(axis=0)) + 1e-300
            x_NC /= norm_C
            public_NC /= norm_C
            if round_ >= rounds // 5:
                log_growth_C += np.log(norm_C)
    growth_C = log_growth_C / (rounds - rounds // 5)
    return float(growth_C.mean()), float(growth_C.std(ddof=1) / math.sqrt(coordinates))


def _explain(verdict: Verdict, spec: str, rate: float, radius: float, advised: float) -> str:
    """Return the verdict as one or two plain sentences."""
    remedy = (
        "No mixing rate is stable with this compressor: use more bits or one scale per bucket."
        if math.isnan(advised)
        else f"Use mixing_rate = {advised:.3g} or 'auto'."
    )
    if verdict == "stable":
        return (
            f"Gossip with {spec} contracts at mixing rate {rate:.3g}: "
            f"the disagreement shrinks by {radius:.4f} a round."
        )
    if verdict == "no law":
        place = "within" if rate <= advised else "above"
        return (
            f"The error of {spec} depends on the shape of the vector, so no radius exists; "
            f"mixing rate {rate:.3g} is {place} the cautious rate {advised:.3g}. "
            "Watch the residual during the run, or use a rotated quantiser such as rot:1, "
            "whose behaviour is known beforehand."
        )
    if verdict == "heavy-tailed":
        return (
            f"The mean square grows by {radius:.4f} a round with {spec} at mixing rate "
            f"{rate:.3g} although typical paths decay: rare coordinates blow up. {remedy}"
        )
    by = f" by {radius:.4f} a round" if math.isfinite(radius) else ""
    return (
        f"Gossip with {spec} diverges at mixing rate {rate:.3g}: "
        f"the disagreement grows{by}. {remedy}"
    )
