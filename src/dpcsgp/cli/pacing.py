"""How far apart the processes of a run can be, and how they stop at the same step in spite of it."""

from __future__ import annotations

from dataclasses import dataclass

from dpcsgp import training
from dpcsgp.blueprint import Blueprint
from dpcsgp.network.health import Store, read
from dpcsgp.network.torch_distributed import largest_lead
from dpcsgp.signals import StopSignal

MEETING_STEPS = 10


@dataclass(frozen=True)
class Pace:
    """The most steps by which one process can be ahead of another.

    An exchange in every step bounds the lead by itself. Where processes exchange more rarely or not at all, they meet
    every `meet_every` steps at the store.
    """

    lead: int
    meet_every: int = 0

    @classmethod
    def of(cls, blueprint: Blueprint) -> Pace:
        """Return the pace of a run."""
        exchanges = blueprint.algorithm.wire_bytes(blueprint.dim, 1) > 0
        if exchanges and blueprint.config.algorithm.gossip_every == 1:
            return cls(largest_lead(blueprint.topology))
        return cls(MEETING_STEPS, MEETING_STEPS)

    def snapshots_to_keep(self, checkpoint_every: int) -> int:
        """Return how many snapshots each process keeps, so that all processes have one step in common at any moment.

        The slowest process may be writing the snapshot that the fastest wrote `lead` steps ago, and may fail at it.
        """
        return 2 + (-(-self.lead // checkpoint_every) if checkpoint_every else 0)

    def meet(self, network: training.TrainingNetwork, step: int) -> None:
        """Wait for the others where the exchanges do not."""
        if self.meet_every and step % self.meet_every == 0:
            network.agree(f"step {step}", True)


class AgreedStop:
    """Makes all processes stop at the same step: the first to be asked announces one that nobody can have passed."""

    def __init__(self, store: Store, stop: StopSignal, pace: Pace) -> None:
        self._store, self._stop, self._margin = store, stop, pace.lead + 1
        self._announced = False

    def is_set(self, step: int) -> bool:
        """Say whether the run ends before this step."""
        if self._stop.is_set(step) and not self._announced:
            self._store.compare_set("stop at", "", str(step + self._margin))
            self._announced = True
        agreed = read(self._store, "stop at")
        return agreed is not None and step >= int(agreed)
