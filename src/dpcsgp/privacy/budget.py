"""How many releases each node may still make: the accountant says it once, then it is counted."""

from __future__ import annotations

from collections.abc import Sequence

from dpcsgp.errors import BudgetExceededError


class Budget:
    """Per-node allowances of further releases.

    None stands for "not limited" (no noise, or the paper's noise rule).
    """

    def __init__(self, nodes: Sequence[int], remaining: Sequence[int | None]) -> None:
        self.nodes = tuple(nodes)
        self.remaining = list(remaining)

    @classmethod
    def unlimited(cls, nodes: Sequence[int]) -> Budget:
        """Return a budget that never ends."""
        return cls(nodes, [None] * len(nodes))

    def allows(self, row: int) -> bool:
        """Say whether one more release of this node fits."""
        left = self.remaining[row]
        return left is None or left > 0

    def spend(self, row: int) -> None:
        """Count one release.

        The refusal is a guard: whoever spends asks `allows` first.
        """
        left = self.remaining[row]
        if left is None:
            return
        if left < 1:
            raise BudgetExceededError(
                f"node {self.nodes[row]}: the next release would exceed its privacy budget; "
                "raise privacy.epsilon, or stop here"
            )
        self.remaining[row] = left - 1
