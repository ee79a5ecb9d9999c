"""Which layers have closed forms, and how one recorded call of such a layer becomes a term per
parameter.

A rule gets the layer, its input, the loss gradient at its output and the number of examples, and
returns the terms of its trainable parameters. The first axis of input and output is E x M: examples
times augmented views of an example.

Legend: E examples, M views, T positions (views included), C channels, P coordinates of one
parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.clipping.convolution import kernel_term
from dpcsgp.privacy.clipping.ghost_norms import (
    CACHED_FLOATS,
    ExplicitTerm,
    LookupTerm,
    OuterTerm,
    Term,
    slices,
)

Rule = Callable[[Any, Tensor, Tensor, int], dict[str, Term]]


def _trainable(layer: nn.Module, attribute: str) -> bool:
    parameter = getattr(layer, attribute, None)
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad


def _linear(layer: nn.Linear, inputs: Tensor, delta: Tensor, num_examples: int) -> dict[str, Term]:
    delta_ETO = delta.reshape(num_examples, -1, layer.out_features)
    terms: dict[str, Term] = {}
    if _trainable(layer, "weight"):
        terms["weight"] = OuterTerm(inputs.reshape(num_examples, -1, layer.in_features), delta_ETO)
    if _trainable(layer, "bias"):
        terms["bias"] = ExplicitTerm(delta_ETO.sum(dim=1))
    return terms


def _convolution(
    layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    terms: dict[str, Term] = {}
    if _trainable(layer, "weight"):
        terms["weight"] = kernel_term(layer, inputs, delta, num_examples)
    if _trainable(layer, "bias"):
        by_image = delta.flatten(2).sum(dim=2)
        terms["bias"] = ExplicitTerm(by_image.view(num_examples, -1, layer.out_channels).sum(dim=1))
    return terms


def _embedding(
    layer: nn.Embedding, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    indices_ET = inputs.reshape(num_examples, -1).long()
    delta_ETO = delta.reshape(num_examples, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        delta_ETO = delta_ETO.masked_fill((indices_ET == layer.padding_idx)[:, :, None], 0.0)
    return {"weight": LookupTerm.of(indices_ET, delta_ETO, layer.num_embeddings)}


def _channel_norm(
    layer: nn.Module, inputs: Tensor, delta: Tensor, num_examples: int, groups: int
) -> dict[str, Term]:
    """Group and instance normalisation: the scale of channel c has gradient sum_t delta_ct
    normalised_ct."""
    channels = inputs.shape[1]
    scale, shift = inputs.new_empty(len(inputs), channels), inputs.new_empty(len(inputs), channels)
    for rows in slices(len(inputs), inputs[0].numel(), CACHED_FLOATS):
        part = delta[rows].reshape(-1, channels, inputs[0, 0].numel())
        normal = F.group_norm(inputs[rows], groups, eps=layer.eps).reshape(part.shape)  # pyright: ignore[reportArgumentType]
        scale[rows], shift[rows] = (part * normal).sum(dim=2), part.sum(dim=2)
    return _affine_terms(
        layer, scale.view(num_examples, -1, channels), shift.view(num_examples, -1, channels)
    )


def _group_norm(
    layer: nn.GroupNorm, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    return _channel_norm(layer, inputs, delta, num_examples, layer.num_groups)


def _instance_norm(
    layer: nn.Module, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    return _channel_norm(layer, inputs, delta, num_examples, inputs.shape[1])


def _layer_norm(
    layer: nn.LayerNorm, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _position_norm(layer, normal, delta, num_examples)


def _rms_norm(
    layer: nn.RMSNorm, inputs: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    normal = F.rms_norm(inputs, list(layer.normalized_shape), eps=layer.eps)
    return _position_norm(layer, normal, delta, num_examples)


def _position_norm(
    layer: nn.Module, normal: Tensor, delta: Tensor, num_examples: int
) -> dict[str, Term]:
    """Layer and root-mean-square normalisation: one scale per coordinate, shared by all
    positions."""
    width = torch.Size(layer.normalized_shape).numel()  # pyright: ignore[reportArgumentType, reportCallIssue]
    scale, shift = (part.reshape(num_examples, -1, width) for part in (normal * delta, delta))
    return _affine_terms(layer, scale, shift)


def _affine_terms(layer: nn.Module, scale_ETP: Tensor, shift_ETP: Tensor) -> dict[str, Term]:
    parts = {"weight": scale_ETP, "bias": shift_ETP}
    return {
        name: ExplicitTerm(part.sum(dim=1))
        for name, part in parts.items()
        if _trainable(layer, name)
    }


RULES: Final[dict[type[nn.Module], Rule]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}


def positions(layer: nn.Module, output_shape: torch.Size) -> int:
    """Return how many positions of one row a layer's weight is summed over in the ghost form; 1
    where it has none."""
    if isinstance(layer, nn.Linear):
        return output_shape[1:-1].numel()
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return output_shape[2:].numel()
    return 1


def has_rule(layer: nn.Module) -> bool:
    """Tell whether a layer's parameters have closed forms: only exact types do, as subclasses may
    compute anything."""
    as_written = "forward" not in vars(layer) and not layer._parameters.keys() - {"weight", "bias"}
    return type(layer) in RULES and as_written
