"""Clipped sums from their definition, by explicit per-example gradients, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.clipping.layerwise import LayerwiseEngine
from dpcsgp.privacy.clipping.linear_stack import LinearStackEngine

Loss = Callable[[Any, Tensor], Tensor]


def layerwise(module: nn.Module, loss: Loss, views: int = 1, most_rows: int = 64) -> CheckedEngine:
    """Return the engine that serves any module, whatever the module is."""
    return CheckedEngine(
        LayerwiseEngine(module, loss, views, most_rows), ParameterLayout.of(module), views
    )


def linear_stack(module: nn.Module, loss: Loss) -> CheckedEngine:
    """Return the engine for stacks of linear layers."""
    assert isinstance(module, nn.Sequential)
    return CheckedEngine(LinearStackEngine(module, loss), ParameterLayout.of(module), 1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a smooth loss per example for outputs of any shape."""
    return (outputs.flatten(1) - targets).square().mean(dim=1) + outputs.flatten(1).sin().sum(dim=1)


def per_example_gradients(
    module: nn.Module, loss: Loss, flat_D: Tensor, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Return (E, D) gradients at one node's parameters.

    Inputs are (E, M, ...), losses are averaged over the M views.
    """
    layout = ParameterLayout.of(module)
    parameters = {name: value[0] for name, value in layout.views(flat_D[None]).items()}

    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    rows = []
    for views, target in zip(inputs, targets, strict=True):  # one by one: no layer is in the way
        outputs = functional_call(module, leaves, (views,))
        value = loss(outputs, target.expand(len(views), *target.shape)).mean()
        found = torch.autograd.grad(
            value, [leaves[name] for name in layout.names], allow_unused=True
        )
        parts = zip(layout.names, found, strict=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(leaves[name]) if part is None else part).flatten()
                    for name, part in parts
                ]
            )
        )
    return torch.stack(rows)


def clip_and_sum(gradients_ED: Tensor, clip_norm: float) -> Tensor:
    """Return sum_e g_e min(1, clip_norm / |g_e|)."""
    return (clip_norm / gradients_ED.norm(dim=1)).clamp_max(1.0) @ gradients_ED
