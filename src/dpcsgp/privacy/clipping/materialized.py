"""Per-example gradients in full, by `torch.func`: for parameters that have no ghost norm.

A few rows at a time are formed, measured together with the ghost norms of all other parameters,
clipped and summed.

Legend: E rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping.contract import Chunk, Observer
from dpcsgp.privacy.clipping.ghost_norms import clip_factors, finite_, slices
from dpcsgp.privacy.clipping.squares import squared_norms

# (parameters to be formed, one example, its target; which rows of a unit there are) -> its loss
ExampleLoss = Callable[..., Tensor]


def materialized_sums(
    example_loss: ExampleLoss,
    parameters: dict[str, Tensor],
    chunk: Chunk,
    squares_E: Tensor,
    margins_E: Tensor,
    clip_norm: float,
    observe: Observer | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the clipped sums of these parameters, and the squared norms over all parameters.

    `squares_E` and `margins_E` are squared ghost norms and margins of all other parameters.
    """
    given = [part for part in (chunk.inputs, chunk.targets, chunk.filled_EM) if part is not None]
    in_dims = (None, *[0] * len(given))
    gradients = vmap(grad(example_loss), in_dims=in_dims, randomness="different")
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    norms: list[Tensor] = []
    seen: dict[str, list[Tensor]] = {name: [] for name in parameters if observe is not None}
    num_coordinates = sum(value.numel() for value in parameters.values())
    for rows in slices(len(chunk.inputs), num_coordinates):
        found = _batched(gradients, parameters, [part[rows] for part in given])
        parts = {name: part.flatten(1) for name, part in found.items()}
        for name, shown in seen.items():
            shown.append(parts[name].clone())
        # The whole gradient is measured before any part of it is scaled.
        formed_E = torch.stack([squared_norms(part) for part in parts.values()]).sum(dim=0)
        norms.append(squares_E[rows] + formed_E)
        factors_E = clip_factors(norms[-1], clip_norm, margins_E[rows])
        factors_E = torch.where(chunk.present_E[rows], factors_E, 0.0)
        for name, part in parts.items():
            sums[name] += (factors_E.to(part.dtype) @ finite_(part)).view_as(sums[name])
    for name, shown in seen.items():
        assert observe is not None
        observe(f"the gradient of '{name}'", torch.cat(shown))
    return sums, torch.cat(norms)


def _batched(
    gradients: Callable[..., dict[str, Tensor]],
    parameters: dict[str, Tensor],
    given: list[Tensor],
) -> dict[str, Tensor]:
    """Return the gradients (E, *shape) of these parameters, or say which cannot be batched."""
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
            return gradients(parameters, *given)
    except RuntimeError as error:
        names = ", ".join(repr(name) for name in parameters)
        raise ModelError(
            f"model parameters {names}: their layers have no closed form for per-example "
            f"gradients and torch.func cannot batch them ({error}); replace these layers, or "
            "freeze them with requires_grad_(False). An embedding of positions has a closed form "
            "if it is looked up for every row (position_ids expanded over the batch); random "
            "masks may stand in the way: set dropout to 0, or pass the model in eval() mode"
        ) from error
