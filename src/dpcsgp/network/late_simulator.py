"""All nodes in one process, but not in step: frames are taken when a timeline says they came.

Legend: N nodes, E edges, S senders, B bytes of a frame, K rounds whose frames may be under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpcsgp.graphs import Topology
from dpcsgp.graphs.lag import edges_into
from dpcsgp.network.simulator import Simulator
from dpcsgp.network.virtual_time import Timeline

_UNDER_WAY = "under_way_KNB"


class LateSimulator(Simulator):
    """A simulator that plays a timeline.

    Args:
        topology: the graph.
        timeline: when who sent, and what had come by then.
        max_lag: for how many rounds a frame may be under way.
        key: as in `Simulator`.
    """

    def __init__(
        self, topology: Topology, timeline: Timeline, max_lag: int, key: bytes | None = None
    ) -> None:
        super().__init__(topology, key)
        self.timeline, self._lag = timeline, max_lag
        self._degrees = [len(edges_into(topology, [node])) for node in self.nodes]
        self._frames: dict[int, Tensor] = {}  # by round, those that some edge may still take

    def credits(self, round_: int, in_step: Sequence[bool]) -> list[int]:
        """Say how many frames of each edge had come before the own frame of a round."""
        over, found = round_ >= len(self.timeline.turns[0]), []
        for node, degree in zip(self.nodes, self._degrees, strict=True):
            if over or in_step[node]:
                found += [round_] * degree
            else:
                found += self.timeline.turns[node][round_].credits
        return found

    def ahead(self, round_: int) -> list[int]:
        """Say how many frames of each edge were there when the own frame of a round was sent."""
        over, found = round_ >= len(self.timeline.turns[0]), []
        for node, degree in zip(self.nodes, self._degrees, strict=True):
            ahead = () if over else self.timeline.turns[node][round_].ahead
            found += ahead or (0,) * degree
        return found

    def frames_of(self, round_: int, senders: Sequence[int]) -> Tensor:
        """Return frames of a round."""
        return self._frames[round_][list(senders)]

    def send(self, frames_NB: Tensor) -> None:
        """Count the frames and keep them as long as they may be under way."""
        self._frames[self.traffic.rounds] = frames_NB
        self.traffic.count(frames_NB.shape[1])
        self._frames.pop(self.traffic.rounds - self._lag - 2, None)

    checkpoint_names = (_UNDER_WAY,)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: frames that may be under way, the newest last."""
        kept = [self._frames[round_] for round_ in sorted(self._frames)]
        # Frames of another compressor are not under way any more.
        kept = [frames for frames in kept if frames.shape == kept[-1].shape]
        return {_UNDER_WAY: torch.stack(kept)} if kept else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; call it once `traffic` has been restored."""
        kept = tensors.get(_UNDER_WAY, torch.empty(0))
        first = self.traffic.rounds - len(kept)
        self._frames = {first + place: frames for place, frames in enumerate(kept)}
