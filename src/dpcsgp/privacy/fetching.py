"""Fetch the drawn examples pass by pass, so that no more are held at a time than run together.

Rows that are read from a dataset get secret seeds, one per place. A random transform makes an
example's view. It must not depend on which other examples were drawn, and nobody may foretell it by
place: taking one example out moves others to other places. So every place of every step has a seed
from its node's private stream.

A unit of several rows (one person's, say) is drawn and clipped as one example. Of a unit with more
rows than the public cap so many are chosen at random at every draw, by words of the private stream
that belong to its place: a random view of the unit that depends on no other one. Every place has as
many words as the cap says, whoever takes it.

Legend: N hosted nodes that share passes, E places for examples, M rows of a unit at most.
Reference: R. Floyd's sampling without replacement (Bentley, CACM 30(9), 1987), for `chosen_places`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dpcsgp.privacy.clipping.contract import Fetched
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness


class HeldExamples(Protocol):
    """Examples in memory."""

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) by each node's own numbers.

        `rows` says which of the hosted nodes they are; None: all.
        """
        ...


@runtime_checkable
class ReadExamples(Protocol):
    """Examples that are read, and made random views of, when they are drawn."""

    def read_examples(
        self,
        indices_NE: Tensor,
        seeds_NE: Tensor,
        widths_N: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets, and which places (N, E) could be read.

        Of each node so many places are read as its width says.
        """
        ...


@runtime_checkable
class UnitExamples(Protocol):
    """Examples that are units of several rows."""

    @property
    def rows(self) -> HeldExamples:
        """Where the single rows are, by their numbers."""
        ...

    @property
    def max_rows_per_unit(self) -> int:
        """The public cap on the rows of a unit."""
        ...

    def unit_sizes(self, row: int, units_E: np.ndarray) -> np.ndarray:
        """Return how many rows each of these units of a hosted node has (E)."""
        ...

    def unit_rows(self, row: int, units_E: np.ndarray, places_EM: np.ndarray) -> np.ndarray:
        """Return the numbers (E, M) of the rows at these places of each of the units."""
        ...


class Augment(Protocol):
    """Random views of examples, drawn from a private stream."""

    def __call__(
        self,
        inputs: Tensor,
        random: PrivateRandomness,
        step: int,
        rows: Sequence[int] | None = None,
        first_place: int = 0,
    ) -> Tensor:
        """Turn inputs (N, E, ...) into views (N, E, M, ...), without the axis M if M = 1.

        `rows` says which of the hosted nodes they are (None: all), and `first_place` which place of
        the batch is the first one.
        """
        ...


@final
@dataclass(frozen=True)
class DrawnBatch:
    """The drawn batch of some hosted nodes that share passes; called with places, it fetches them.

    A row that cannot be read counts as a blank, and nobody is told. Rows are read for all places of
    a node's passes, taken or not: the time it takes follows public shapes, as the passes do.

    Attributes:
        source: where the examples are.
        rows: which of the hosted nodes these are.
        indices_NE: who is drawn, by each node's own numbers.
        present_NE: which places are taken, by an example that the node really holds.
        shape: the public shape of the nodes' passes.
        random: the secret streams of all hosted nodes.
        step: number of the gradient step.
        augment: random views of an example, if any.
    """

    source: HeldExamples
    rows: Sequence[int]
    indices_NE: Tensor
    present_NE: Tensor
    shape: PassShape
    random: PrivateRandomness
    step: int
    augment: Augment | None = None

    def __call__(self, places: slice) -> Fetched:
        """Return inputs (N, E, ...), targets (N, E, ...), and which of these places are taken."""
        if isinstance(self.source, UnitExamples):
            return self._units(self.source, places)
        indices_NE, present_NE = self.indices_NE[:, places], self.present_NE[:, places]
        inputs, targets, readable_NE = self._fetch(self.source, indices_NE, places, 1)
        if self.augment is not None:  # per example and before clipping
            inputs = self.augment(inputs, self.random, self.step, self.rows, places.start)
        return Fetched(inputs, targets, (present_NE & readable_NE).to(inputs.device))

    def _fetch(
        self, source: HeldExamples, indices_NE: Tensor, places: slice, rows_each: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows with these numbers, `rows_each` for every place, and which are there."""
        if not isinstance(source, ReadExamples):
            found = source.examples(indices_NE, self.rows)
            return *found, torch.ones_like(indices_NE, dtype=torch.bool)
        first, stop = places.start * rows_each, places.start * rows_each + indices_NE.shape[1]
        words = [
            self.random.row_bytes("views of rows", self.step, row, 8 * stop)[8 * first :]
            for row in self.rows
        ]
        seeds_NE = torch.from_numpy(np.stack(words).view(np.int64)) & (2**63 - 1)
        # A node that drew no more than is planned for has no further passes.
        widths_N = [
            indices_NE.shape[1] if places.start < self.shape.width(_places_taken(taken_E)) else 0
            for taken_E in self.present_NE
        ]
        return source.read_examples(indices_NE, seeds_NE, widths_N, self.rows)

    def _units(self, source: UnitExamples, places: slice) -> Fetched:
        """Return the rows of the units in these places: (N, E, M, ...)."""
        present_NE = self.present_NE[:, places]
        numbers_NEM, filled_NEM = self._chosen_rows(source, places)
        most = source.max_rows_per_unit
        *parts, readable = self._fetch(source.rows, numbers_NEM.flatten(1), places, most)
        inputs, targets = (part.unflatten(1, (-1, most)) for part in parts)
        filled_NEM &= readable.view_as(filled_NEM)
        present_NE = (present_NE & filled_NEM.any(dim=2)).to(inputs.device)
        filled_NEM = filled_NEM.to(inputs.device)
        if most == 1:
            return Fetched(inputs[:, :, 0], targets[:, :, 0], present_NE)
        inputs, targets = (_with_copies(part, filled_NEM) for part in (inputs, targets))
        return Fetched(inputs, targets, present_NE, filled_NEM)

    def _chosen_rows(self, source: UnitExamples, places: slice) -> tuple[Tensor, Tensor]:
        """Return row numbers (N, E, M) of the units in these places, and which of them count."""
        chosen = [self._chosen_of_node(source, node, places) for node in range(len(self.rows))]
        numbers_NEM, filled_NEM = (np.stack(parts) for parts in zip(*chosen, strict=True))
        return torch.from_numpy(numbers_NEM), torch.from_numpy(filled_NEM)

    def _chosen_of_node(
        self, source: UnitExamples, node: int, places: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same (E, M) for one node: shapes and words follow places and cap alone."""
        row, most = self.rows[node], source.max_rows_per_unit
        present_E = self.present_NE[node, places].numpy()
        units_E = np.where(present_E, self.indices_NE[node, places].numpy(), 0)
        sizes_E = np.where(present_E, source.unit_sizes(row, units_E), 0)
        first, stop = 8 * most * places.start, 8 * most * (places.start + len(units_E))
        words = self.random.row_bytes("rows of units", self.step, row, stop)[first:]
        places_EM = chosen_places(sizes_E, words.view(np.uint64).reshape(-1, most))
        filled_EM = np.arange(most) < sizes_E[:, None]
        numbers_EM = source.unit_rows(row, units_E, np.where(filled_EM, places_EM, 0))
        return np.where(filled_EM, numbers_EM, 0), filled_EM


def chosen_places(sizes_E: np.ndarray, words_EM: np.ndarray) -> np.ndarray:
    """Choose M of every unit's rows, uniformly without replacement; all where it has no more.

    Args:
        sizes_E: how many rows each unit has.
        words_EM: random words, 64 bits each; those of a unit decide about its rows alone.

    Returns:
        Places (E, M) among a unit's rows; those past its size mean nothing.
    """
    most = words_EM.shape[1]
    larger_E = sizes_E > most
    places_EM = np.tile(np.arange(most), (len(sizes_E), 1))
    for column in range(most):
        # Floyd: of 0, ..., top take one at random, or top itself if that one was taken before.
        top_E = np.where(larger_E, sizes_E - most + column, column)
        picked_E = (words_EM[:, column] % (top_E + 1).astype(np.uint64)).astype(np.int64)
        taken_E = (places_EM[:, :column] == picked_E[:, None]).any(axis=1)
        picked_E = np.where(taken_E, top_E, picked_E)
        places_EM[:, column] = np.where(larger_E, picked_E, column)
    return places_EM


def _with_copies(part: Tensor, filled_NEM: Tensor) -> Tensor:
    """Put copies of a unit's first row where it has none.

    Their loss counts for nothing, and whatever fails in them fails in that row as well.
    """
    extra = [1] * (part.dim() - 3)
    first_NE1 = filled_NEM.to(torch.uint8).argmax(dim=2, keepdim=True)
    index = first_NE1.view(*first_NE1.shape, *extra).expand(-1, -1, 1, *part.shape[3:])
    filled = filled_NEM.view(*filled_NEM.shape, *extra)
    return torch.where(filled, part, part.gather(2, index))


def _places_taken(present_E: Tensor) -> int:
    """Return the number of places up to the last that is taken."""
    taken = present_E.nonzero()
    return int(taken[-1]) + 1 if len(taken) else 0
