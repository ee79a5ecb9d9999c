"""Three ways to break the mechanism on purpose; an audit that does not catch them would be worth nothing.

They wrap the parts of a run and change none of them.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final, get_args

import torch
from torch import Tensor

from dpcsgp.algorithms import Algorithm, Network
from dpcsgp.algorithms.base import rate_at
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import ClippingEngine, GaussianMechanism
from dpcsgp.privacy.mechanism import ClippedSum
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.training import Run

Fault = Literal["noise", "clipping", "order"]


def break_run(run: Run, fault: str | None) -> Run:
    """Return the run with a fault: noise scaled by 0.1, clipping off, or messages encoded before the noise."""
    if fault is None:
        return run
    if fault == "noise":
        weak = tuple(0.1 * noise for noise in run.mechanism.noise_multipliers)
        return replace(run, mechanism=replace(run.mechanism, noise_multipliers=weak))
    if fault == "clipping":
        return replace(run, engine=Unclipped(run.engine))
    if fault == "order":
        mechanism = NoiseAside(run.mechanism)
        return replace(
            run,
            mechanism=cast(GaussianMechanism, mechanism),
            algorithm=EncodedTooEarly(run.algorithm, mechanism),
        )
    raise ConfigError(f"--break {fault}: expected one of {', '.join(get_args(Fault))}")


@final
@dataclass(frozen=True)
class Unclipped:
    """A clipping engine that forgets to clip."""

    engine: ClippingEngine

    def clipped_sum(
        self, parameters_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor, clip_norm: float
    ) -> Tensor:
        """Return the plain sum of gradients."""
        return self.engine.clipped_sum(parameters_ND, inputs, targets, present_NE, 1e9 * clip_norm)


@final
class NoiseAside:
    """A mechanism that remembers the noise of its last release."""

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self._mechanism = mechanism
        self.noise_ND = torch.zeros(1, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mechanism, name)

    def release(self, clipped_sum: ClippedSum, step: int, random: PrivateRandomness, active: list[bool]) -> Tensor:
        """Release as usual, and note what the noise was: the same step without noise draws the same batch."""
        quiet = replace(self._mechanism, noise_multipliers=(0.0,) * len(active))
        grad_ND = self._mechanism.release(clipped_sum, step, random, active)
        self.noise_ND = grad_ND - quiet.release(clipped_sum, step, random, active)
        return grad_ND


@final
class EncodedTooEarly:
    """An algorithm that sends `x` as it was before this step's noise was added."""

    def __init__(self, algorithm: Algorithm[Any], mechanism: NoiseAside) -> None:
        self._algorithm, self._mechanism = algorithm, mechanism
        self._late_ND = torch.zeros(1, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def descend(self, state: Any, grad_ND: Tensor) -> Any:
        """Descend as usual, and note how far the noise of this step moved x."""
        rate = rate_at(cast(Any, self._algorithm).learning_rate, state.step)
        self._late_ND = -rate * self._mechanism.noise_ND
        return self._algorithm.descend(state, grad_ND)

    def gossip(self, state: Any, network: Network, random: PublicRandomness) -> Any:
        """Exchange without this step's noise, then add it."""
        quiet = state._replace(x_ND=state.x_ND - self._late_ND)
        sent = self._algorithm.gossip(quiet, network, random)
        return sent._replace(x_ND=sent.x_ND + self._late_ND)
