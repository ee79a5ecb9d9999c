"""A party that is slow: its gradient is computed in a thread while it gossips on time.

| moment | on disk |
|---|---|
| gradient begun before step s | nothing: after a crash another is begun |
| it is ready | release s |
| put in at round t >= s | line s in the ledger, then turn t names s, then the frame of round t |

So a release is made once, and put in once: after a crash turns that are on disk are played as
they were, and a release that no turn names is put in next. What decides is the clock and what
others have sent, never a value; that a frame came without a gradient is told to its receivers.

A version of the roster may end before a release is put in. The next one puts it in, as it is, if
gradients may be late there too; otherwise nobody ever sees it.

Legend: N hosted nodes (here one), D coordinates.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.errors import JournalError
from dpcsgp.federation.lagged_network import LaggedPartyNetwork
from dpcsgp.federation.turn_log import NO_GRADIENT
from dpcsgp.privacy import PrivateGradients
from dpcsgp.privacy.kept_releases import Release
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign
from dpcsgp.training import Run


@final
class BackgroundGradients:
    """Gradients of one party that may be late.

    Args:
        gradients: the private step; it must keep its releases.
        network: the party's network, whose turns say what was put in.
        put_in_before: the last one that was put in under earlier versions of the roster.
    """

    def __init__(
        self,
        gradients: PrivateGradients,
        network: LaggedPartyNetwork,
        put_in_before: int = NO_GRADIENT,
    ) -> None:
        assert gradients.kept is not None
        self._put_in_before = put_in_before
        self._kept, self._network = gradients.kept, network
        self.gradients = replace(gradients, oldest_needed=self.oldest_needed)
        self._begun = NO_GRADIENT
        self._thread: threading.Thread | None = None
        self._ready: Release | None = None
        self._fresh = False  # made since this start: its line in the ledger is missing
        self._failure: BaseException | None = None

    def oldest_needed(self, step: int) -> int:
        """Return the oldest release that a start from a checkpoint of this step may need."""
        return self.last_put_in(step) + 1

    def last_put_in(self, step: int) -> int:
        """Return which gradient was put in last before a step, under all versions; -1: none."""
        return max(self._put_in_before, self._network.last_gradient_before(step))

    def is_played(self, step: int) -> bool:
        """Say whether the turn of a step is on disk: it is played again, and nothing is drawn."""
        return self._network.turn_of(step) is not None

    def take(self, model_ND: Tensor, step: int) -> tuple[Tensor, Sequence[bool]]:
        """Return the gradient that goes into the frame of this step, or none.

        Raises:
            WaitStoppedError: the network was stopped.
        """
        turn = self._network.turn_of(step)
        if turn is not None:  # played again after a crash
            found = turn.gradient
        else:
            if self._begun == NO_GRADIENT:
                self._begin(model_ND, step)
            ready = self._network.await_or_late(step, self._is_ready)
            found = self._begun if ready else NO_GRADIENT
        self._network.put_in(found)
        if found == NO_GRADIENT:
            return torch.zeros_like(model_ND), [False]
        return self._put_in(found, model_ND), [True]

    def close(self) -> None:
        """Wait for a gradient that is under way; its release is kept for the next start."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self, model_ND: Tensor, step: int) -> None:
        """Begin a gradient; one that was ready before a crash comes first."""
        self._ready, self._fresh = None, False
        # A party that had gone further than its version may have releases of later steps.
        kept = self._kept.steps_from(self.oldest_needed(step))
        left = [number for number in kept if number <= step]
        self._begun = left[0] if left else step
        if left:
            self._ready = self._kept.find(left[0])
            return
        model_ND = model_ND.clone()

        def work() -> None:
            try:
                self._ready, self._fresh = self.gradients.compute(model_ND, step), True
            except BaseException as error:  # raised where it is awaited
                self._failure = error
            self._network.wake()

        self._thread = threading.Thread(target=work, name="gradient", daemon=True)
        self._thread.start()

    def _is_ready(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._ready is not None

    def _put_in(self, number: int, model_ND: Tensor) -> Tensor:
        release = self._kept.find(number)
        if release is None:
            raise JournalError(
                f"the release of step {number} was put into a frame but is no longer kept; "
                "restore ledger and journal from one copy"
            )
        if number == self._begun:
            if self._fresh:  # its line in the ledger before anything made of it can leave
                self.gradients.account(number, release)
            self._begun = NO_GRADIENT
        return release.grad_ND.to(model_ND.dtype)


def with_late_gradients(run: Run, design: RunDesign, data: RunData, put_in_before: int) -> Run:
    """Return the run of a party whose gradients may be late, if the settings say so."""
    if design.config.network.late_gradients == "wait":
        return run
    assert isinstance(run.network, LaggedPartyNetwork)
    late = BackgroundGradients(run.gradients, run.network, put_in_before)
    # Evaluation switches modules between training and not: it gets one of its own.
    module = copy.deepcopy(design.module)
    task = data.task(module, run.network.nodes).to(design.config.run.device)
    return replace(run, gradients=late.gradients, late=late, task=task)


def gradients_heard(run: Run, state: Any) -> dict[int, int]:
    """Return how many gradients this party and those it hears have put in, as frames say."""
    if not (isinstance(run.algorithm, LaggedDPCSGP) and run.algorithm.counts):
        return {}
    heard = {
        edge.sender: int(count)
        for edge, count in zip(run.algorithm.edges, state.heard_E1, strict=True)
    }
    return {run.network.nodes[0]: int(state.given_N1), **heard}


@contextmanager
def lateness(run: Run) -> Iterator[None]:
    """Let a gradient that is under way end before files are closed."""
    try:
        yield
    finally:
        if isinstance(run.late, BackgroundGradients):
            run.late.close()
