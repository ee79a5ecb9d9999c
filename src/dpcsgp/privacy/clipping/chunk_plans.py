"""Which parameters have ghost norms for inputs of one shape, and how many rows a chunk has.

All follows from the model's shapes and the places of a pass alone, which are public.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dpcsgp.privacy.clipping.ghost_norms import may_sum_positions
from dpcsgp.privacy.clipping.layer_rules import positions
from dpcsgp.privacy.clipping.recording import LayerCall, Owned, Shared
from dpcsgp.randomness import torch_seed

# of a chunk, or half as many again where that saves one: more gain little speed and cost memory
MOST_ROWS: Final = 64
_QUANTUM: Final = 8  # rows of a chunk are a multiple of it
# with fewer rows rounding allows ghost sums, which clip a little harder than formed gradients
_FEWEST_ROWS: Final = 32
_KEPT_FLOATS: Final = 2**25  # per-example gradients that may be held at a time


class ChunkPlan(NamedTuple):
    """Which parameters have ghost norms for inputs of one shape, and the rows of a chunk.

    `shared` are the lookups that serve all rows at once.
    """

    ghost: frozenset[str]
    explicit: tuple[str, ...]
    rows: int
    shared: Shared
    usual_rows: int  # of a chunk, if memory did not ask for fewer

    def rows_for(self, places: int) -> int:
        """Return the rows of a chunk for a pass of so many places: few blanks, few chunks."""
        if self.rows == MOST_ROWS:
            count = max(1, (places + self.rows // 2 - 1) // self.rows)  # rounded to nearest
            return max(_FEWEST_ROWS, math.ceil(places / count / _QUANTUM) * _QUANTUM)
        return min(self.rows, places)


def rows_that_fit(
    calls: Sequence[LayerCall],
    owned: Owned,
    views: int,
    most_rows: int,
) -> int:
    """Return the most rows of a chunk whose per-example gradients, if formed, fit in memory.

    Args:
        calls: those of a forward pass.
        owned: names of the parameters of each layer, by attribute.
        views: rows of an example.
        most_rows: no more than so many.
    """
    lengths: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for call in calls:
        for attribute, name in call.parameters(owned).items():
            lengths[name] += views * positions(call.layer, call.output_shape)
            sizes[name] = getattr(call.layer, attribute).numel()
    rows = most_rows
    while rows > 1:
        # Fewer rows also allow ghost sums over more positions, so that less must be formed.
        formed = sum(sizes[name] for name in sizes if not may_sum_positions(rows, lengths[name]))
        if rows * formed <= _KEPT_FLOATS:
            return rows
        rows //= 2
    return rows


def bytes_kept(run: Callable[[Tensor], list[LayerCall]], rows: Tensor) -> int:
    """Return the bytes that a forward pass over these rows leaves for the backward pass."""
    kept: dict[int, int] = {}

    def note(part: Tensor) -> Tensor:
        storage = part.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return part

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda part: part)
    with hooks, torch_seed(0, "bytes of a row"):
        calls = run(rows)
    for call in calls:
        note(call.activations)
    # the loss gradients at the outputs; two maps whose outputs are added share one
    alone = [call for call in calls if call.projection is None or not call.projection.is_sum]
    places = sum(call.output_shape.numel() for call in alone)
    return sum(kept.values()) + rows.element_size() * places + rows.nbytes
