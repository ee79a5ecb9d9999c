"""Fetch the drawn examples; rows that are read from a dataset get secret seeds, one per place.

A random transform makes an example's view. It must not depend on which other examples were drawn,
and nobody may foretell it by place: taking one example out moves others to other places. So every
place of every step has a seed from its node's private stream.

Legend: N hosted nodes, E places for examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness


class HeldExamples(Protocol):
    """Examples in memory."""

    def examples(self, indices_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...) by each node's own numbers."""
        ...


@runtime_checkable
class ReadExamples(Protocol):
    """Examples that are read, and made random views of, when they are drawn."""

    def read_examples(
        self, indices_NE: Tensor, seeds_NE: Tensor, widths_N: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets, and which places (N, E) could be read.

        Of each node so many places are read as its width says.
        """
        ...


def fetch_examples(
    source: HeldExamples,
    indices_NE: Tensor,
    present_NE: Tensor,
    shapes_N: Sequence[PassShape],
    random: PrivateRandomness,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (N, E, ...), targets (N, E, ...), and which places hold an example.

    A row that cannot be read counts as a blank, and nobody is told. Rows are read for all places of
    a node's passes, taken or not: the time it takes follows public shapes, as the passes do.
    """
    if not isinstance(source, ReadExamples):
        return *source.examples(indices_NE), present_NE
    num_nodes, num_places = indices_NE.shape
    words = [
        random.row_bytes("views of rows", step, row, 8 * num_places) for row in range(num_nodes)
    ]
    seeds_NE = torch.from_numpy(np.stack(words).view(np.int64)) & (2**63 - 1)
    widths_N = [
        min(shape.width(_places_taken(present_E)), num_places)
        for shape, present_E in zip(shapes_N, present_NE, strict=True)
    ]
    inputs, targets, readable_NE = source.read_examples(indices_NE, seeds_NE, widths_N)
    return inputs, targets, present_NE & readable_NE


def _places_taken(present_E: Tensor) -> int:
    """Return the number of places up to the last that is taken."""
    taken = present_E.nonzero()
    return int(taken[-1]) + 1 if len(taken) else 0
