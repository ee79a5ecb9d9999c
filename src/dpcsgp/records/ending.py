"""How a run ended: a value for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum


class Ending(StrEnum):
    """The ways in which training ends.

    `summary.json` holds a sentence that begins with one of them.
    A run that was interrupted can be resumed; all others have ended in their own right.
    """

    COMPLETED = "completed"
    BUDGET_SPENT = "privacy budget spent"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"

    @classmethod
    def of(cls, stopped_because: object) -> Ending | None:
        """Return the ending that a sentence of `summary.json` names; None for any other text.

        >>> Ending.of("diverged: node 3 is not finite")
        <Ending.DIVERGED: 'diverged'>
        """
        return next((ending for ending in cls if str(stopped_because).startswith(ending)), None)

    @property
    def exit_code(self) -> int:
        """What a command that trained returns: 0 for a run that ended in its own right."""
        return {Ending.DIVERGED: 1, Ending.INTERRUPTED: 130}.get(self, 0)
