"""Embeddings that are looked up once for all rows of a batch, such as those of positions.

`table(torch.arange(T))` has no example axis: its output is added to every row. While examples pass,
such an output is repeated for every row, so that each row has a loss gradient of its own there,
which is its share of the table's gradient. Whether the model then still computes the same, and
whether each copy reaches its own row alone, is tried on public rows: zeros, and random zeros and
ones, because a mask of zeros hides everything. Where not, or where no copy is seen to reach its own
row, the table has no closed form.

Random masks (Dropout) hide both. Compared passes draw the same ones; where outputs are random, the
model must compute the same in eval() mode, and copies must keep to their rows in both modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp.modes import evaluation_mode
from dpcsgp.privacy.clipping.recording import LayerCall, Shared, tensors_of
from dpcsgp.randomness import torch_seed

# (number of rows, lookups to be repeated, whether rows are zeros and ones instead of zeros) -> the
# outputs on so many public rows, and the calls
Forward = Callable[[int, Shared, bool], tuple[Any, list[LayerCall]]]

_SIZES: Final = (2, 3)  # an axis that follows both is the example axis
NOTHING: Final[Shared] = frozenset()


def shared_lookups(module: nn.Module, forward: Forward, views: int) -> Shared:
    """Return which calls of embeddings serve all rows at once and can be repeated for each.

    An example has `views` rows; `forward` runs the module, in the mode it is in. The caller's
    generators stay as they are, and so do the modes of all layers.
    """

    def seeded(rows: int, shared: Shared, mixed: bool) -> tuple[Any, list[LayerCall]]:
        with torch_seed(0, f"shared lookups {mixed}"):
            return forward(rows, shared, mixed)

    sizes = [size * views for size in _SIZES]
    shapes = [_shapes(seeded(rows, NOTHING, False)[1]) for rows in sizes]
    found = frozenset(
        key for key, shape in shapes[0].items() if len(shape) and shapes[1].get(key) == shape
    )
    if not found:
        return NOTHING
    random = _is_random(forward, sizes[0])
    if not all(_is_faithful(seeded, rows, found, alike=not random) for rows in sizes):
        return NOTHING
    if random:
        with evaluation_mode(module):
            if not all(_is_faithful(seeded, rows, found) for rows in sizes):
                return NOTHING
    return found


def _is_random(forward: Forward, rows: int) -> bool:
    """Tell whether outputs change when torch's generator starts elsewhere."""
    for mixed in (False, True):
        found: list[list[Tensor]] = []
        for purpose in ("one", "other"):
            with suppress(Exception), torch_seed(0, f"shared lookups {purpose}"):
                outputs, _ = forward(rows, NOTHING, mixed)
                found.append([part.detach().nan_to_num() for part in tensors_of(outputs)])
        if len(found) == 2 and not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
            return True
    return False


def _shapes(calls: list[LayerCall]) -> dict[tuple[nn.Module, int], torch.Size]:
    """Return the shapes of the words in every call of an embedding."""
    seen: Counter[nn.Module] = Counter()
    shapes: dict[tuple[nn.Module, int], torch.Size] = {}
    for call in calls:
        if type(call.layer) is nn.Embedding:
            shapes[call.layer, seen[call.layer]] = call.activations.shape
            seen[call.layer] += 1
    return shapes


def _is_faithful(forward: Forward, rows: int, shared: Shared, alike: bool = True) -> bool:
    """Tell whether repeating changes no output, and each copy reaches its own row alone.

    Without `alike` only the shapes of outputs have to stay.
    """
    reached: set[int] = set()
    number = 0
    for mixed in (False, True):
        try:
            expected = [part.detach() for part in tensors_of(forward(rows, NOTHING, mixed)[0])]
        except Exception:
            if mixed:
                continue  # the model has no room for ones
            raise
        try:
            outputs, calls = forward(rows, shared, mixed)
        except Exception:  # shapes no longer fit
            return False
        parts = list(tensors_of(outputs))
        if len(parts) != len(expected) or not all(
            one.shape == other.shape and (not alike or torch.allclose(one, other, equal_nan=True))
            for one, other in zip(parts, expected, strict=True)
        ):
            return False
        copies = [call for call in calls if any(call.layer is layer for layer, _ in shared)]
        number = len(copies)
        for row in range(rows):
            own = _reaches_own_row(parts, copies, rows, row)
            if own is None:
                return False
            reached |= own
    return len(reached) == number


def _reaches_own_row(
    parts: list[Tensor], calls: list[LayerCall], rows: int, row: int
) -> set[int] | None:
    """Return which calls are seen to reach their own row; None: some reach another one."""
    with torch.enable_grad():
        # uneven weights: a softmax, for one, adds up to a constant
        values = [
            (part[row] * torch.arange(1.0, part[row].numel() + 1).to(part).view_as(part[row])).sum()
            for part in parts
            if part.requires_grad and part.dim() and len(part) == rows
        ]
        if not values:
            return None
        total = torch.stack(values).sum()
    edges = [call.edge for call in calls]
    found = torch.autograd.grad(total, edges, allow_unused=True, retain_graph=True)
    others = [other for other in range(rows) if other != row]
    if any(part is not None and bool(part[others].any()) for part in found):
        return None
    # one that the outputs do not use at all has nothing to show
    return {index for index, part in enumerate(found) if part is None or bool(part[row].any())}
