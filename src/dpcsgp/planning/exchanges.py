"""Ways of exchanging that a plan may choose from, each with its design, its laws and its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

from dpcsgp.algorithms.methods import Method, find_method
from dpcsgp.compression import parse_compressor
from dpcsgp.config import Config, make_config
from dpcsgp.errors import UnstableError
from dpcsgp.graphs import block_disagreement, block_radius, steady_state_disagreement
from dpcsgp.planning.outlook import Gossip
from dpcsgp.planning.timing import time_exchange
from dpcsgp.runs.design import RunDesign, design_run
from dpcsgp.runs.facts import Facts

COMPRESSORS: Final = (
    "rot:1", "rot:2", "rot:3", "rot:4", "gsgd:4/64", "gsgd:8/512",
    "rand:0.5", "rand:0.1", "rand:0.02", "none",
)  # fmt: skip
BLOCKS: Final = ((10, "none"), (30, "none"), (3, "gsgd:8/64"), (10, "gsgd:8/64"))
SELDOM: Final = 3  # also try the two coarsest rotations with an exchange in every third step only
POLISH_ROUNDS: Final = 3
AT_THE_END: Final = "local-then-average"

Tell = Callable[[str], None]


@final
@dataclass(frozen=True)
class Way:
    """One way of exchanging: a design with it, how it gossips, and the seconds of one exchange."""

    design: RunDesign
    gossip: Gossip
    seconds: float


def ways_of_exchanging(
    config: Config, facts: Facts, batch_size: int, steps: int, tell: Tell
) -> list[Way]:
    """Prepare and time every way of exchanging that is stable on this graph.

    Args:
        config: graph, task, model, budget and lag.
        facts: what is public about the data.
        batch_size: that of the designs; plans put in their own.
        steps: as many steps as the designs have, likewise.
        tell: is told what is being timed.

    Returns:
        The ways; all designs share one model.
    """
    ways: list[Way] = []
    for label, algorithm, spec in _exchanges(config):
        tell(f"timing one exchange: {label}")
        if not _can_lag(config, find_method(algorithm["name"]), algorithm.get("gossip_every", 1)):
            continue
        tried = _tried(config, {"steps": steps, **algorithm}, spec, batch_size)
        if ways and algorithm.get("num_blocks", 1) > ways[0].design.dim:
            continue
        try:
            design = design_run(tried, facts, module=ways[0].design.module if ways else None)
        except UnstableError:
            continue
        if ways:  # one copy of a large model is enough
            design = replace(design, anchor_D=ways[0].design.anchor_D)
        silent = not tried.method.sends or design.topology.num_nodes == 1
        ways.append(Way(design, _gossip(design), 0.0 if silent else time_exchange(design)))
    return ways


def _exchanges(config: Config) -> list[tuple[str, dict[str, Any], str]]:
    """Return label, settings of the algorithm and compressor of every way that is tried."""
    often = {"name": "dp-csgp", "polish_rounds": POLISH_ROUNDS}
    blocks = [
        (f"{k} blocks", {"name": "dp-block", "num_blocks": k, "polish_rounds": k}, spec)
        for k, spec in BLOCKS
    ]
    seldom = {**often, "gossip_every": SELDOM}
    exchanges: list[tuple[str, dict[str, Any], str]] = [
        *((spec, often, spec) for spec in COMPRESSORS),
        *blocks,
        ("local", {"name": "local", "polish_rounds": 0}, "none"),
        *((f"{spec}, every {SELDOM} steps", seldom, spec) for spec in COMPRESSORS[:2]),
    ]
    # Models that were trained apart can be averaged only where the loss is convex.
    if config.task.model == "logistic":
        end = {"name": AT_THE_END, "polish_rounds": POLISH_ROUNDS}
        exchanges += [(f"{spec}, at the end", end, spec) for spec in ("rot:3", "rot:4")]
    return exchanges


def _tried(config: Config, algorithm: dict[str, Any], spec: str, batch_size: int) -> Config:
    """Return the settings of one way of exchanging."""
    method = find_method(algorithm["name"])
    # Who exchanges nothing averages nothing: shared noise would not cancel.
    colluders = config.privacy.max_colluders if method.sends else "all"
    usual = {"gossip_every": 1, "mixing_rate": "auto", "polish_compression": ""}
    return changed(
        config,
        algorithm={**usual, **algorithm},
        compression={"spec": spec},
        network={} if method.lags else {"max_lag": 0, "late_gradients": "wait"},
        privacy={
            "expected_batch_size": batch_size,
            "noise": "calibrated",
            "max_colluders": colluders,
        },
    )


def _can_lag(config: Config, method: Method, gossip_every: int) -> bool:
    """Say whether a way of exchanging goes with `network.max_lag`; silent ones need not."""
    if not config.network.max_lag or not method.sends:
        return True
    skips = config.network.late_gradients == "skip"
    return method.lags and not (skips and gossip_every > 1)


def _gossip(design: RunDesign) -> Gossip:
    topology, settings, method = design.topology, design.config.algorithm, design.config.method
    if not method.sends:
        return Gossip(radius=1.0, disagreement=0.0, num_averaged=1)
    compressor = parse_compressor(design.config.compression.spec)
    if method.blocks:
        setting = (topology, compressor, settings.num_blocks, design.dim, settings.block_order)
        return Gossip(block_radius(*setting), block_disagreement(*setting), topology.num_nodes)
    assert design.mixing_rate is not None
    assert design.mixing_radius is not None
    lag = design.config.network.max_lag
    spread = steady_state_disagreement(topology, compressor, design.mixing_rate, design.dim, lag)
    if method.only_at_end:
        # noise is averaged afterwards: taken to help half as much (in decibels) as before
        halfway = max(1, round(math.sqrt(topology.num_nodes)))
        return Gossip(1.0, 1.0, halfway, polish_radius=design.mixing_radius)
    # Between two exchanges the noise of k steps adds up, and a round is a k-th of a step's
    # contraction.
    every = settings.gossip_every
    return Gossip(
        design.mixing_radius ** (1 / every), spread * math.sqrt(every), topology.num_nodes
    )


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the settings with some keys of some sections replaced, validated again."""
    values = config.model_dump()
    return make_config(
        {name: {**table, **sections.get(name, {})} for name, table in values.items()}
    )
