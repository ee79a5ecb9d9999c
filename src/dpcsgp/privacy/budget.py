"""How many releases each node may still make; asks the accountant once, then counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpcsgp.errors import BudgetExceededError
from dpcsgp.privacy.accounting import ReleaseEvent, releases_within

Releases = Iterable[tuple[ReleaseEvent, int]]


class Budget:
    """Per-node allowances of further releases; None stands for "not limited" (no noise, or the paper's noise rule)."""

    def __init__(self, nodes: Sequence[int], remaining: Sequence[int | None]) -> None:
        self.nodes = tuple(nodes)
        self.remaining = list(remaining)

    @classmethod
    def of(
        cls,
        nodes: Sequence[int],
        events: Sequence[ReleaseEvent],
        epsilons: Sequence[float],
        deltas: Sequence[float],
        spent: Sequence[Releases],
    ) -> Budget:
        """Ask the accountant how many releases fit beside what was already spent."""
        remaining = [
            releases_within(event, epsilon, delta, tuple(before))
            for event, epsilon, delta, before in zip(events, epsilons, deltas, spent, strict=True)
        ]
        return cls(nodes, remaining)

    @classmethod
    def unlimited(cls, nodes: Sequence[int]) -> Budget:
        """Return a budget that never ends."""
        return cls(nodes, [None] * len(nodes))

    def allows(self, row: int) -> bool:
        """Say whether one more release of this node fits."""
        left = self.remaining[row]
        return left is None or left > 0

    def spend(self, row: int) -> None:
        """Count one release, or refuse it."""
        left = self.remaining[row]
        if left is None:
            return
        if left < 1:
            raise BudgetExceededError(
                f"node {self.nodes[row]}: the next release would exceed its privacy budget; "
                "raise privacy.epsilon, or stop here"
            )
        self.remaining[row] = left - 1
