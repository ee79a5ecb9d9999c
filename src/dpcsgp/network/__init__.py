"""How frames travel: inside one process, or between processes.

The modules log public facts only (connected, peer lost, stopped) under `dpcsgp.network`; a program
that wants to see them configures `logging`.
"""

import logging

from dpcsgp.network.mixing import Mixer
from dpcsgp.network.simulator import Simulator
from dpcsgp.network.traffic import Traffic

__all__ = ["Mixer", "Simulator", "Traffic"]

# Without a handler Python would print warnings to stderr, beside the errors that already go there.
logging.getLogger(__name__).addHandler(logging.NullHandler())
