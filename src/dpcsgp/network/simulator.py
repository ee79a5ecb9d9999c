"""All nodes in one process: an exchange returns its argument, and every byte is counted as if it had travelled.

Legend: N hosted nodes (here all of them), S senders heard (here the same), B bytes of a frame, D columns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpcsgp.graphs import Topology
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic


class Simulator:
    """A network that hosts every node of the topology."""

    def __init__(self, topology: Topology, key: bytes | None = None) -> None:
        self.topology = topology
        self.key = key
        self._mixer = Mixer(topology, range(topology.num_nodes))
        self.traffic = Traffic.of(topology, self._mixer.nodes)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes hosted by this process."""
        return self._mixer.nodes

    @property
    def senders(self) -> tuple[int, ...]:
        """Nodes whose messages are heard here, the hosted ones included, ascending."""
        return self._mixer.senders

    @property
    def own_rows(self) -> tuple[int, ...]:
        """Rows of the hosted nodes among the senders."""
        return self._mixer.own_rows

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send each hosted node's frame to its receivers; return the frames of `senders`."""
        self.traffic.count(frames_NB.shape[1])
        return frames_NB

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Add `sum_j weights[i, j] values_j` to `onto_ND` (zeros if not given), sender after sender."""
        return self._mixer.mix(values_SD, onto_ND)

    def agree(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes: there is only this one."""
        return [value]
