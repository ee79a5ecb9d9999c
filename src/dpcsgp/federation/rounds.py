"""Which rounds of the whole plan a version of the roster makes, and how the journal counts them.

Rounds and steps are counted over all versions; a journal counts from 0 in each of them. Where
somebody has just joined, or few rounds are left, the first frame of a version is everybody's own
model, uncompressed, and its rounds follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpcsgp.federation.agreement import handed_over_bytes
from dpcsgp.federation.roster import Roster
from dpcsgp.runs.design import RunDesign


@final
@dataclass(frozen=True)
class Rounds:
    """The rounds of one version.

    Attributes:
        roster: the version.
        design: what it means.
        until: the next version, if it takes effect before the plan ends.
    """

    roster: Roster
    design: RunDesign
    until: Roster | None = None

    @property
    def first(self) -> int:
        """The first round of this version."""
        return self.roster.history[-1].rounds if self.roster.history else 0

    @property
    def end(self) -> int:
        """The round after the last one of this version, polishing included."""
        if self.until is not None:
            return self.until.history[-1].rounds
        return self.design.rounds + self.design.config.algorithm.polish_rounds

    @property
    def last_step(self) -> int:
        """The number of gradient steps when this version ends."""
        if self.until is not None:
            return self.until.history[-1].steps
        return self.design.config.algorithm.steps

    @property
    def shift(self) -> int:
        """What to add to a number of the journal to get the round of the plan."""
        return self.first - self.roster.hands_over

    def made(self, frames: int) -> int:
        """Return how many rounds of the plan are over after so many frames of this version."""
        return max(frames + self.shift, self.first)

    def size_of_frame(self, number: int) -> int:
        """Return the public size of a frame by its number in the journal; 0: there is none."""
        round_, design = number + self.shift, self.design
        if round_ < self.first:
            return handed_over_bytes(self.roster, design)
        method = design.algorithm if round_ < design.rounds else design.polish
        # Blocks take turns: sizes repeat after all of them.
        turn = round_ % design.config.num_blocks
        size = method.wire_bytes(design.dim, turn + 1) - method.wire_bytes(design.dim, turn)
        return size if round_ < self.end else 0
