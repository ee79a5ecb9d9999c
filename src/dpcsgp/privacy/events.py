"""What one release of a noisy gradient is, what it promises to whom, and who writes it down.

Reference: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy" (2014), for the
neighbouring relations.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

from dpcsgp.errors import ConfigError

Sampling = Literal["poisson", "uniform"]


class NeighbouringRelation(enum.StrEnum):
    """How two data sets differ that a release must not tell apart; the value is the text to print.

    The two relations are not comparable number by number: replacing one example is removing one
    and adding another.
    """

    ADD_OR_REMOVE_ONE = "add or remove one example, declared number unchanged"
    REPLACE_ONE = "replace one example"


Unit = Literal["example", "person"]
UNITS: Final = ("example", "person")
_WITH_ALL: Final = {"example": "", "person": " with all rows"}


_RELATIONS: Final[dict[str, NeighbouringRelation]] = {
    "poisson": NeighbouringRelation.ADD_OR_REMOVE_ONE,
    "uniform": NeighbouringRelation.REPLACE_ONE,
}


def neighbouring_relation(sampling: str) -> NeighbouringRelation:
    """Return the neighbouring relation under which releases with this sampling are accounted for.

    Args:
        sampling: "poisson" or "uniform".

    Raises:
        ConfigError: for any other sampling.

    >>> print(neighbouring_relation("poisson"))
    add or remove one example, declared number unchanged
    """
    if sampling not in _RELATIONS:
        raise ConfigError(f"privacy.sampling = {sampling!r}: expected 'poisson' or 'uniform'")
    return _RELATIONS[sampling]


def relation_of_unit(relation: NeighbouringRelation, unit: str) -> str:
    """Return a relation in words, for the unit of privacy: an example, or a person.

    >>> relation_of_unit(NeighbouringRelation.REPLACE_ONE, "person")
    'replace one person with all rows'
    """
    return str(relation).replace("one example", f"one {unit}{_WITH_ALL[unit]}")


def check_epsilon(epsilon: float) -> None:
    """Refuse a budget that is not a positive finite number."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(
            f"privacy.epsilon = {epsilon}: expected a finite number above 0, such as 0.5 "
            "(for a run without privacy, set privacy.noise = 'none')"
        )


def check_delta(delta: float) -> None:
    """Refuse a delta outside the open interval (0, 1)."""
    if not 0 < delta < 1:
        raise ConfigError(
            f"privacy.delta = {delta}: expected 0 < delta < 1, well below 1 / (examples of a "
            "node), such as 1e-4 for 6000"
        )


def check_steps(steps: int) -> None:
    """Refuse a number of releases that is not a whole number from 0 to 10^9."""
    # True is an int in Python, and 3.0 counts as a whole number.
    if isinstance(steps, bool) or not 0 <= steps <= 10**9 or steps != int(steps):
        raise ConfigError(f"algorithm.steps = {steps}: expected a whole number from 0 to 10^9")


@dataclass(frozen=True)
class ReleaseEvent:
    """One noisy sum of clipped per-example gradients, handed to anyone who listens.

    The released value is `(sum of clipped gradients of the drawn examples + Normal(0,
    (noise_multiplier * clip_norm)^2)) / divisor`, one draw of noise per coordinate, and whatever is
    computed from it. All of the following is assumed:

    * `sampling = "poisson"`: every example of the node is drawn independently with probability
      `sampling_rate` (expected batch size / declared number of examples), afresh at each release.
      Neighbouring data sets differ by **adding or removing one example while the declared number
      stays**: one of them has a blank, an example without gradient, in its place. The sum then
      moves by at most `clip_norm`.
    * `sampling = "uniform"`: exactly `sampling_rate * examples` examples are drawn without
      replacement, afresh at each release. Neighbouring data sets have equal size and differ by
      **replacing one example**; the sum then moves by at most `2 * clip_norm`, so the release is
      accounted for with half the noise multiplier.
    * The two relations are not comparable number by number: replacing one example is removing one
      and adding another.
    * Clipping: the gradient of each drawn example has Euclidean norm at most `clip_norm`; a
      non-finite one counts as zero, and so does an example on which model or loss raise an error.
    * The divisor (the expected batch size), the number of examples of the node, the clip norm, the
      sampling rate and `noise_multiplier` are **public constants**; the drawn batch size and the
      drawn indices are never revealed.

    * With `max_colluders` a number, part of the noise is shared with other nodes and cancels in
      the average. The release then hides as well as independent noise of `noise_multiplier` would,
      towards everybody who sees all messages and knows what any `max_colluders` other nodes know
      (`privacy.cancelling`), as long as all others keep their secrets, and for observers who cannot
      tell AES-CTR and X25519 with HKDF from chance. `by_colluders[-1]` is the own noise alone: it
      holds whatever all others do.

    Args:
        sampling: how batches are drawn, "poisson" or "uniform".
        sampling_rate: expected batch size / declared number of examples of the node, in (0, 1].
        noise_multiplier: standard deviation of the noise on the *sum*, in clip norms. Zero
            promises nothing: its eps is infinite.
        max_colluders: how many other nodes may tell all they know; None: all of them, because
            all noise is the node's own.
        by_colluders: noise multiplier against 0, 1, ... colluders, the last one against all
            others; empty with independent noise.

    Raises:
        ConfigError: for another sampling, or a number outside of its range.
    """

    sampling: Sampling
    sampling_rate: float
    noise_multiplier: float
    max_colluders: int | None = None
    by_colluders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # A ledger or a caller may have given anything: a wrong event would give a wrong eps.
        neighbouring_relation(self.sampling)
        rate, noise = float(self.sampling_rate), float(self.noise_multiplier)
        if not 0 < rate <= 1:
            raise ConfigError(
                f"sampling_rate = {rate} (privacy.expected_batch_size / examples of the node): "
                "expected 0 < rate <= 1; "
                "draw at least one and at most as many examples as the node holds"
            )
        if not (math.isfinite(noise) and noise >= 0):
            raise ConfigError(f"noise_multiplier = {noise}: expected a finite number of at least 0")
        self._check_colluders(noise)
        # plain floats compare, hash and print alike everywhere
        object.__setattr__(self, "sampling_rate", rate)
        object.__setattr__(self, "noise_multiplier", noise)
        object.__setattr__(self, "by_colluders", tuple(map(float, self.by_colluders)))

    def _check_colluders(self, noise: float) -> None:
        """Refuse multipliers that do not belong together, or that grow with more colluders."""
        if self.max_colluders is None:
            if self.by_colluders:
                raise ConfigError("by_colluders: given without max_colluders")
            return
        rows = self.by_colluders
        falling = all(0 <= more <= less < math.inf for less, more in itertools.pairwise(rows))
        if not (self.max_colluders >= 0 and rows and 0 <= rows[0] < math.inf and falling):
            raise ConfigError(
                f"max_colluders = {self.max_colluders}, by_colluders = {rows}: expected noise "
                "multipliers that do not grow with the number of colluders"
            )
        if noise != rows[min(self.max_colluders, len(rows) - 1)]:
            raise ConfigError(
                f"noise_multiplier = {noise}: by_colluders has another one for "
                f"{self.max_colluders} colluders"
            )

    def as_json(self) -> list[Any]:
        """Return all fields as plain values."""
        rows = list(self.by_colluders)
        return [self.sampling, self.sampling_rate, self.noise_multiplier, self.max_colluders, rows]

    @classmethod
    def from_json(cls, value: Any) -> ReleaseEvent:
        """Read what `as_json` returned; ValueError or TypeError for anything else."""
        sampling, rate, noise, colluders, rows = value
        if not (colluders is None or type(colluders) is int):
            raise TypeError(f"max_colluders = {colluders!r}")
        return cls(sampling, rate, noise, colluders, tuple(rows))

    def against(self, colluders: int | Literal["all"]) -> ReleaseEvent:
        """Return this release as independent noise that hides as well from so many colluders.

        >>> event = ReleaseEvent("poisson", 0.5, 2.0, max_colluders=1, by_colluders=(3, 2, 1))
        >>> event.against(0).noise_multiplier, event.against("all").noise_multiplier
        (3.0, 1.0)
        """
        if not self.by_colluders:
            return self
        last = len(self.by_colluders) - 1
        index = last if colluders == "all" else min(colluders, last)
        return ReleaseEvent(self.sampling, self.sampling_rate, self.by_colluders[index])

    @property
    def stated(self) -> ReleaseEvent:
        """This release as independent noise that hides as well as is promised."""
        return self if self.max_colluders is None else self.against(self.max_colluders)

    @classmethod
    def of(cls, sampling: str, sampling_rate: float, noise_multiplier: float) -> ReleaseEvent:
        """Build an event from a sampling name that was not checked yet."""
        neighbouring_relation(sampling)
        return cls(cast(Sampling, sampling), sampling_rate, noise_multiplier)

    @property
    def relation(self) -> NeighbouringRelation:
        """The neighbouring relation of this event."""
        return neighbouring_relation(self.sampling)


class ReleaseLog(Protocol):
    """Where a run writes down its releases: ledgers on disk, or a count in memory for audits."""

    def record(self, step: int, attempt: int, events_by_node: Mapping[int, ReleaseEvent]) -> None:
        """Add one release for each of these nodes, for good: messages may leave after this."""
        ...

    def releases(self, node: int) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release of a node with its count."""
        ...

    def has(self, node: int, step: int, attempt: int) -> bool:
        """Say whether a node's release of this step by this start is recorded."""
        ...

    def heads(self) -> dict[str, list[Any]]:
        """Return node -> [checksum of the last line, count], for the checkpoint."""
        ...

    def check_against(self, heads: Mapping[str, Any]) -> None:
        """Refuse a log that does not continue the one a checkpoint saw."""
        ...

    def close(self) -> None:
        """Let other processes have it."""
        ...
