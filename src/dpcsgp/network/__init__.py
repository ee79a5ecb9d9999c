"""How frames travel: inside one process, or between processes."""

from dpcsgp.network.mixing import Mixer
from dpcsgp.network.simulator import Simulator
from dpcsgp.network.traffic import Traffic

__all__ = ["Mixer", "Simulator", "Traffic"]
