"""What rough messages cost: the price that decides how much noise pairs of nodes share.

Shared noise cancels in the average of all nodes, but each node trains on, sends and ends with a
model that carries it until gossip has averaged it away. In the planner's bound (`planning.outlook`)
a run with mean learning rate eta falls short of its goal by

    eta d V / (2 R C)  for noise of variance V per coordinate in the average's gradient, and by
    d D / (2 R^2)      for nodes whose models have the variance D around the average,

with d coordinates, clip norm C, and a goal at distance R. The steady-state law gives D = last^2 u W
at the end of a run, under noise of variance W in each node's gradient: u is the disagreement under
unit noise, last the learning rate of the last step. So W costs

    price = last^2 u C / (R eta)

times as much as V. Polish rounds take from D, and rough models while training add to it: neither is
counted. `docs/cancelling-noise.md` has the grid on which the rule was tried.
"""

from __future__ import annotations

import math
from typing import Final

from dpcsgp.compression import Compressor
from dpcsgp.config import Config
from dpcsgp.graphs import Topology, block_disagreement, steady_state_disagreement

DISTANCE: Final = 25.0  # R: how far a model walks from its start, a reference and no measurement
_UNKNOWN: Final = 2.0  # disagreement under unit noise where no law exists
_MOST: Final = 1.0  # a price above this would leave nothing to share


def noise_price(
    config: Config,
    topology: Topology,
    compressor: Compressor,
    mixing_rate: float | None,
    dim: int,
) -> float:
    """Return what variance of a single release costs, in variance of the average.

    Args:
        config: settings of the run; learning rate, momentum, decay and clip norm count.
        topology: who hears whom.
        compressor: how messages shrink.
        mixing_rate: of error feedback; None for methods without.
        dim: number of coordinates.
    """
    settings = config.algorithm
    # Momentum amplifies every rate by the same factor.
    first = settings.learning_rate / (1 - settings.momentum)
    last = first * settings.learning_rate_decay
    unit = disagreement_under_unit_noise(config, topology, compressor, mixing_rate, dim)
    mean = (first + last) / 2
    return min(last**2 * unit * config.privacy.clip_norm / (DISTANCE * mean), _MOST)


def disagreement_under_unit_noise(
    config: Config,
    topology: Topology,
    compressor: Compressor,
    mixing_rate: float | None,
    dim: int,
) -> float:
    """Return the variance of a node's model around the average, by the doctor's law."""
    method, settings = config.method, config.algorithm
    if method.error_feedback:
        found = steady_state_disagreement(
            topology, compressor, mixing_rate or 1.0, dim, config.network.max_lag
        )
    elif method.blocks or method.compresses:
        found = block_disagreement(
            topology, compressor, config.num_blocks, dim, settings.block_order
        )
    else:
        found = block_disagreement(topology, compressor, 1, dim, "round-robin")
    # Between two exchanges the noise of so many steps adds up.
    return (found if math.isfinite(found) else _UNKNOWN) * settings.gossip_every
