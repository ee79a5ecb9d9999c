"""How a run ended: a value for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from dpcsgp.errors import ConfigError


class Stop(StrEnum):
    """What somebody who wants to stop a run wants: to go on later, or to finish here.

    A run that finishes makes its polish rounds and leaves models, as at its last step.
    """

    PAUSE = "pause"
    FINISH = "finish"

    @classmethod
    def of(cls, answer: Any) -> Stop | None:
        """Return what an answer of `should_stop` asks for; None: go on.

        >>> Stop.of(False), Stop.of(True), Stop.of("finish")
        (None, <Stop.PAUSE: 'pause'>, <Stop.FINISH: 'finish'>)
        """
        if not isinstance(answer, str):
            return cls.PAUSE if answer else None
        if answer not in tuple(cls):
            raise ConfigError(
                f"should_stop returned {answer!r}: expected False, True (go on later) or "
                '"finish" (polish and end here)'
            )
        return cls(answer)


class Ending(StrEnum):
    """The ways in which training ends.

    `summary.json` holds a sentence that begins with one of them.
    A run that was interrupted can be resumed; all others have ended in their own right.
    """

    COMPLETED = "completed"
    BUDGET_SPENT = "privacy budget spent"
    FINISHED_EARLY = "finished early"
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
