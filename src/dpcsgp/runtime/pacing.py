"""How far apart the processes of a run can be, and how they still stop at the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpcsgp.network.agreed import is_count
from dpcsgp.network.board import Board
from dpcsgp.network.health import STOP_ASKED, Health
from dpcsgp.network.torch_distributed import largest_lead
from dpcsgp.records.ending import Stop
from dpcsgp.runs.design import RunDesign
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import TrainingNetwork

MEETING_STEPS = 10


@dataclass(frozen=True)
class Pace:
    """The most steps by which one process can be ahead of another.

    An exchange in every step bounds the lead by itself. Where processes exchange more rarely or not
    at all, they meet every `meet_every` steps at the store.
    """

    lead: int
    meet_every: int = 0

    @classmethod
    def of(cls, design: RunDesign) -> Pace:
        """Return the pace of a run."""
        # A node waits for its senders in every exchange: the graph bounds the lead.
        exchanges = design.algorithm.wire_bytes(design.dim, 1) > 0
        if exchanges and design.config.algorithm.gossip_every == 1:
            return cls(largest_lead(design.topology))
        return cls(MEETING_STEPS, MEETING_STEPS)

    def checkpoints_to_keep(self, checkpoint_every: int) -> int:
        """Return how many checkpoints each process keeps.

        So many that all processes have one step in common at any moment: the slowest may be writing
        the checkpoint that the fastest wrote `lead` steps ago, and may fail at it.
        """
        # Two, and one for every checkpoint within the lead, rounded up.
        return 2 + (-(-self.lead // checkpoint_every) if checkpoint_every else 0)

    def meet(self, network: TrainingNetwork, step: int) -> None:
        """Wait for the others where the exchanges do not."""
        if self.meet_every and step % self.meet_every == 0:
            network.gather_values(f"step {step}", True)


class AgreedStop:
    """Makes all processes stop at the same step.

    In a step that nobody wants to stop at, the store is not asked.

    1. Who is asked to stop says so (`stop asked`); the others learn it from the thread that beats.
    2. Who knows of it says which stop it was asked for, if any (`stop wish/RANK`), and that it
       listens (`stop heard/RANK`), and asks the store before every step from then on.
    3. Once all listen, rank 0 names the kind of stop (`stop kind`: a pause if anybody wants one)
       and a step that nobody can have passed (`stop at`) before it makes its own next one. Nobody
       makes a step that rank 0 is more than `lead` behind, so everybody reads it in time.
    """

    def __init__(
        self, board: Board, world_size: int, health: Health, stop: StopSignal, pace: Pace
    ) -> None:
        self._board, self._health, self._stop = board, health, stop
        self._margin = pace.lead + 1
        self._world_size = world_size
        self._deaf = set(range(1, world_size))  # ranks that rank 0 has not heard of yet
        self._listening = False
        self._stop_at: int | None = None
        self._kind = Stop.PAUSE

    def is_set(self, step: int) -> Stop | None:
        """Return which stop the run makes before this step, if any."""
        # Stage 1 and 2: say that somebody asked, and that this process listens.
        asked = self._stop.is_set(step)
        if not self._listening and (asked or self._health.stop_asked):
            self._listen(step, asked)
        # Stage 3: ask for the step until it is named.
        if self._listening and self._stop_at is None:
            self._stop_at = self._named(step)
        return self._kind if self._stop_at is not None and step >= self._stop_at else None

    def _listen(self, step: int, wish: Stop | None) -> None:
        self._board.put(STOP_ASKED, True)
        self._board.put(f"stop wish/{self._board.rank}", wish or "")
        self._board.put(f"stop heard/{self._board.rank}", step)
        self._listening = True

    def _named(self, step: int) -> int | None:
        """Return the step at which all stop, None while it is open."""
        # Only rank 0 names the step; the others read it.
        if self._board.rank:
            note = self._board.look("stop at", 0, _step_fault)
            kind = self._board.look("stop kind", 0, _kind_fault) if note else None
            self._kind = Stop(kind.value) if kind else Stop.PAUSE
            return note.value if note else None
        self._deaf -= {
            rank for rank in self._deaf if self._board.peek(f"stop heard/{rank}", rank, _step_fault)
        }
        if self._deaf:
            return None
        self._kind = self._wanted()
        self._board.put("stop kind", self._kind)
        # Nobody can be further ahead than `lead`, so nobody has passed this step.
        self._board.put("stop at", step + self._margin)
        return step + self._margin

    def _wanted(self) -> Stop:
        """Return what the processes want: to finish only if nobody wants to go on later."""
        notes = [
            self._board.peek(f"stop wish/{rank}", rank, _wish_fault)
            for rank in range(self._world_size)
        ]
        wishes = {note.value for note in notes if note}
        return Stop.FINISH if wishes <= {Stop.FINISH, ""} and Stop.FINISH in wishes else Stop.PAUSE


def _kind_fault(value: Any) -> str | None:
    return None if value in tuple(Stop) else "a kind of stop"


def _wish_fault(value: Any) -> str | None:
    return None if value == "" else _kind_fault(value)


def _step_fault(value: Any) -> str | None:
    return None if is_count(value) else "a step"
