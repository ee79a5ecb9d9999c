"""What was really sent: every frame, headers included, on every directed edge but self-loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dpcsgp.graphs import Topology


@dataclass
class Traffic:
    """Bytes sent by the hosted nodes since the start of the run; a resumed run goes on counting.

    Attributes:
        out_degrees: edges that leave each hosted node, without its self-loop.
        bytes_per_edge: bytes that one edge carried, frames of all rounds.
        rounds: number of exchanges.
        bytes_sent: bytes per hosted node, over all its edges.
    """

    out_degrees: tuple[int, ...]
    bytes_per_edge: int = 0
    rounds: int = 0
    bytes_sent: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, topology: Topology, nodes: Sequence[int]) -> Traffic:
        """Start counting for these nodes."""
        degrees = tuple(len(topology.receivers_from(node)) - 1 for node in nodes)
        return cls(degrees, bytes_sent=[0] * len(degrees))

    def count(self, frame_bytes: int) -> None:
        """Count one round: every hosted node sent a frame of this size along each of its edges."""
        self.rounds += 1
        self.bytes_per_edge += frame_bytes
        self.bytes_sent = [
            sent + degree * frame_bytes
            for sent, degree in zip(self.bytes_sent, self.out_degrees, strict=True)
        ]

    @contextmanager
    def of_whole_rounds(self) -> Iterator[None]:
        """Take back what was counted in a round that fails after its frame was sent.

        The number of rounds names the next frame: a checkpoint of the state before a round, with
        the count after it, would send the frame of this round as that of the next.
        """
        before = self.bytes_per_edge, self.rounds, self.bytes_sent
        try:
            yield
        except BaseException:
            self.restore(*before)
            raise

    def as_dict(self) -> dict[str, int | list[int]]:
        """Return what a checkpoint keeps."""
        return {
            "bytes_per_edge": self.bytes_per_edge,
            "rounds": self.rounds,
            "bytes_sent": list(self.bytes_sent),
        }

    def restore(self, bytes_per_edge: int, rounds: int, bytes_sent: list[int]) -> None:
        """Go on counting from a checkpoint."""
        self.bytes_per_edge, self.rounds, self.bytes_sent = bytes_per_edge, rounds, list(bytes_sent)
