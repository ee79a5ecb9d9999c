"""Draw the mechanism itself, again and again, and note all that its stated law speaks of.

Everything private enters a release through the one callback that sums the drawn examples. The audit
holds that callback, so it knows which examples were drawn, what their clipped sum must be, and
therefore the noise of every release: `released * divisor - sum of the examples, each clipped`.

Half of the nodes hold the canary, ten clip norms long, as example 0. All other examples lie along
an axis at right angles to it, half of them half a clip norm long, half of them three: a batch thus
has gradients that differ, and a sum that grows with its size.

Legend: S steps, N nodes, J examples of a node, E drawn places, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Protocol, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from dpcsgp.auditing.canaries import canary_axis, output_as_loss
from dpcsgp.auditing.colluders import SeenByColluders, trial_mechanism
from dpcsgp.auditing.experiment import CANARY_NORMS, DIM, Setting
from dpcsgp.auditing.faults import break_engine, break_mechanism
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import ClippingEngine, GaussianMechanism, ReleaseEvent, clipping_engine
from dpcsgp.privacy.mechanism import ClippedSum
from dpcsgp.privacy.noise import SENSITIVITY_SLACK
from dpcsgp.randomness import PrivateRandomness

DRAWS: Final = 100_000
FEWEST_DRAWS: Final = 10_000
NODES: Final = 1000
_FEWEST_EXAMPLES: Final = 24  # enough for batches of different sizes
_MOST_CHOICES: Final = 2 * 10**9  # whether an example is drawn
_SEED_SHIFT: Final = 2**40  # keys apart from those of the message stream
_SHORT, _LONG = 0.5, 3.0  # other examples, in clip norms


class Releases(Protocol):
    """What is audited: anything that releases as `GaussianMechanism` does."""

    def release(
        self, clipped_sum: ClippedSum, step: int, random: PrivateRandomness, active: Sequence[bool]
    ) -> Tensor:
        """Return the private gradients (N, D) of this step."""
        ...


@final
@dataclass(frozen=True)
class Draws:
    """What was seen of all releases; noise in units of the stated one, lengths in clip norms."""

    event: ReleaseEvent
    expected_batch_size: int
    num_examples: int
    inside_N: np.ndarray  # who holds the canary
    noise_SND: np.ndarray
    heard_SN: np.ndarray  # the release along the canary, times the public divisor
    sizes_SN: np.ndarray  # drawn examples
    canary_SN: np.ndarray  # whether example 0 was drawn
    times_J: np.ndarray  # how often each example was drawn, over all nodes and steps
    shared_S: np.ndarray  # examples that a step's batches share with those of the step before
    shared_first_S: np.ndarray  # ... and with those of the first step
    shared_nodes: int  # examples that nodes 2 i and 2 i + 1 drew in the same step
    most_repeats: int  # times an example stood in one batch
    sums_per_release: tuple[int, int]  # fewest and most
    sum_error: float  # largest distance of a clipped sum from what it must be
    other_canary: float  # what the other half of the nodes holds: 0 (blank) or -1 (the opposite)

    @property
    def size(self) -> int:
        """Number of releases."""
        return self.sizes_SN.size

    @property
    def other_axis_D(self) -> np.ndarray:
        """Unit vector of all examples but the canary."""
        return axes(self.noise_SND.shape[2])[1].numpy()

    @property
    def canary_axis_D(self) -> np.ndarray:
        """Unit vector of the canary."""
        return axes(self.noise_SND.shape[2])[0].numpy()


def draw_mechanism(setting: Setting, draws: int, fault: str | None) -> Draws:
    """Make `draws` releases with the run's own mechanism and clipping, and watch them."""
    if draws < FEWEST_DRAWS:
        raise ConfigError(
            f"--draws {draws}: expected at least {FEWEST_DRAWS}; the default is {DRAWS}"
        )
    mechanism, group = many_nodes(setting), setting.group
    module, rows = nn.Sequential(nn.Linear(DIM, 1, bias=False)), setting.rows_per_unit
    engine = clipping_engine(module, output_as_loss, rows_per_unit=rows)
    watch = Watch(mechanism, break_engine(engine, fault), rows)
    if mechanism.shared is None:
        private = setting.private_streams(range(NODES), shift=_SEED_SHIFT)
        return watch_releases(watch, break_mechanism(mechanism, fault), private, draws)
    # with shared noise: what observers with colluders see of the victim of each group
    private = setting.private_streams(range(group * NODES), shift=_SEED_SHIFT)
    seen = SeenByColluders(trial_mechanism(mechanism, private, fault))
    return watch_releases(watch, break_mechanism(cast(Any, seen), fault), private, draws)


def watch_releases(
    watch: Watch, mechanism: Releases, private: PrivateRandomness, draws: int
) -> Draws:
    """Draw what should keep the law of `watch.mechanism`; huge data sets get fewer draws."""
    affordable = max(FEWEST_DRAWS, min(draws, _MOST_CHOICES // watch.total))
    for step in range(math.ceil(affordable / NODES)):
        watch.begin()
        watch.end(mechanism.release(watch.clipped_sum, step, private, [True] * NODES))
    return watch.draws()


def many_nodes(setting: Setting) -> GaussianMechanism:
    """Return the run's mechanism for many nodes like its first, at the same sampling rate."""
    batch, total = scaled(*setting.stated_batch)
    law = setting.mechanism.shared
    return replace(
        setting.mechanism,
        shared=law.with_batch(batch, batch / total) if law is not None else None,
        noise_multipliers=setting.mechanism.noise_multipliers[:1] * NODES,
        expected_batch_sizes=(batch,) * NODES,
        num_examples=(total,) * NODES,
    )


def scaled(batch: int, total: int) -> tuple[int, int]:
    """Return the smallest like batch and data size: the same rate within a thousandth."""
    # the first fraction near enough, with denominators of twice the size at each try
    rate = Fraction(batch, total)
    near, room = Fraction(0), 32
    while abs(near - rate) > rate / 1000:
        near, room = rate.limit_denominator(room), 2 * room
    times = math.ceil(_FEWEST_EXAMPLES / near.denominator)
    return times * near.numerator, times * near.denominator


def axes(dim: int) -> tuple[Tensor, Tensor]:
    """Return the canary's unit vector and one orthogonal to it; `dim` is a multiple of 4."""
    first_D = canary_axis(dim)
    return first_D, first_D * (1.0 - 2.0 * (torch.arange(dim) % 4 >= 2))


class Watch:
    """Sums the drawn examples as a run does, and keeps what the tests need."""

    def __init__(
        self, mechanism: GaussianMechanism, engine: ClippingEngine, rows_per_unit: int = 1
    ) -> None:
        self.mechanism, self.engine, self.rows_per_unit = mechanism, engine, rows_per_unit
        self.total = mechanism.num_examples[0]
        self.inside_N = torch.arange(NODES) % 2 == 0
        # "replace one": the neighbour holds the opposite canary; "add or remove": a blank
        self.other = -1.0 if mechanism.sampling == "uniform" else 0.0
        self.canary_axis_D, self.other_axis_D = axes(DIM)
        self.canary_N = torch.where(self.inside_N, 1.0, self.other)
        self.length_J = torch.where(torch.arange(self.total) % 2 == 0, _LONG, _SHORT)
        self.length_J[0] = 0.0  # the canary's place
        # of the release under way: batches of the first step, of the last and of this one
        self.first_NJ = self.before_NJ = self.drawn_NJ = torch.zeros(0)
        self.sum_ND = torch.zeros(0)
        self.sums = 0
        # over all releases so far
        self.times_J = torch.zeros(self.total, dtype=torch.int64)
        self.shared_nodes = self.most_repeats = 0
        self.fewest, self.most, self.sum_error = 2**31, 0, 0.0
        self.steps: list[dict[str, np.ndarray]] = []

    def begin(self) -> None:
        """Get ready for one release of every node."""
        self.sums, self.before_NJ = 0, self.drawn_NJ
        self.drawn_NJ = torch.zeros(NODES, self.total, dtype=torch.int8)
        self.sum_ND = torch.zeros(NODES, DIM, dtype=torch.float64)

    def clipped_sum(self, indices_NE: Tensor, present_NE: Tensor) -> Tensor:
        """Note who was drawn and what the sum must be; return what the engine makes of it."""
        self.sums += 1
        # who was drawn; absent places point at example 0 and count nothing
        places_NE = indices_NE.where(present_NE, 0)
        self.drawn_NJ.scatter_add_(1, places_NE, present_NE.to(torch.int8))
        # what the sum must be: every example clipped by itself to at most one clip norm
        unit = self.mechanism.clip_norm
        lengths_NE = self.length_J[places_NE].clamp(max=1.0).double() * present_NE
        canary_N = (self.canary_N[:, None] * (places_NE == 0) * present_NE).sum(1)
        self.sum_ND = unit * (
            canary_N[:, None].double() * self.canary_axis_D
            + lengths_NE.sum(1)[:, None] * self.other_axis_D
        )
        # what the engine under audit makes of the same examples
        inputs_NED = unit * self._examples(places_NE)
        targets_NE = torch.zeros(places_NE.shape)
        sum_ND = self._summed(inputs_NED, targets_NE, present_NE)
        error = (sum_ND.double() - self.sum_ND).norm(dim=1).max() / unit
        self.sum_error = max(self.sum_error, float(error.nan_to_num(torch.inf)))
        return sum_ND

    def _summed(self, inputs_NED: Tensor, targets_NE: Tensor, present_NE: Tensor) -> Tensor:
        """Return what the engine makes of examples, or of persons whose rows add up to them."""
        model_ND, clip, rows = torch.zeros(NODES, DIM), self.mechanism.clip_norm, self.rows_per_unit
        if rows == 1:
            return self.engine.clipped_sum(model_ND, inputs_NED, targets_NE, present_NE, clip)
        inputs, targets = (
            part[:, :, None].expand(-1, -1, rows, *part.shape[2:]).clone()
            for part in (inputs_NED / rows, targets_NE)
        )
        filled_NEM = present_NE[:, :, None].expand(-1, -1, rows).clone()
        return self.engine.clipped_sum(
            model_ND, inputs, targets, present_NE, clip, filled_NEM=filled_NEM
        )

    def end(self, release_ND: Tensor) -> None:
        """Note what came out."""
        clip, batch = self.mechanism.clip_norm, self.mechanism.expected_batch_sizes[0]
        # undo the public divisor
        total_ND = release_ND.double() * batch / clip
        # what is left after the known sum, in units of the noise; it is raised by the slack
        noise_ND = (
            (total_ND - self.sum_ND / clip)
            / self.mechanism.noise_multipliers[0]
            / (1 + SENSITIVITY_SLACK)
        )
        # what batches have in common with the step before, the first step and the next node
        drawn_NJ, first = self.drawn_NJ > 0, not self.steps
        self.first_NJ = drawn_NJ if first else self.first_NJ
        self.times_J += self.drawn_NJ.sum(0)
        self.most_repeats = max(self.most_repeats, int(self.drawn_NJ.max()))
        self.shared_nodes += int((drawn_NJ[0::2] & drawn_NJ[1::2]).sum())
        self.fewest, self.most = min(self.fewest, self.sums), max(self.most, self.sums)
        shared = 0 if first else int((drawn_NJ & (self.before_NJ > 0)).sum())
        self.steps.append(
            {
                "noise": noise_ND.numpy(),
                "heard": (total_ND @ self.canary_axis_D.double()).numpy(),
                "sizes": self.drawn_NJ.sum(1).numpy(),
                "canary": self.drawn_NJ[:, 0].numpy() > 0,
                "shared": np.array(shared),
                "shared_first": np.array(0 if first else int((drawn_NJ & self.first_NJ).sum())),
            }
        )

    def draws(self) -> Draws:
        """Return all that was noted."""
        kept = {name: np.stack([step[name] for step in self.steps]) for name in self.steps[0]}
        return Draws(
            event=self.mechanism.event(0),
            expected_batch_size=self.mechanism.expected_batch_sizes[0],
            num_examples=self.total,
            inside_N=self.inside_N.numpy(),
            noise_SND=kept["noise"],
            heard_SN=kept["heard"],
            sizes_SN=kept["sizes"],
            canary_SN=kept["canary"],
            times_J=self.times_J.numpy(),
            shared_S=kept["shared"],
            shared_first_S=kept["shared_first"],
            shared_nodes=self.shared_nodes,
            most_repeats=self.most_repeats,
            sums_per_release=(self.fewest, self.most),
            sum_error=self.sum_error,
            other_canary=self.other,
        )

    def _examples(self, indices_NE: Tensor) -> Tensor:
        """Return the drawn examples (N, E, D) in clip norms; each is its own gradient."""
        # Every row of a person is longer than the clip norm: together they must not count more.
        norms = CANARY_NORMS * self.rows_per_unit
        canary_NE = norms * self.canary_N[:, None] * (indices_NE == 0)
        return canary_NE[..., None] * self.canary_axis_D + (
            self.length_J[indices_NE][..., None] * self.other_axis_D
        )
