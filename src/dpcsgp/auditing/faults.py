"""Ways to break the mechanism on purpose; an audit that does not catch them would be worth nothing.

They wrap the parts of a run and change none of them. Of a mechanism they see what everybody sees:
the callback that sums a batch, and what is released.

Legend: N hosted nodes, E places for examples, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast, final, get_args

import numpy as np
import torch
from torch import Tensor

from dpcsgp.algorithms import Algorithm, Network
from dpcsgp.algorithms.base import rate_at
from dpcsgp.auditing.colluders import PAIR_FAULTS
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import ClippingEngine, GaussianMechanism
from dpcsgp.privacy.mechanism import ClippedSum
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.training import Run

Fault = Literal[
    "noise",
    "clipping",
    "order",
    "rate",
    "double-rate",
    "reused-noise",
    "same-batch",
    "mean-clipping",
    "drawn-size",
    "copied-noise",
    "rows-apart",
    "pair-stream-twice",
    "pair-sign",
    "one-more-colluder",
    "pair-within",
]

FAULTS: Final[dict[str, str]] = {
    "noise": "a tenth of the noise",
    "clipping": "gradients are not clipped",
    "order": "messages are encoded before the noise is added",
    "rate": "sampling rate + 20 %",
    "double-rate": "sampling rate x 2",
    "reused-noise": "noise of step 2 k used again at 2 k + 1",
    "same-batch": "the same batch in every step",
    "mean-clipping": "clipped by the mean norm of the batch",
    "drawn-size": "divided by the drawn batch size",
    "copied-noise": "noise of even coordinates copied to odd ones",
    "rows-apart": "a person's rows are clipped one by one",
    **PAIR_FAULTS,
}


def check_fault(fault: str | None, mechanism: GaussianMechanism, rows_per_unit: int = 1) -> None:
    """Refuse a fault that does not exist, and one that would change nothing here."""
    if fault is None:
        return
    if fault not in get_args(Fault):
        raise ConfigError(f"--break {fault}: expected one of {', '.join(get_args(Fault))}")
    if fault in PAIR_FAULTS and mechanism.shared is None:
        raise ConfigError(
            f"--break {fault}: pairs share no noise here, so this changes nothing; "
            "use --set privacy.max_colluders=1"
        )
    if fault == "rows-apart" and rows_per_unit == 1:
        raise ConfigError(
            "--break rows-apart: an example has one row here, so this changes nothing; "
            "use --set privacy.max_rows_per_unit=4"
        )
    if mechanism.event(0).sampling_rate == 1 and fault in ("rate", "double-rate", "same-batch"):
        raise ConfigError(
            f"--break {fault}: every example is in every batch here, so this changes nothing; "
            "choose an expected_batch_size below the number of examples"
        )
    if mechanism.sampling == "uniform" and fault == "drawn-size":
        raise ConfigError(
            "--break drawn-size: uniform batches have one size, so this changes nothing; "
            "use --set privacy.sampling=poisson"
        )


def break_run(run: Run, fault: str | None) -> Run:
    """Return the run with a fault."""
    honest = run.gradients
    # encoding before the noise needs two parts that know of each other
    if fault == "order":
        aside = NoiseAside(honest.mechanism)
        gradients = replace(honest, mechanism=cast(GaussianMechanism, aside))
        return replace(run, gradients=gradients, algorithm=EncodedTooEarly(run.algorithm, aside))
    gradients = replace(
        honest,
        mechanism=break_mechanism(honest.mechanism, fault),
        engine=break_engine(honest.engine, fault),
    )
    return replace(run, gradients=gradients)


def break_mechanism(mechanism: GaussianMechanism, fault: str | None) -> GaussianMechanism:
    """Return the mechanism with a fault, or as it is if the fault lies elsewhere."""
    broken: dict[str | None, Callable[[GaussianMechanism], Faulty]] = {
        "noise": WeakNoise,
        "rate": lambda it: Oversampled(it, 1.2),
        "double-rate": lambda it: Oversampled(it, 2.0),
        "reused-noise": ReusedNoise,
        "same-batch": SameBatch,
        "drawn-size": DrawnSize,
        "copied-noise": CopiedNoise,
    }
    return cast(GaussianMechanism, broken[fault](mechanism)) if fault in broken else mechanism


def break_engine(engine: ClippingEngine, fault: str | None) -> ClippingEngine:
    """Return the clipping engine with a fault, or as it is if the fault lies elsewhere."""
    if fault == "rows-apart":
        return RowsApart()
    if fault not in ("clipping", "mean-clipping"):
        return engine
    return Unclipped(engine, by_mean=fault == "mean-clipping")


class Faulty:
    """A mechanism whose batch, noise or divisor a subclass spoils; by itself it spoils nothing."""

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self._mechanism = mechanism

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mechanism, name)

    def release(
        self, clipped_sum: ClippedSum, step: int, random: PrivateRandomness, active: Sequence[bool]
    ) -> Tensor:
        """Release as usual, take sum and noise apart, and put them together with the fault."""
        sums, sizes = [], []

        def spoilt_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
            batch = self.batch(indices_NE, present_NE, step, random, active)
            sum_ND = clipped_sum(*batch)
            sums.append(sum_ND.clone())  # the mechanism adds its noise in place
            sizes.append(batch[1].sum(1))
            return sum_ND

        grad_ND = self._mechanism.release(spoilt_sum, step, random, active)
        # released * divisor = sum + noise; nodes that took no part have neither
        divisors_N1 = torch.tensor(self._mechanism.expected_batch_sizes)[:, None].clamp(min=1)
        idle_N = ~torch.tensor(active)
        sums[-1][idle_N] = 0
        noise_ND = self.noise(grad_ND * divisors_N1 - sums[-1], step)
        return (sums[-1] + noise_ND) / self.divisors(divisors_N1, sizes[-1][:, None])

    def batch(
        self,
        indices_NE: Tensor,
        present_NE: Tensor,
        step: int,
        random: PrivateRandomness,
        active: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        """Return the batch that is used."""
        return indices_NE, present_NE

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        """Return the noise that is used."""
        return noise_ND

    def divisors(self, public_N1: Tensor, drawn_N1: Tensor) -> Tensor:
        """Return what is divided by."""
        return public_N1


@final
class Oversampled(Faulty):
    """Takes examples more often than it says."""

    def __init__(self, mechanism: GaussianMechanism, factor: float) -> None:
        super().__init__(mechanism)
        self._factor = factor

    def batch(
        self,
        indices_NE: Tensor,
        present_NE: Tensor,
        step: int,
        random: PrivateRandomness,
        active: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        """Draw anew, at a larger rate."""
        totals = self._mechanism.num_examples
        present = np.zeros((len(totals), max(totals)), dtype=bool)
        for row in np.flatnonzero(active):
            words = random.row_bytes("sampling", step, int(row), 4 * totals[row]).view(np.uint32)
            expected = self._factor * self._mechanism.expected_batch_sizes[row]
            if self._mechanism.sampling == "poisson":
                present[row, : totals[row]] = words < 2.0**32 * expected / totals[row]
            else:
                present[row, np.argsort(words)[: math.ceil(expected)]] = True
        indices_E = torch.arange(max(totals))
        return indices_E.expand(len(totals), -1), torch.from_numpy(present)


@final
class WeakNoise(Faulty):
    """Adds a tenth of the noise."""

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        """Return a tenth of it."""
        return 0.1 * noise_ND


@final
class SameBatch(Faulty):
    """Goes on with the first batch."""

    _first: tuple[Tensor, Tensor] | None = None

    def batch(
        self,
        indices_NE: Tensor,
        present_NE: Tensor,
        step: int,
        random: PrivateRandomness,
        active: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        """Return the batch of the first step."""
        if self._first is None:
            self._first = indices_NE.clone(), present_NE.clone()
        return self._first


@final
class ReusedNoise(Faulty):
    """Uses the noise of an even step twice."""

    _last_ND: Tensor | None = None

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        """Return the noise of the step before, at odd steps."""
        if step % 2 == 0 or self._last_ND is None:
            self._last_ND = noise_ND.clone()
        return self._last_ND


@final
class CopiedNoise(Faulty):
    """Makes half of the noise."""

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        """Copy coordinates 0, 2, ... to 1, 3, ..."""
        odd_ND = noise_ND[:, 1::2]
        odd_ND.copy_(noise_ND[:, 0::2][:, : odd_ND.shape[1]])
        return noise_ND


@final
class DrawnSize(Faulty):
    """Divides by a number that depends on the data."""

    def divisors(self, public_N1: Tensor, drawn_N1: Tensor) -> Tensor:
        """Return the drawn sizes."""
        return drawn_N1.clamp(min=1)


@final
@dataclass(frozen=True)
class Unclipped:
    """A clipping engine that forgets to clip, or clips a batch by the mean norm of its examples.

    For the second an example must be its own gradient.
    """

    engine: ClippingEngine
    by_mean: bool = False

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = PassShape(),
        filled_NEM: Tensor | None = None,
    ) -> Tensor:
        """Return the plain sum of gradients, or scale it so that the mean norm is the clip norm."""
        # norms of the gradients, which here are the examples themselves
        whole = inputs if filled_NEM is None else inputs.sum(dim=2)
        norms_NE = whole.norm(dim=-1) * present_NE
        mean_N1 = (norms_NE.sum(1) / present_NE.sum(1).clamp(min=1))[:, None]
        # a clip norm that no gradient reaches
        sum_ND = self.engine.clipped_sum(
            parameters_ND, inputs, targets, present_NE, 1e9 * clip_norm, shape, filled_NEM
        )
        return sum_ND * (clip_norm / mean_N1.clamp(min=clip_norm)) if self.by_mean else sum_ND


@final
class RowsApart:
    """A clipping engine that clips every row of a person by itself: M rows count M times.

    An example must be its own gradient.
    """

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = PassShape(),
        filled_NEM: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of all rows, each no longer than the clip norm."""
        assert filled_NEM is not None
        factors_NEM1 = (clip_norm / inputs.norm(dim=-1, keepdim=True)).clamp(max=1.0).nan_to_num()
        kept_NEM1 = (filled_NEM & present_NE[:, :, None])[..., None]
        return (inputs * factors_NEM1 * kept_NEM1).flatten(1, 2).sum(dim=1)


@final
class NoiseAside(Faulty):
    """A mechanism that remembers the noise of its last release."""

    noise_ND = torch.zeros(1, 1)

    def noise(self, noise_ND: Tensor, step: int) -> Tensor:
        """Note the noise as it stands in the gradient."""
        divisors_N1 = torch.tensor(self._mechanism.expected_batch_sizes)[:, None].clamp(min=1)
        self.noise_ND = (noise_ND / divisors_N1).float()
        return noise_ND


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
