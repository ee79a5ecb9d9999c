"""Learning rates over the steps of a run: public functions of the step number alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from dpcsgp.algorithms.base import Schedule

RateForm = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class _Decay:
    """From `initial` to `initial * final_fraction` at the last of `steps` steps."""

    initial: float
    final_fraction: float
    steps: int

    def _progress(self, step: int) -> float:
        # Steps beyond the last keep its rate; a schedule of one step does not divide by zero.
        return min(step, self.steps - 1) / max(self.steps - 1, 1)


@final
class LinearDecay(_Decay):
    """A learning rate that falls linearly to a share of what it was.

    >>> LinearDecay(2.0, 0.5, 3)(2)
    1.0
    """

    def __call__(self, step: int) -> float:
        return self.initial * (1 - (1 - self.final_fraction) * self._progress(step))


@final
class CosineDecay(_Decay):
    """A learning rate that falls along half a cosine wave, slowly at both ends.

    >>> CosineDecay(2.0, 0.5, 3)(1)
    1.5
    """

    def __call__(self, step: int) -> float:
        left = (1 + math.cos(math.pi * self._progress(step))) / 2
        return self.initial * (self.final_fraction + (1 - self.final_fraction) * left)


@final
@dataclass(frozen=True)
class WarmUp:
    """A rate that rises linearly over the first `steps` steps to what `then` says.

    >>> WarmUp(LinearDecay(4.0, 1.0, 10), 4)(0)
    1.0
    """

    then: LinearDecay | CosineDecay
    steps: int

    def __call__(self, step: int) -> float:
        return self.then(step) * min(1.0, (step + 1) / self.steps)


def rate_schedule(
    form: RateForm, initial: float, final_fraction: float, steps: int, warmup_steps: int = 0
) -> Schedule:
    """Return the learning rate of every step.

    Args:
        form: how it falls; "constant" does not.
        initial: the largest rate.
        final_fraction: share of it that is left at the last step.
        steps: steps of the run.
        warmup_steps: over so many first steps it rises to the form's rate.
    """
    left = 1.0 if form == "constant" else final_fraction
    falling = CosineDecay if form == "cosine" else LinearDecay
    schedule = falling(initial, left, steps)
    return WarmUp(schedule, warmup_steps) if warmup_steps else schedule
