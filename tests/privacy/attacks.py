"""An attacker who knows everything but the noise and one row, and what his hits say about eps.

He computes the clipped sums of both data sets himself, with the program's own engine, and asks of a
release which of them it is nearer to. Whatever he achieves must be explained by the eps that the
program claims.

Legend: J examples, N nodes, E places for examples, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dpcsgp
from dpcsgp.auditing.bounds import Rates, any_mechanism
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism, calibrate_noise, clipping_engine
from dpcsgp.randomness import PrivateRandomness
from dpcsgp.tasks import Augmentation

CLAIM, DELTA = 0.5, 1e-5
ROW_AT_A_KINK = 1085  # a seed for which kernels disagree about the sign of the residual
Rows = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def lower_bound(hits: int, alarms: int, runs: int) -> float:
    """Return the eps that so many hits and false alarms prove, with 95 % confidence."""
    return any_mechanism(Rates.of(hits, runs, alarms, runs), DELTA)


def nearer(released_D: Tensor, with_D: Tensor, without_D: Tensor) -> bool:
    """Tell whether a release lies nearer to the sum with the row than to the one without it."""
    direction_D = (with_D - without_D).double()
    middle_D = (with_D + without_D).double() / 2
    return float((released_D.double() - middle_D) @ direction_D) > 0


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """L1: where output and target meet, its gradient is the sign of the last bit."""
    return (outputs[:, 0] - targets).abs()


def linear_model() -> nn.Sequential:
    """Return the public model 8-1."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1))


def rows_at_a_kink(count: int, ulps: int = 0) -> Rows:
    """Return equal rows with the target that `linear_model` outputs, rounded in one of its ways.

    Targets may be moved by so many units in the last place: where kernels agree, the residual is
    not zero then.
    """
    layer = linear_model()[0]
    assert isinstance(layer, nn.Linear)
    row = torch.randn(8, generator=torch.Generator().manual_seed(ROW_AT_A_KINK))
    target = row @ layer.weight.detach()[0] + layer.bias.detach()[0]
    for _ in range(abs(ulps)):
        target = torch.nextafter(target, torch.tensor(ulps * float("inf")))
    return row.expand(count, -1).clone(), target.expand(count).clone()


@dataclass
class Attack:
    """One model, loss and data set of J rows.

    Row `gone` may be missing while everything public stays the same.
    """

    module: nn.Sequential
    loss: Loss
    rows: Rows
    rate: float = 1.0
    clip: float = 1.0
    augment: Augmentation | None = None
    gone: int = 0

    def __post_init__(self) -> None:
        total = len(self.rows[0])
        batch = round(self.rate * total)
        noise = calibrate_noise(epsilon=CLAIM, delta=DELTA, sampling_rate=batch / total, steps=1)
        self.mechanism = GaussianMechanism(self.clip, (noise,), (batch,), (total,))
        self.engine = clipping_engine(self.module, self.loss)
        self.model_1D = ParameterLayout.of(self.module).flatten(self.module)[None]

    def sum(self, members: Tensor, random: PrivateRandomness) -> Tensor:
        """Return the clipped sum (D,) over these rows (B,), in the mechanism's shape."""
        shape = self.mechanism.shapes[0]
        indices_1E = torch.zeros(1, shape.width(len(members)), dtype=torch.int64)
        indices_1E[0, : len(members)] = members
        present_1E = (torch.arange(indices_1E.shape[1]) < len(members))[None]
        inputs = self.rows[0][indices_1E]
        if self.augment is not None:
            inputs = self.augment(inputs, random, 0)
        return self.engine.clipped_sum(
            self.model_1D, inputs, self.rows[1][indices_1E], present_1E, self.clip, shape
        )[0]

    def release(self, complete: bool) -> Tensor:
        """Return the noised sum (D,) of one step, with fresh keys.

        The row is drawn only if the data are complete.
        """
        random = PrivateRandomness.fresh([0])

        def clipped_sum(indices_1E: Tensor, present_1E: Tensor) -> Tensor:
            # in random order: without the row, all others still are
            members = indices_1E[present_1E]
            return self.sum(members if complete else members[members != self.gone], random)[None]

        released_1D = self.mechanism.release(clipped_sum, 0, random, [True])
        return released_1D[0] * self.mechanism.expected_batch_sizes[0]

    def expected_sum(self, complete: bool, draws: int = 1) -> Tensor:
        """Return what the attacker expects: the sum over all rows, views averaged if unknown."""
        members = torch.arange(len(self.rows[0]))
        members = members if complete else members[members != self.gone]
        sums = [self.sum(members, PrivateRandomness.fresh([0])) for _ in range(draws)]
        return torch.stack(sums).double().mean(dim=0)

    def bound(self, runs: int, draws: int = 1) -> float:
        """Attack so many releases of both data sets; return the eps that this proves."""
        with_D, without_D = (
            self.rate * self.expected_sum(complete, draws) for complete in (True, False)
        )
        hits, alarms = (
            sum(nearer(self.release(complete), with_D, without_D) for _ in range(runs))
            for complete in (True, False)
        )
        return lower_bound(hits, alarms, runs)


def trained_gradient(
    out: Path, module: nn.Module, loss: Loss, rows: Rows, clip: float = 1.0, **changes: float
) -> Tensor:
    """Train one private step with fresh noise; return the noised sum (D,) that anybody can see."""
    total = len(rows[0])
    settings = {
        "algorithm.name": "dp-sgd",
        "algorithm.steps": 1,
        "algorithm.learning_rate": 1.0,
        "privacy.clip_norm": clip,
        "privacy.expected_batch_size": total,
        "run.evaluate_every": 0,
        "run.checkpoint_every": 0,
        **changes,
    }
    result = dpcsgp.train(
        module, [rows], loss=loss, epsilon=CLAIM, delta=DELTA, settings=settings, out=out
    )
    assert result.summary["private"] and result.epsilon <= CLAIM
    before_D, after_D = (ParameterLayout.of(part).flatten(part) for part in (module, result.model))
    return (before_D - after_D) * total
