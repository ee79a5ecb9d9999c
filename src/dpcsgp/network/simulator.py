"""All nodes in one process: an exchange returns its argument, and every byte is counted as if it
had travelled.

Legend: N hosted nodes (here all of them), S senders heard (here the same), B bytes of a frame, D
columns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpcsgp.graphs import Topology
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic


class Simulator(Mixer):
    """A network that hosts every node of the topology."""

    def __init__(self, topology: Topology, key: bytes | None = None) -> None:
        super().__init__(topology, range(topology.num_nodes))
        self.topology, self.key = topology, key
        self.traffic = Traffic.of(topology, self.nodes)

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send each hosted node's frame to its receivers; return the frames of `senders`."""
        self.traffic.count(frames_NB.shape[1])
        return frames_NB

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes: there is only this one."""
        return [value]
