"""Training methods: one small file each, all with the same functions on their own state.

Names are imported when they are first used: the table of `methods` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dpcsgp.algorithms.base import Algorithm, GossipSGD, Network, Schedule
    from dpcsgp.algorithms.choco_sgd import ChocoSGD
    from dpcsgp.algorithms.d_psgd import DecentralizedSGD
    from dpcsgp.algorithms.dp_block import DPBlock
    from dpcsgp.algorithms.dp_csgp import DPCSGP
    from dpcsgp.algorithms.local import Local
    from dpcsgp.algorithms.methods import METHODS, Method, MethodSettings
    from dpcsgp.algorithms.rates import LinearDecay
    from dpcsgp.algorithms.sgp import SGP

__all__ = [
    "METHODS",
    "SGP",
    "DPCSGP",
    "DecentralizedSGD",
    "Algorithm",
    "ChocoSGD",
    "DPBlock",
    "GossipSGD",
    "LinearDecay",
    "Local",
    "Method",
    "MethodSettings",
    "Network",
    "Schedule",
]

_MODULES: Final = {
    "base": ("Algorithm", "GossipSGD", "Network", "Schedule"),
    "choco_sgd": ("ChocoSGD",),
    "d_psgd": ("DecentralizedSGD",),
    "dp_block": ("DPBlock",),
    "dp_csgp": ("DPCSGP",),
    "local": ("Local",),
    "methods": ("METHODS", "Method", "MethodSettings"),
    "rates": ("LinearDecay",),
    "sgp": ("SGP",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"dpcsgp.algorithms.{module}"), name)
    raise AttributeError(f"module 'dpcsgp.algorithms' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
