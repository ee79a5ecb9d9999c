"""All nodes in one process: an exchange returns its argument, every byte is counted as if sent.

Legend: N hosted nodes (here all of them), S senders heard (here the same), B bytes of a frame.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpcsgp.graphs import Topology
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic


class Simulator(Mixer):
    """A network that hosts every node of the topology.

    Args:
        topology: the graph; all its nodes are rows of the state, in order.
        key: 16 to 64 secret bytes for keyed tags on frames; None: the tag is a checksum.
    """

    def __init__(self, topology: Topology, key: bytes | None = None) -> None:
        super().__init__(topology, range(topology.num_nodes))
        self.topology, self.key = topology, key
        self.traffic = Traffic.of(topology, self.nodes)

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send each node's frame to its receivers.

        Args:
            frames_NB: uint8 (N, B), one frame per node.

        Returns:
            The frames of `senders`, here the same tensor; `traffic` counts its bytes.
        """
        self.traffic.count(frames_NB.shape[1])
        return frames_NB

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """All-gather a value: there is only this process."""
        return [value]
