"""From a private gradient to the direction of a local step: momentum, Adam, weight decay.

All of it is post-processing of releases, done by each node for itself: nothing further is revealed,
nothing is sent, and the noise stays as it was calibrated. The direction takes the gradient's place
in `descend`, so that error feedback and push-sum see a step like any other:
`x <- x - eta (direction + weight_decay z)`, with `z = x / y` the node's de-biased model. All nodes
have the same `z` once they agree, and then the average decays by exactly `eta * weight_decay`.

| symbol | meaning |
|---|---|
| `velocity_ND` | momentum: sum of past gradients, each step fading by `momentum` |
| `first_ND`, `second_ND` | Adam (Kingma and Ba, ICLR 2015): fading means of `g` and `g^2` |
| `count_N1` | how many gradients a node's moments have seen |

A node may have seen fewer gradients than there were steps: it joined later, or its gradients come
late. Its moments are corrected by its own count; the number of the step would take zeros for small
gradients, and make its steps too long.

Adam's direction has about the same length whatever the gradient's is. Two things follow. Public
weights of nodes are applied to the direction, because Adam would divide them away; and noise that
cancels between nodes would no longer cancel, so the two are refused together.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

Memory = dict[str, Tensor]  # what an optimizer keeps between steps, by names of checkpoints


class Optimizer(Protocol):
    """Pure functions from gradients and memory to directions."""

    @property
    def weight_decay(self) -> float:
        """Share of the model that a step of rate 1 takes away."""
        ...

    def init(self, start_ND: Tensor) -> Memory:
        """Return the memory at the start."""
        ...

    def direction(self, grad_ND: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """Return the direction of a step and the memory after it; the gradient is used up."""
        ...


@final
@dataclass(frozen=True)
class Momentum:
    """SGD: the gradient itself, or a fading sum of all gradients so far."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, start_ND: Tensor) -> Memory:
        """Start at rest."""
        return {"velocity_ND": torch.zeros_like(start_ND)} if self.momentum else {}

    def direction(self, grad_ND: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """Return `g + momentum * velocity`, which is the next velocity as well."""
        if not self.momentum:
            return grad_ND, {}
        grad_ND.add_(memory["velocity_ND"], alpha=self.momentum)
        return grad_ND, {"velocity_ND": grad_ND}


@final
@dataclass(frozen=True)
class Adam:
    """Adam on private gradients, each node with moments of its own.

    Attributes:
        betas: how much of the first and second moment is kept in a step.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        node_weights: public factors of the hosted nodes' directions; None: all count equally.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    node_weights: Sequence[float] | None = None

    def init(self, start_ND: Tensor) -> Memory:
        """Start with both moments at zero."""
        return {
            "first_ND": torch.zeros_like(start_ND),
            "second_ND": torch.zeros_like(start_ND),
            "count_N1": torch.zeros_like(start_ND[:, :1], dtype=torch.float64),
        }

    def direction(self, grad_ND: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """Return `m / (sqrt(v) + epsilon)` with both moments corrected for their start at zero."""
        keep, keep_squares = self.betas
        # Out of place: whatever interrupts a step leaves the memory before it.
        first_ND = torch.lerp(grad_ND, memory["first_ND"], keep)
        second_ND = torch.lerp(grad_ND.square(), memory["second_ND"], keep_squares)
        count_N1 = memory["count_N1"] + 1
        seen_N1, squares_seen_N1 = (
            (1 - beta**count_N1).to(grad_ND.dtype) for beta in (keep, keep_squares)
        )
        root_ND = second_ND.div(squares_seen_N1).sqrt_().add_(self.epsilon)
        direction_ND = first_ND.div(seen_N1).div_(root_ND)
        if self.node_weights is not None:
            weights_N = torch.tensor(self.node_weights, dtype=direction_ND.dtype)
            direction_ND.mul_(weights_N.to(direction_ND.device)[:, None])
        return direction_ND, {"first_ND": first_ND, "second_ND": second_ND, "count_N1": count_N1}


def memory_of_ready(before: Memory, after: Memory, ready: Sequence[bool] | None) -> Memory:
    """Return the memory for the next step: a node without a gradient keeps what it had.

    Args:
        before: as the step began.
        after: as it would be if all nodes had a gradient.
        ready: which of the hosted nodes have one; None: all.
    """
    if ready is None:
        return after
    ready_N1 = torch.tensor(ready)[:, None]
    return {name: torch.where(ready_N1, after[name], before[name]) for name in after}
