"""Multi-head attention as linear maps over tokens, so that its weights get ghost norms.

`torch.nn` projects queries, keys and values by one packed weight, past any layer of its own. The
same function is computed here, with each projection recorded.

Legend: E rows, T queries, S keys, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.clipping.products import linear
from dpcsgp.privacy.clipping.projections import Projection, Record


def has_closed_form(layer: nn.MultiheadAttention) -> bool:
    """Tell whether queries, keys and values share one packed weight, and no keys are added."""
    packed = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
    return packed and set(layer._parameters) <= {
        "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
        "q_proj_weight", "k_proj_weight", "v_proj_weight",
    }  # fmt: skip


def attention_forward(
    layer: nn.MultiheadAttention,
    record: Record,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute what the layer computes, and record its projections."""
    if query.dim() != 3 or (is_causal and attn_mask is None):  # as torch does it, not recorded
        return type(layer).forward(
            layer, query, key, value, key_padding_mask, need_weights, attn_mask,
            average_attn_weights, is_causal,
        )  # fmt: skip
    heads = [
        part.unflatten(2, (layer.num_heads, layer.head_dim)).transpose(1, 2)
        for part in _projected(layer, record, query, key, value)
    ]
    mask = _mask(layer, heads[0], attn_mask, key_padding_mask)
    mixed, weights = _attend(layer, heads, mask, need_weights)
    out = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    return (out if layer.batch_first else out.transpose(0, 1)), weights


def _projected(
    layer: nn.MultiheadAttention, record: Record, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (E, T, D), with one product for inputs that are the same."""
    groups: list[tuple[Tensor, int]] = []
    for part in (query, key, value):
        if groups and groups[-1][0] is part:
            groups[-1] = part, groups[-1][1] + 1
        else:
            groups.append((part, 1))
    found, first = [], 0
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    for part, count in groups:
        rows = slice(first, first + count * layer.embed_dim)
        tokens = part if layer.batch_first else part.transpose(0, 1)
        if len(groups) == 1:  # no slice, which would be one more node of the graph
            out = linear(tokens, weight, bias)
        else:
            out = linear(tokens, weight[rows], None if bias is None else bias[rows])
        record(layer, tokens, out, Projection("in_proj_weight", "in_proj_bias", first))
        found += out.chunk(count, dim=2)
        first = rows.stop
    return found[0], found[1], found[2]


def _mask(
    layer: nn.MultiheadAttention, queries: Tensor, attn_mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Return what is added to the scores (E, heads, T, S); None for nothing."""
    parts: list[Tensor] = []
    if attn_mask is not None:
        part = _added(attn_mask, queries)
        by_head = part.dim() == 3
        parts.append(part.view(-1, layer.num_heads, *part.shape[1:]) if by_head else part)
    if padding is not None:
        parts.append(_added(padding, queries)[:, None, None, :])
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers: minus infinity where a mask of truth values says no."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _attend(
    layer: nn.MultiheadAttention, heads: list[Tensor], mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the mixed values (E, heads, T, D / heads), and the weights if they are asked for."""
    queries, keys, values = heads
    dropout = layer.dropout if layer.training else 0.0
    if not need_weights:
        settings: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout}
        return F.scaled_dot_product_attention(queries, keys, values, **settings), None
    scores = (queries / math.sqrt(layer.head_dim)) @ keys.mT
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ values, weights
