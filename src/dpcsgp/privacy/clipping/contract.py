"""What a clipping engine is given and what it must do: one pass over examples in public places.

An example may be a unit of several rows, such as one person's: their losses are added up before
clipping, so the unit is clipped and counted as one.

Legend: N hosted nodes, P places of a node in a pass, E rows of a chunk, M augmented views of an
example or rows of a unit, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.privacy.passes import PassShape

Loss = Callable[[Any, Tensor], Tensor]  # (outputs, targets) -> one value per example
Observer = Callable[[str, Tensor], None]  # (name, rows): sees what every row contributes

NORM: Final = "the gradient's norm"  # what is shown last of every chunk, as squares


@final
@dataclass(frozen=True)
class Pass:
    """Examples in places: each node's parameters, its places, and which are taken.

    An engine is given the P places that run together.

    `inputs` are (N, P, *input shape), or (N, P, M, *input shape) with M > 1 views; `targets` are
    (N, P, ...). `clip_norm` is the largest norm that an example's gradient keeps.

    For units of up to M > 1 rows both have the axis M, and `filled_NPM` says which rows there are.
    The loss of the others counts for nothing; they must hold copies of rows of the same unit, so
    that nothing in them can fail that does not fail anyway.
    """

    parameters_ND: Tensor
    inputs: Tensor
    targets: Tensor
    present_NP: Tensor
    clip_norm: float
    shape: PassShape
    filled_NPM: Tensor | None = None

    def of_nodes(self, nodes: slice) -> Pass:
        """Return the pass of some nodes, in the same memory."""
        return replace(
            self,
            parameters_ND=self.parameters_ND[nodes],
            inputs=self.inputs[nodes],
            targets=self.targets[nodes],
            present_NP=self.present_NP[nodes],
            filled_NPM=None if self.filled_NPM is None else self.filled_NPM[nodes],
        )

    def padded(self) -> Pass:
        """Return the pass with all its places; blank ones follow where the examples end."""
        places = self.shape.places
        return replace(
            self,
            inputs=_padded(self.inputs, places),
            targets=_padded(self.targets, places),
            present_NP=_padded(self.present_NP, places),
            filled_NPM=None if self.filled_NPM is None else _padded(self.filled_NPM, places),
        )

    def of_blanks(self) -> Pass:
        """Return a pass of the same shape without any example."""
        return replace(
            self,
            inputs=torch.zeros_like(self.inputs),
            targets=torch.zeros_like(self.targets),
            present_NP=torch.zeros_like(self.present_NP),
        )

    def with_only(self, places: range) -> Pass:
        """Return a copy in which only these places (of all nodes together) may be taken."""
        present_NP, run = torch.zeros_like(self.present_NP), slice(places.start, places.stop)
        present_NP.view(-1)[run] = self.present_NP.reshape(-1)[run]
        inputs, targets = self.inputs.clone(), self.targets.clone()
        return replace(self, inputs=inputs, targets=targets, present_NP=present_NP)

    def blank_(self) -> None:
        """Set absent rows to zero, in place: what they hold belongs to nobody in this pass."""
        absent = None
        for part in (self.inputs, self.targets):
            if part.device.type == "cpu":
                if absent is None:
                    absent = (~self.present_NP).flatten().nonzero().flatten()
                part.flatten(0, 1).index_fill_(0, absent, 0)  # touches only these rows
            else:
                # an index would be as long as there are blanks, and the host would wait for it
                mask = ~self.present_NP.view(*self.present_NP.shape, *[1] * (part.dim() - 2))
                part.masked_fill_(mask, 0)


def _padded(part: Tensor, places: int) -> Tensor:
    if part.shape[1] == places:
        return part.contiguous()
    blank = part.new_zeros(len(part), places - part.shape[1], *part.shape[2:])
    return torch.cat([part, blank], dim=1)


class Fetched(NamedTuple):
    """The examples in some places of a batch; `filled_NEM` for units of several rows."""

    inputs: Tensor
    targets: Tensor
    present_NE: Tensor
    filled_NEM: Tensor | None = None


Fetch = Callable[[slice], Fetched]  # which places -> what lies there


class Chunk(NamedTuple):
    """Some places of one node, for engines that run few rows at a time; blanks are not present."""

    inputs: Tensor
    targets: Tensor
    present_E: Tensor
    filled_EM: Tensor | None = None  # which rows of a unit there are

    @classmethod
    def of(cls, batch: Pass, node: int, rows: slice, length: int) -> Chunk:
        """Cut some rows out of a node's places, and add blank ones up to the length."""
        parts = [batch.inputs[node], batch.targets[node], batch.present_NP[node]]
        if batch.filled_NPM is not None:
            parts.append(batch.filled_NPM[node])
        return cls(*(_own_rows(part[rows], length) for part in parts))


def _own_rows(part: Tensor, length: int) -> Tensor:
    """Return so many rows in memory of their own: kernels round by how operands are aligned."""
    if len(part) == length:
        return part.clone()
    return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])


class PassEngine(Protocol):
    """Sums the clipped gradients of one pass."""

    def prepare(self, parameters_ND: Tensor, inputs: Tensor) -> None:
        """Find out, on public zeros of the inputs' shape, how to treat the model; warn if slow."""
        ...

    def pass_sum(self, batch: Pass, observe: Observer | None = None) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples: (N, D).

        With `observe`, nothing is summed: it is shown what each row contributes (for checks).
        """
        ...

    def slower(self) -> PassEngine | None:
        """Return an engine that passes fewer rows at a time; None where there are no fewer."""
        ...

    def deterministic(self, public: Tensor) -> PassEngine:
        """Return an engine for the model without random layers, if it has any."""
        ...

    def with_most_rows(self, most_rows: int) -> PassEngine:
        """Return an engine that runs at most so many rows at a time, where it cuts passes up."""
        ...

    def row_bytes(self, parameters_1D: Tensor, public: Tensor) -> int:
        """Return roughly the bytes that one more row keeps from forward to backward pass."""
        ...

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill."""
        ...


def check_losses(losses: Tensor, num_examples: int) -> None:
    """Refuse a loss that does not give one value per example."""
    if losses.shape != (num_examples,):
        raise ModelError(
            f"loss: expected one value per example, shape ({num_examples},), got "
            f"{tuple(losses.shape)}; use reduction='none' and take the mean over all other axes"
        )
