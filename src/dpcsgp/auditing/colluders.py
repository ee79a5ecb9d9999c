"""What observers with colluders make of noise that pairs share: all messages, less what they know.

A trial is a group of nodes: the victim first, one honest partner at least, and at the end the
colluders, who tell the streams that they share with the others. An observer subtracts those and is
left with the honest nodes H, whose noise has the covariance S (`privacy.cancelling`). The best
unbiased estimate of the victim's sum is then the combination with the weights

    w = S^-1 e_0 / (S^-1)_00,     of variance 1 / (S^-1)_00:

a release of one node with independent noise, which all tests of an audit take as it is.

Legend: T trials, G nodes of a trial, N = T G nodes, H honest ones, S steps, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.privacy import GaussianMechanism, ReleaseEvent
from dpcsgp.privacy.mechanism import ClippedSum
from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.privacy.shared_noise import SharedNoise
from dpcsgp.randomness import PrivateRandomness

PAIR_FAULTS: Final[dict[str, str]] = {
    "pair-stream-twice": "pairs use the stream of step 2 k again at 2 k + 1",
    "pair-sign": "both nodes of a pair add what one should subtract",
    "one-more-colluder": "one node more than stated tells all it knows",
    "pair-within": "a node takes back at 2 k + 1 what it added for a pair at 2 k",
}


def group_size(law: SharedNoise | None) -> int:
    """Return the nodes of a trial: with shared noise the victim, a partner and the colluders."""
    return 2 if law is None else law.max_colluders + 2


@final
class TrialPairs:
    """Shared noise of many trials side by side, each among its own nodes only.

    Args:
        law: own and shared noise of the nodes of one trial.
        random: secret streams of all nodes, trial after trial.
        fault: one of `PAIR_FAULTS`, planted on purpose.
    """

    def __init__(
        self, law: SharedNoise, random: PrivateRandomness, fault: str | None = None
    ) -> None:
        self.law, self.fault = law, fault
        self.size, self.trials = len(law.own), len(random.nodes) // len(law.own)
        self.nodes = tuple(row % self.size for row in range(len(random.nodes)))
        self._parts = [
            PairNoise(law, range(self.size), _rows(random, trial, self.size), f"trial {trial}", [])
            for trial in range(self.trials)
        ]
        for part in self._parts:
            part.meet(lambda name, value: [value])
        self._last: list[list[tuple[int, int, np.ndarray]]] = []
        self.known_steps: list[np.ndarray] = []  # per step (T, G, D): what colluders can subtract

    def join(
        self,
        first_step: int,
        steps: int,
        spent_by_node: Mapping[int, Any],
        gather: Any,
        paid_steps: Sequence[int] = (),
    ) -> list[int]:
        """All nodes of all trials release in every step."""
        for part in self._parts:
            part.begin(first_step, [steps] * self.size)
        return [steps] * len(self.nodes)

    def active(self, step: int) -> tuple[bool, ...]:
        """All nodes of a trial release."""
        return (True,) * self.size

    def event(self, row: int, step: int) -> ReleaseEvent:
        """Return what a release of this node costs."""
        return self.law.event(self.nodes[row])

    def counts(self, step: int, dim: int) -> np.ndarray:
        """Return int32 (N, D), and keep what the colluders know of it."""
        counts_TGD = np.zeros((self.trials, self.size, dim), dtype=np.int32)
        known_TGD = np.zeros((self.trials, self.size, dim))
        first_colluder = self.size - self._colluders
        for trial, draws in enumerate(self._draws(step, dim)):
            for low, high, drawn_D in draws:
                for node, sign in ((low, 1), (high, 1 if self.fault == "pair-sign" else -1)):
                    counts_TGD[trial, node] += sign * drawn_D
                    if high >= first_colluder:  # one end tells what it is
                        known_TGD[trial, node] += sign * drawn_D
        self.known_steps.append(known_TGD * self.law.lattice(dim))
        return counts_TGD.reshape(-1, dim)

    @property
    def _colluders(self) -> int:
        return self.law.max_colluders + (self.fault == "one-more-colluder")

    def _draws(self, step: int, dim: int) -> list[list[tuple[int, int, np.ndarray]]]:
        """Return each trial's pairs with what they draw, faults included."""
        fresh = [list(part.draws(step, dim)) for part in self._parts]
        again = {"pair-stream-twice": 1, "pair-within": -1}.get(self.fault or "")
        if again and step % 2 and self._last:
            return [[(a, b, again * d) for a, b, d in draws] for draws in self._last]
        self._last = fresh
        return fresh

    def combine(self, values_TGX: np.ndarray) -> np.ndarray:
        """Return (T, X): the honest nodes' values in the best combination for the victim."""
        return np.einsum("tgx,g->tx", values_TGX, self.weights_G)

    @property
    def weights_G(self) -> np.ndarray:
        """The weights w above; zero for colluders."""
        honest = self.size - self._colluders
        squares_HH = np.diag(np.square(self.law.own[:honest]))
        laplacian_HH = honest * np.eye(honest) - 1
        inverse_HH = np.linalg.inv(squares_HH + self.law.shared**2 * laplacian_HH)
        return np.append(inverse_HH[0] / inverse_HH[0, 0], np.zeros(self._colluders))


def _rows(random: PrivateRandomness, trial: int, size: int) -> PrivateRandomness:
    """Return the streams of one trial's nodes, under their numbers within the trial."""
    return random.rows(range(trial * size, (trial + 1) * size), range(size))


def trial_mechanism(
    victim: GaussianMechanism, random: PrivateRandomness, fault: str | None = None
) -> GaussianMechanism:
    """Return the mechanism of all nodes of many trials; every node of a trial is like the victim.

    Args:
        victim: one node, with the law of a trial in `shared`.
        random: secret streams of all nodes, trial after trial.
        fault: one of `PAIR_FAULTS`, planted on purpose.
    """
    assert victim.shared is not None
    num_nodes = len(random.nodes)
    pairs = TrialPairs(victim.shared, random, fault)
    return replace(
        victim,
        noise_multipliers=victim.noise_multipliers[:1] * num_nodes,
        expected_batch_sizes=victim.expected_batch_sizes[:1] * num_nodes,
        num_examples=victim.num_examples[:1] * num_nodes,
        pairs=cast(PairNoise, pairs),
    )


@final
@dataclass(frozen=True)
class SeenByColluders:
    """The victims' releases as observers see them: one node per trial, independent noise."""

    mechanism: GaussianMechanism  # of all nodes of all trials

    def __getattr__(self, name: str) -> Any:
        # batch sizes and the like, of the victims alone
        value = getattr(self.mechanism, name)
        return value[:: self.pairs.size] if isinstance(value, tuple) else value

    @property
    def pairs(self) -> TrialPairs:
        """The shared noise of the trials."""
        return cast(TrialPairs, self.mechanism.pairs)

    def release(
        self, clipped_sum: ClippedSum, step: int, random: PrivateRandomness, active: Sequence[bool]
    ) -> Tensor:
        """Return the observers' best estimates (T, D) of the victims' releases."""
        pairs, size = self.pairs, self.pairs.size
        if step == 0:
            pairs.join(0, 2**40, {}, None)
        grad_ND = self.mechanism.release(
            only_victims(clipped_sum, size), step, random, [True] * (len(active) * size)
        )
        known_TGD = pairs.known_steps.pop()
        grad_TGD = grad_ND.double().numpy().reshape(known_TGD.shape)
        return torch.from_numpy(pairs.combine(grad_TGD - known_TGD))


def only_victims(clipped_sum: ClippedSum, size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a sum over all nodes of which only the victims, every `size`-th, hold anything."""

    def summed(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
        sum_TD = clipped_sum(indices_NE[::size], present_NE[::size])
        sum_ND = torch.zeros(len(indices_NE), sum_TD.shape[1], dtype=sum_TD.dtype)
        sum_ND[::size] = sum_TD
        return sum_ND

    return summed
