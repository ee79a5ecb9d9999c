"""What an algorithm is, and the network it needs.

An algorithm is a frozen record of settings with pure functions on a state (a NamedTuple of tensors
and counters). It sees private gradients only, never data, files or ranks. One iteration is
`descend` (a local step along a gradient) and then `gossip` (one exchange); `step` does both.
`methods` is the table of all algorithms.

Legend: N hosted nodes, S senders heard, D coordinates, B bytes, K push-sum weights per node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dpcsgp.compression import frames
from dpcsgp.randomness import PublicRandomness

Schedule = float | Callable[[int], float]
StateT = TypeVar("StateT", bound=Any)


class Network(Protocol):
    """The one effect of an algorithm: frames leave, frames arrive."""

    key: bytes | None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Hosted nodes."""
        ...

    @property
    def senders(self) -> tuple[int, ...]:
        """Nodes that are heard here, the hosted ones included, ascending."""
        ...

    @property
    def own_rows(self) -> Sequence[int]:
        """Rows of the hosted nodes among the senders."""
        ...

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send the hosted nodes' frames along their edges; return the senders' frames (S, B)."""
        ...

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Add `sum_j weights[i, j] values_j` to `onto_ND` (float64 zeros if not given)."""
        ...


class Algorithm(Protocol[StateT]):
    """Settings with pure functions; the state is whatever `init` returns.

    The state is a NamedTuple with, at least, the counters `step` (of gradients) and `round` (of
    exchanges).
    """

    model_fields: ClassVar[tuple[str, ...]]
    """Tensors of the state with one row per node that `model` and `average` follow from."""

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> StateT:
        """Return the state at the start: every node at `x_ND`.

        The state counts from the public `anchor_D` (None = zero).
        """
        ...

    def model(self, state: StateT) -> Tensor:
        """Return the model of every hosted node (N, D).

        It is what is trained, evaluated and published.
        """
        ...

    def average(self, state: StateT) -> Tensor:
        """Return the average model (D,) of the nodes in this state."""
        ...

    def descend(self, state: StateT, grad_ND: Tensor) -> StateT:
        """Take a local step along private gradients."""
        ...

    def gossip(self, state: StateT, network: Network, random: PublicRandomness) -> StateT:
        """Exchange one round of messages and move towards agreement."""
        ...

    def residual_ratio(self, state: StateT) -> float | None:
        """Return how far what others believe lags behind, as a share.

        None without error feedback.
        """
        ...

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Return the bytes that `rounds` exchanges put on one edge, headers included."""
        ...

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Return the same by the formulas of the literature, in bits.

        Headers and weights are not counted.
        """
        ...


class GossipSGD(ABC, Generic[StateT]):
    """SGD on each node, `x <- x - eta g`, with an exchange after it: the step of every method here.

    Whoever inherits is a frozen dataclass with a `learning_rate`; its state has `x_ND` and `step`.
    """

    learning_rate: Schedule

    def descend(self, state: StateT, grad_ND: Tensor) -> StateT:
        """Return the state after `x - eta g`; the noise is already in the gradient."""
        # Out of place: a state that was handed out never changes.
        rate = rate_at(self.learning_rate, state.step)
        return state._replace(x_ND=torch.sub(state.x_ND, grad_ND, alpha=rate), step=state.step + 1)

    @abstractmethod
    def gossip(self, state: StateT, network: Network, random: PublicRandomness) -> StateT:
        """Return the state after one exchange."""

    def step(
        self, state: StateT, grad_ND: Tensor, network: Network, random: PublicRandomness
    ) -> StateT:
        """Return the state after one iteration: a private descent, then one exchange."""
        return self.gossip(self.descend(state, grad_ND), network, random)


def rate_at(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step."""
    return schedule(step) if callable(schedule) else schedule


def displacement(x_ND: Tensor, anchor_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `x - anchor` and the anchor (zero if None)."""
    anchor_D = torch.zeros_like(x_ND[0]) if anchor_D is None else anchor_D
    return x_ND - anchor_D, anchor_D


def exchange_frames(
    network: Network, round_: int, weights_NK: Tensor, payload_NB: Tensor
) -> tuple[Tensor, Tensor]:
    """Frame, exchange and check; return the senders' push-sum weights (S, K), payloads (S, B)."""
    # Header, push-sum weights, payload and tag of every hosted node in one row of bytes.
    sent = frames.join(network.nodes, round_, weights_NK, payload_NB, key=network.key)
    received = network.exchange(sent)
    # A frame of another sender, round or length, or with a wrong tag, is refused here.
    return frames.split(
        received,
        network.senders,
        round_,
        payload_NB.shape[1],
        num_weights=weights_NK.shape[1],
        key=network.key,
    )
