"""Training methods: one small file each, all with the same functions on their own state."""

from dpcsgp.algorithms.base import Algorithm, LinearDecay, Network, Schedule
from dpcsgp.algorithms.choco_sgd import ChocoSGD
from dpcsgp.algorithms.d_psgd import DecentralizedSGD
from dpcsgp.algorithms.dp_block import DPBlock
from dpcsgp.algorithms.dp_csgp import DPCSGP
from dpcsgp.algorithms.local import Local
from dpcsgp.algorithms.sgp import SGP

__all__ = [
    "SGP",
    "DPCSGP",
    "DecentralizedSGD",
    "Algorithm",
    "ChocoSGD",
    "DPBlock",
    "LinearDecay",
    "Local",
    "Network",
    "Schedule",
]
