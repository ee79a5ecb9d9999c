"""A looser upper bound on eps from Renyi divergences (RDP), for deltas beyond Fourier transforms.

References: Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism"
(2019); Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments
Accountant" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dpcsgp.errors import ConfigError
from dpcsgp.privacy.events import ReleaseEvent

_ORDERS: Final = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512)


def renyi_epsilon(releases: Sequence[tuple[ReleaseEvent, int]], delta: float) -> float:
    """Return an upper bound on eps from Renyi divergences: looser, but for any delta."""
    # Imported here, as hardly any run comes this way.
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    if len({event.sampling for event, _ in releases}) > 1:
        raise ConfigError(
            f"privacy.delta = {delta}: too small for composing Poisson with uniform releases; "
            f"use a delta of at least {1e-14 * sum(count for _, count in releases):.0e} or account "
            "for them separately"
        )
    # Divergences of one order add up over releases; eps is the best over all orders.
    divergences = sum(count * np.asarray(_renyi_divergences(event)) for event, count in releases)
    return float(rdp.compute_epsilon(_ORDERS, np.asarray(divergences).tolist(), delta)[0])


@lru_cache(maxsize=256)
def _renyi_divergences(event: ReleaseEvent) -> tuple[float, ...]:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if event.sampling == "poisson":
        noisy = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        accountant = RdpAccountant(_ORDERS)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(event.sampling_rate, noisy))
        return tuple(accountant.rdp.tolist())
    # the cost grows with the square of the order
    orders = [order for order in _ORDERS if order <= 64]
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    # half the noise: replacing one example moves the sum by two clip norms
    noisy = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
    # Only the ratio of the two sizes enters, so a data set of size one stands for all.
    rate: Any = event.sampling_rate  # its "sample size" is declared to be a whole number
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, rate, noisy))
    return (*accountant.rdp.tolist(), *[math.inf] * (len(_ORDERS) - len(orders)))
