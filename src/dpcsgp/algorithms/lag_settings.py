"""Which settings of lag go together; without torch, for the validation of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dpcsgp.config import Config

MOST_LAG: Final = 64  # frames under way per edge: they are kept on disk and in memory


def lag_fault(config: Config) -> str | None:
    """Say what is wrong with `network.max_lag` and `network.late_gradients`, or None."""
    lag, late = config.network.max_lag, config.network.late_gradients
    name, where = config.algorithm.name, f"network.max_lag = {config.network.max_lag}"
    if lag and not config.method.lags:
        return (
            f'{where}: algorithm.name = "{name}" has no rule for late messages; set '
            'network.max_lag = 0, or choose "dp-csgp" (with compression.spec = "none" and '
            "algorithm.mixing_rate = 1 it is dp-sgp)"
        )
    if late == "wait":
        return None
    where = f'network.late_gradients = "{late}"'
    if not lag:
        return (
            f"{where}: in step nobody is ahead, so nothing tells that a gradient is late; set "
            "network.max_lag = 3 (at least 1)"
        )
    if config.privacy.max_colluders != "all":
        return (
            f"{where}: shared noise cancels only if all of a group release together "
            f"(privacy.max_colluders = {config.privacy.max_colluders}); set "
            'network.late_gradients = "wait", or privacy.max_colluders = "all"'
        )
    if config.algorithm.gossip_every > 1:
        return (
            f"{where}: a gradient is late for a round, and here a round has "
            f"{config.algorithm.gossip_every} of them; set algorithm.gossip_every = 1"
        )
    return None
