"""From settings to the checked design of a run; every check comes before any budget is spent.

Only public facts are needed (settings, declared sizes, shapes), so planning uses it too; `build`
adds data, secret keys and files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp import graphs
from dpcsgp.algorithms import Algorithm, MethodSettings
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.algorithms.rates import rate_schedule
from dpcsgp.compression import Compressor, parse_compressor
from dpcsgp.config import Config, per_node
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.graphs import (
    LARGEST_SPREAD,
    Topology,
    best_mixing_rate,
    block_radius,
    block_spread,
    metropolis_weights,
    mixing_radius,
    require_stable,
)
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import (
    GaussianMechanism,
)
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.randomness import torch_seed
from dpcsgp.runs.calibration import build_mechanism, share_noise
from dpcsgp.runs.earlier import NOTHING_EARLIER, Earlier
from dpcsgp.runs.facts import Facts, refuse_own
from dpcsgp.runs.noise_price import noise_price
from dpcsgp.tasks import (
    build_model,
    check_augmentation,
)

# Ends a refusal that the one who runs all nodes can overrule.
ALLOW_DIVERGENCE: Final = " To run it all the same: --allow-divergence"


@dataclass(frozen=True)
class RunDesign:
    """A checked design of a run, from public facts alone."""

    config: Config
    facts: Facts
    topology: Topology
    module: nn.Module
    anchor_D: Tensor
    algorithm: Algorithm[Any]
    polish: Algorithm[Any]
    mechanism: GaussianMechanism
    mixing_rate: float | None
    mixing_radius: float | None
    earlier: Earlier = NOTHING_EARLIER

    @property
    def dim(self) -> int:
        """Number of trained coordinates."""
        return self.anchor_D.numel()

    @property
    def rounds(self) -> int:
        """Exchanges during the gradient steps."""
        return self.config.algorithm.steps // self.config.algorithm.gossip_every

    def bytes_per_edge(self) -> int:
        """Predict the bytes that all rounds put on one edge, those of earlier settings left out."""
        polish_rounds = self.config.algorithm.polish_rounds
        before = self.polish.wire_bytes(self.dim, self.rounds)
        polish = self.polish.wire_bytes(self.dim, self.rounds + polish_rounds) - before
        first_round = self.earlier.steps // self.config.algorithm.gossip_every
        made = self.algorithm.wire_bytes(self.dim, first_round)
        return self.algorithm.wire_bytes(self.dim, self.rounds) - made + polish

    def paper_bits(self, rounds: int, polished: int) -> int:
        """Return the bits per edge by the formulas of the literature."""
        before = self.polish.paper_bits(self.dim, rounds)
        return (
            self.algorithm.paper_bits(self.dim, rounds)
            + self.polish.paper_bits(self.dim, rounds + polished)
            - before
        )


def build_topology(config: Config) -> Topology:
    """Build the graph; undirected methods get its undirected version with Metropolis weights."""
    settings = config.graph
    if config.method.one_place:
        return graphs.complete(1)
    # Functions, so that only the graph that is asked for is built.
    builders: dict[str, Callable[[], Topology]] = {
        "directed_exponential": lambda: graphs.directed_exponential(settings.num_nodes),
        "directed_ring": lambda: graphs.directed_ring(settings.num_nodes),
        "undirected_ring": lambda: graphs.undirected_ring(settings.num_nodes),
        "complete": lambda: graphs.complete(settings.num_nodes),
        "torus": lambda: graphs.torus(settings.num_nodes),
        "star": lambda: graphs.star(settings.num_nodes),
        "random_digraph": lambda: graphs.random_digraph(
            settings.num_nodes, settings.edge_probability, settings.seed
        ),
        "edges": lambda: graphs.from_edges_file(Path(settings.edges_file), settings.num_nodes),
    }
    topology = builders[settings.name]()
    return metropolis_weights(topology) if config.method.undirected else topology


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or cannot see here."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ConfigError(f"run.device = {name!r}: no such device; try 'cpu' or 'cuda'") from None
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise ConfigError(
            f"run.device = {name!r}: torch sees no such device on this machine; "
            "set run.device = 'cpu'"
        )


def design_run(
    config: Config,
    facts: Facts,
    allow_divergence: bool = False,
    module: nn.Module | None = None,
    topology: Topology | None = None,
    earlier: Earlier = NOTHING_EARLIER,
) -> RunDesign:
    """Check everything that can be checked without data and return the parts.

    `module` is the user's own, if any; `topology` that of a roster, which lists its edges;
    `earlier` what was done under other settings before.
    """
    # What is cheap comes first: device, graph, compressors, augmentation.
    check_device(config.run.device)
    _check_unit(config, facts)
    topology = topology or build_topology(config)
    compressor = parse_compressor(config.compression.spec)
    polish_compressor = parse_compressor(
        config.algorithm.polish_compression or config.compression.spec
    )
    check_augmentation(config.task.augmentation, facts.input_shape)
    # The model at its start, the same for everybody: drawn under the public seed.
    if module is None:
        refuse_own(config)
        with torch_seed(config.run.seed, "initial model"):
            module = build_model(config.task.model, facts.input_shape, facts.num_classes)
    check_model(module)
    _warn_about_delta(config, facts.num_examples)
    # Whether gossip is stable depends on the number of coordinates.
    anchor_D = ParameterLayout.of(module).flatten(module)
    rate, radius = _mixing(config, topology, compressor, anchor_D.numel(), allow_divergence)
    algorithm = build_algorithm(config, compressor, rate)
    mechanism = build_mechanism(config, facts.num_examples, earlier)
    if config.privacy.max_colluders != "all":
        price = noise_price(config, topology, compressor, rate, anchor_D.numel())
        mechanism = share_noise(config, mechanism, price)
        if mechanism.shared is not None:
            mechanism.shared.check(anchor_D.numel())
    return RunDesign(
        config, facts, topology, module, anchor_D, algorithm,
        _polish_algorithm(config, algorithm, polish_compressor, topology, anchor_D.numel()),
        mechanism, rate, radius, earlier,
    )  # fmt: skip


def _check_unit(config: Config, facts: Facts) -> None:
    """Refuse a cap on the rows of persons where nobody says whose a row is."""
    if config.privacy.max_rows_per_unit and facts.unit == "example":
        raise ConfigError(
            f"privacy.max_rows_per_unit = {config.privacy.max_rows_per_unit}: every example is its "
            "own unit here; set it to 0, or say in dpcsgp.train(..., unit=...) whose a row is"
        )


def _warn_about_delta(config: Config, num_examples: Sequence[int]) -> None:
    """Warn where delta alone would allow to publish an example of a node now and then."""
    deltas = per_node(config.privacy.delta, len(num_examples))
    for node, (delta, total) in enumerate(zip(deltas, num_examples, strict=True)):
        # One warning is enough: all nodes usually have the same delta.
        if total and delta * total >= 1 and config.privacy.noise != "none":
            warnings.warn(
                f"privacy.delta = {delta:g} for the {total} examples of node {node}: a mechanism "
                "that publishes one of them outright "
                f"would satisfy it; choose delta well below {1 / total:.2g}",
                stacklevel=3,
            )
            return


def _mixing(
    config: Config, topology: Topology, compressor: Compressor, dim: int, allow_divergence: bool
) -> tuple[float | None, float | None]:
    method = config.method
    if not method.error_feedback:
        if method.compresses:
            _check_blocks(config, topology, dim, allow_divergence)
        return None, None
    # With error feedback: the best rate or the given one, and it must be stable.
    wanted = config.algorithm.mixing_rate
    lag = config.network.max_lag
    rate = wanted
    if rate == "auto":
        rate = best_mixing_rate(topology, compressor, dim, max_lag=lag)
    if not allow_divergence:
        try:
            require_stable(topology, compressor, rate, dim, lag)
        except UnstableError as error:
            raise UnstableError(f"{error}{ALLOW_DIVERGENCE}") from None
    return rate, mixing_radius(topology, compressor, rate, dim, lag)


def _check_blocks(config: Config, topology: Topology, dim: int, allow_divergence: bool) -> None:
    """Refuse quantised blocks whose disagreement grows.

    A method without blocks counts as one block. Blocks that leave the nodes far apart or have no
    law bring a warning.
    """
    settings = config.algorithm
    # The polish rounds may use a compressor of their own.
    specs = {"compression.spec": config.compression.spec}
    if settings.polish_compression and settings.polish_rounds:
        specs["algorithm.polish_compression"] = settings.polish_compression
    for field, spec in specs.items():
        compressor = parse_compressor(spec)
        radius = block_radius(topology, compressor, config.num_blocks, dim, settings.block_order)
        spread = block_spread(topology, compressor, config.num_blocks, dim)
        where = (
            f"{field} = {spec!r} with algorithm.name = {settings.name!r} on graph {topology.name!r}"
        )
        remedy = "use 'gsgd:8/64' (more bits, one scale per 64 coordinates) or 'none'"
        if radius >= 1.0 and not allow_divergence:
            raise UnstableError(
                f"{where}: the disagreement grows by a factor of {radius:.4f} a round; {remedy}."
                f"{ALLOW_DIVERGENCE}"
            )
        # Written so that nan, which stands for "no law", brings the warning too.
        if not spread <= LARGEST_SPREAD:
            law = (
                "no law says how far apart the nodes stay"
                if math.isnan(spread)
                else f"nodes stay {spread:.0%} apart"
            )
            warnings.warn(
                f"{where}: {law}, because whole values are compressed and not differences; "
                f"{remedy}",
                stacklevel=4,
            )


def build_algorithm(
    config: Config, compressor: Compressor, mixing_rate: float | None
) -> Algorithm[Any]:
    """Return the method that the settings name."""
    settings, method = config.algorithm, config.method
    assert (mixing_rate is not None) == method.error_feedback
    return method.build(
        MethodSettings(
            compressor=compressor,
            learning_rate=rate_schedule(
                settings.learning_rate_schedule,
                settings.learning_rate,
                settings.learning_rate_decay,
                settings.steps,
                settings.warmup_steps,
            ),
            mixing_rate=1.0 if mixing_rate is None else mixing_rate,
            max_lag=config.network.max_lag,
            skips=config.network.late_gradients == "skip",
            num_blocks=config.num_blocks,
            block_order=settings.block_order,
        )
    )


def _polish_algorithm(
    config: Config, algorithm: Algorithm[Any], compressor: Compressor, topology: Topology, dim: int
) -> Algorithm[Any]:
    if isinstance(algorithm, LaggedDPCSGP):
        return _polish_in_step(config, algorithm, compressor, topology, dim)
    if not (config.method.compresses and config.algorithm.polish_compression):
        return algorithm
    # Another compressor needs another mixing rate.
    rate = best_mixing_rate(topology, compressor, dim) if config.method.error_feedback else None
    return build_algorithm(config, compressor, rate)


def _polish_in_step(
    config: Config, algorithm: LaggedDPCSGP, compressor: Compressor, topology: Topology, dim: int
) -> LaggedDPCSGP:
    """Return the method of polish rounds: nobody computes, so nobody needs to be ahead."""
    given = config.algorithm.mixing_rate
    if given == "auto" or config.algorithm.polish_compression:
        given = best_mixing_rate(topology, compressor, dim)
    return replace(algorithm, compressor=compressor, mixing_rate=given, max_lag=0)
