"""Embeddings that are looked up once for all rows of a batch, such as those of positions.

`table(torch.arange(T))` has no example axis: its output is added to every row. While examples pass,
such an output is repeated for every row, so that each row has a loss gradient of its own there,
which is its share of the table's gradient. Whether the model then still computes the same, and
whether each copy reaches its own row alone, is tried on public zeros; where not, the table has no
closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp.privacy.clipping.recording import LayerCall, Shared, tensors_of

# (number of rows, lookups to be repeated) -> the outputs on so many public rows, and the calls
Forward = Callable[[int, Shared], tuple[Any, list[LayerCall]]]

_SIZES: Final = (2, 3)  # an axis that follows both is the example axis
NOTHING: Final[Shared] = frozenset()


def shared_lookups(forward: Forward, views: int) -> Shared:
    """Return which calls of embeddings serve all rows at once and can be repeated for each.

    An example has `views` rows.
    """
    sizes = [size * views for size in _SIZES]
    shapes = [_shapes(forward(rows, NOTHING)[1]) for rows in sizes]
    found = frozenset(
        key for key, shape in shapes[0].items() if len(shape) and shapes[1].get(key) == shape
    )
    if found and all(_is_faithful(forward, rows, found) for rows in sizes):
        return found
    return NOTHING


def _shapes(calls: list[LayerCall]) -> dict[tuple[nn.Module, int], torch.Size]:
    """Return the shapes of the words in every call of an embedding."""
    seen: Counter[nn.Module] = Counter()
    shapes: dict[tuple[nn.Module, int], torch.Size] = {}
    for call in calls:
        if type(call.layer) is nn.Embedding:
            shapes[call.layer, seen[call.layer]] = call.activations.shape
            seen[call.layer] += 1
    return shapes


def _is_faithful(forward: Forward, rows: int, shared: Shared) -> bool:
    """Tell whether repeating changes no output, and each copy reaches its own row alone."""
    expected = [part.detach() for part in tensors_of(forward(rows, NOTHING)[0])]
    try:
        outputs, calls = forward(rows, shared)
    except Exception:  # shapes no longer fit
        return False
    parts = list(tensors_of(outputs))
    alike = len(parts) == len(expected) and all(
        one.shape == other.shape and torch.allclose(one, other, equal_nan=True)
        for one, other in zip(parts, expected, strict=True)
    )
    copies = [call for call in calls if any(call.layer is layer for layer, _ in shared)]
    return alike and all(_reaches_own_row(parts, copies, rows, row) for row in range(rows))


def _reaches_own_row(parts: list[Tensor], calls: list[LayerCall], rows: int, row: int) -> bool:
    with torch.enable_grad():
        # uneven weights: a softmax, for one, adds up to a constant
        values = [
            (part[row] * torch.arange(1.0, part[row].numel() + 1).to(part).view_as(part[row])).sum()
            for part in parts
            if part.requires_grad and part.dim() and len(part) == rows
        ]
        if not values:
            return False
        total = torch.stack(values).sum()
    edges = [call.edge for call in calls]
    found = torch.autograd.grad(total, edges, allow_unused=True, retain_graph=True)
    others = [other for other in range(rows) if other != row]
    return all(part is None or not bool(part[others].any()) for part in found)
