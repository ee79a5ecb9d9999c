"""Gradients that are ready late, all nodes in one process: who begins and ends when is known.

A gradient is computed where it begins, from the model of that moment, and put in where the timeline
says that it was ready. Those that would never be ready in time are not computed.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from dpcsgp.config import Config
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import NO_GRADIENT, Timeline
from dpcsgp.privacy import PrivateGradients
from dpcsgp.training import Run

_PENDING: Final = "pending_ND"


class SimulatedLateness:
    """Late gradients by a timeline.

    Args:
        gradients: the private step of all nodes.
        timeline: when gradients begin and are put in; one gradient per round.
    """

    checkpoint_names = (_PENDING,)

    def __init__(self, gradients: PrivateGradients, timeline: Timeline) -> None:
        self._turns = timeline.turns
        self._begun = [{turn.gradient for turn in turns} for turns in timeline.turns]
        self._gradients = replace(gradients, begins=self._begins)
        self._pending_ND: Tensor | None = None

    def _begins(self, step: int) -> list[bool]:
        return [step in begun for begun in self._begun]

    def take(self, model_ND: Tensor, step: int) -> tuple[Tensor, Sequence[bool]]:
        """Begin the gradients of this step; return those that are ready, and whose they are."""
        begins = self._begins(step)
        pending_ND = torch.zeros_like(model_ND) if self._pending_ND is None else self._pending_ND
        if any(begins):
            fresh_ND = self._gradients(model_ND, step)
            pending_ND = torch.where(torch.tensor(begins)[:, None], fresh_ND, pending_ND)
        self._pending_ND = pending_ND
        ready = [turns[step].gradient != NO_GRADIENT for turns in self._turns]
        return pending_ND.clone(), ready

    def tensors(self) -> dict[str, Tensor]:
        """Return gradients that are not put in yet."""
        return {} if self._pending_ND is None else {_PENDING: self._pending_ND}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._pending_ND = tensors.get(_PENDING)


def with_lateness(run: Run, config: Config) -> Run:
    """Return the run with late gradients, where the settings ask for them."""
    if config.network.late_gradients == "wait":
        return run
    assert isinstance(run.network, LateSimulator)
    return replace(run, late=SimulatedLateness(run.gradients, run.network.timeline))
