"""Which layers have ghost norms, and how one recorded call becomes a grad sample per parameter.

A rule gets the layer, its inputs (activations), the loss gradients at its outputs (backprops) and
the number of examples, and returns the per-example gradients of its trainable parameters in the
form that ghost clipping needs. The first axis of activations and backprops is E x M: examples times
augmented views of an example.

Legend: E examples, M views, T positions (views included), I inputs and O outputs of a layer, P
coordinates of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.clipping import attention, recurrent
from dpcsgp.privacy.clipping.convolution import kernel_grad_sample
from dpcsgp.privacy.clipping.ghost_norms import (
    CACHED_FLOATS,
    EmbeddingGradSample,
    GradSample,
    LinearGradSample,
    MaterializedGradSample,
    slices,
)
from dpcsgp.privacy.clipping.projections import Projection

Samples = dict[str, GradSample]  # by attribute of the layer
Rule = Callable[[Any, Tensor, Tensor, int], Samples]


def _trainable(layer: nn.Module, attribute: str) -> bool:
    parameter = getattr(layer, attribute, None)
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad


def _linear(layer: nn.Linear, activations: Tensor, backprops: Tensor, num_examples: int) -> Samples:
    backprops_ETO = backprops.reshape(num_examples, -1, layer.out_features)
    samples: Samples = {}
    if _trainable(layer, "weight"):
        activations_ETI = activations.reshape(num_examples, -1, layer.in_features)
        samples["weight"] = LinearGradSample(activations_ETI, backprops_ETO)
    if _trainable(layer, "bias"):
        samples["bias"] = MaterializedGradSample(backprops_ETO.sum(dim=1))
    return samples


def _transposed_linear(
    layer: nn.Module, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    """The `Conv1D` of transformers: a linear layer whose weight is (I, O)."""
    activations_ETI = activations.reshape(num_examples, -1, activations.shape[-1])
    backprops_ETO = backprops.reshape(num_examples, -1, backprops.shape[-1])
    samples: Samples = {}
    if _trainable(layer, "weight"):  # g_e = sum_t a_et b_et': the two change places
        samples["weight"] = LinearGradSample(backprops_ETO, activations_ETI)
    if _trainable(layer, "bias"):
        samples["bias"] = MaterializedGradSample(backprops_ETO.sum(dim=1))
    return samples


def _projection(
    layer: nn.Module,
    projection: Projection,
    activations: Tensor,
    backprops: Tensor,
    num_examples: int,
) -> Samples:
    """A linear map inside a larger layer, by some rows of a weight: the others get zero."""
    weight, bias = projection.weight, projection.bias
    height = getattr(layer, weight).shape[0]
    after = height - projection.first - backprops.shape[-1]
    if projection.first or after:
        backprops = F.pad(backprops, (projection.first, after))
    backprops_ETO = backprops.reshape(num_examples, -1, height)
    samples: Samples = {}
    if _trainable(layer, weight):
        activations_ETI = activations.reshape(num_examples, -1, activations.shape[-1])
        samples[weight] = LinearGradSample(activations_ETI, backprops_ETO)
    if bias is not None and _trainable(layer, bias):
        samples[bias] = MaterializedGradSample(backprops_ETO.sum(dim=1))
    return samples


def _convolution(
    layer: nn.Conv1d | nn.Conv2d, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    samples: Samples = {}
    if _trainable(layer, "weight"):
        samples["weight"] = kernel_grad_sample(layer, activations, backprops, num_examples)
    if _trainable(layer, "bias"):
        by_image = backprops.flatten(2).sum(dim=2)
        by_view = by_image.view(num_examples, -1, layer.out_channels)
        samples["bias"] = MaterializedGradSample(by_view.sum(dim=1))
    return samples


def _embedding(
    layer: nn.Embedding, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    words_ET = activations.reshape(num_examples, -1).long()
    backprops_ETO = backprops.reshape(num_examples, -1, layer.embedding_dim)
    if layer.padding_idx is not None:  # its row is never trained
        backprops_ETO = backprops_ETO.masked_fill((words_ET == layer.padding_idx)[:, :, None], 0.0)
    return {"weight": EmbeddingGradSample.of(words_ET, backprops_ETO, layer.num_embeddings)}


def _embedding_bag(
    layer: nn.EmbeddingBag, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    """A sum or mean of the rows that a bag of words looks up: each word gets the bag's share."""
    shares = torch.ones_like(activations, dtype=backprops.dtype)
    if layer.padding_idx is not None:
        shares = shares.masked_fill(activations == layer.padding_idx, 0.0)
    if layer.mode == "mean":
        shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(1.0)
    backprops_ETO = (shares[:, :, None] * backprops[:, None]).reshape(
        num_examples, -1, layer.embedding_dim
    )
    words_ET = activations.reshape(num_examples, -1).long()
    return {"weight": EmbeddingGradSample.of(words_ET, backprops_ETO, layer.num_embeddings)}


def _channel_norm(
    layer: nn.Module, activations: Tensor, backprops: Tensor, num_examples: int, groups: int
) -> Samples:
    """Group and instance normalisation: channel c's scale has gradient sum_t b_ct normal_ct."""
    channels = activations.shape[1]
    scale, shift = (activations.new_empty(len(activations), channels) for _ in range(2))
    # a few rows at a time: the normalised values are computed again and stay in cache
    for rows in slices(len(activations), activations[0].numel(), CACHED_FLOATS):
        part = backprops[rows].reshape(-1, channels, activations[0, 0].numel())
        normal = F.group_norm(
            activations[rows],
            groups,
            eps=layer.eps,  # pyright: ignore[reportArgumentType]
        ).reshape(part.shape)
        scale[rows], shift[rows] = (part * normal).sum(dim=2), part.sum(dim=2)
    return _affine_samples(
        layer, scale.view(num_examples, -1, channels), shift.view(num_examples, -1, channels)
    )


def _group_norm(
    layer: nn.GroupNorm, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    return _channel_norm(layer, activations, backprops, num_examples, layer.num_groups)


def _instance_norm(
    layer: nn.Module, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    return _channel_norm(layer, activations, backprops, num_examples, activations.shape[1])


def _layer_norm(
    layer: nn.LayerNorm, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    normal = F.layer_norm(activations, layer.normalized_shape, eps=layer.eps)
    return _position_norm(layer, normal, backprops, num_examples)


def _rms_norm(
    layer: nn.RMSNorm, activations: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    normal = F.rms_norm(activations, list(layer.normalized_shape), eps=layer.eps)
    return _position_norm(layer, normal, backprops, num_examples)


def _position_norm(
    layer: nn.Module, normal: Tensor, backprops: Tensor, num_examples: int
) -> Samples:
    """Layer and root-mean-square normalisation: one scale per coordinate for all positions."""
    width = torch.Size(
        layer.normalized_shape  # pyright: ignore[reportArgumentType, reportCallIssue]
    ).numel()
    scale, shift = (
        part.reshape(num_examples, -1, width) for part in (normal * backprops, backprops)
    )
    return _affine_samples(layer, scale, shift)


def _affine_samples(layer: nn.Module, scale_ETP: Tensor, shift_ETP: Tensor) -> Samples:
    parts = {"weight": scale_ETP, "bias": shift_ETP}
    return {
        name: MaterializedGradSample(part.sum(dim=1))
        for name, part in parts.items()
        if _trainable(layer, name)
    }


RULES: Final[dict[type[nn.Module], Rule]] = {
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,  # inside nn.MultiheadAttention
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}
# Layers made of linear maps, computed by a forward of this package that records each map.
COMPOSITES: Final = (*recurrent.RECURRENT, nn.MultiheadAttention)
# Layers of other libraries, by module and class: what they are called is all that is known here.
FOREIGN_RULES: Final[dict[tuple[str, str], Rule]] = {
    ("transformers.pytorch_utils", "Conv1D"): _transposed_linear,
}


def grad_samples(
    layer: nn.Module,
    projection: Projection | None,
    activations: Tensor,
    backprops: Tensor,
    num_examples: int,
) -> Samples:
    """Return the per-example gradients that one recorded call gives to the layer's parameters."""
    if projection is not None:
        return _projection(layer, projection, activations, backprops, num_examples)
    rule = _rule(layer)
    assert rule is not None
    return rule(layer, activations, backprops, num_examples)


def _rule(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer's exact type: subclasses may compute anything."""
    kind = type(layer)
    return RULES.get(kind) or FOREIGN_RULES.get((kind.__module__, kind.__name__))


def positions(layer: nn.Module, output_shape: torch.Size) -> int:
    """Return over how many positions of a row a ghost sum runs; 1 where there is none."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return output_shape[2:].numel()
    linear = isinstance(layer, (nn.Linear, *COMPOSITES)) or type(layer) not in RULES
    return output_shape[1:-1].numel() if linear else 1


def has_rule(layer: nn.Module) -> bool:
    """Tell whether a layer has ghost norms: exact types only, subclasses may compute anything."""
    if "forward" in vars(layer):
        return False
    if type(layer) in recurrent.RECURRENT:
        assert isinstance(layer, nn.RNNBase)
        return recurrent.has_closed_form(layer)
    if type(layer) is nn.MultiheadAttention:
        return attention.has_closed_form(layer)
    if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
        return False
    return _rule(layer) is not None and not layer._parameters.keys() - {"weight", "bias"}
