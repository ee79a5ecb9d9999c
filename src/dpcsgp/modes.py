"""The state that a module is in: training or evaluation, layer by layer, and compiled or not.

Batch normalisation with frozen parameters and stored statistics, in eval() mode, is a fixed map of
each example; in train() mode it would mix them. So modes are kept layer by layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_frozen_statistics(layer: nn.Module) -> bool:
    """Tell whether batch normalisation does nothing but apply what was stored before."""
    return (
        isinstance(layer, _BatchNorm)
        and not layer.training
        and layer.running_mean is not None
        and layer.running_var is not None
        and not any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
    )


def frozen_statistics(module: nn.Module) -> list[nn.Module]:
    """Return the layers that must stay in eval() mode."""
    return [layer for layer in module.modules() if has_frozen_statistics(layer)]


def training_copy(module: nn.Module) -> nn.Module:
    """Return a copy in train() mode; frozen statistics stay as they are."""
    copied = copy.deepcopy(module)
    still = frozen_statistics(copied)
    copied.train()
    for layer in still:
        layer.eval()
    return copied


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval() mode, and every layer back into its own afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def uncompiled(module: nn.Module) -> nn.Module:
    """Return a copy of a module without `torch.compile`, and say so if there was any.

    Compiled code hides the layers whose inputs per-example gradients are made of.
    """
    compiled = [layer for layer in module.modules() if _is_compiled(layer)]
    if not compiled:
        return copy.deepcopy(module)
    plain = copy.deepcopy(_original(module))
    for layer in plain.modules():
        layer._compiled_call_impl = None
        for name, child in list(layer.named_children()):
            setattr(layer, name, _original(child))
    warnings.warn(
        "the model is compiled (torch.compile): private gradients need its layers one by one, so "
        "it is trained without; compile the result for use",
        UserWarning,
        stacklevel=2,
    )
    return plain


def _is_compiled(layer: nn.Module) -> bool:
    return _original(layer) is not layer or layer._compiled_call_impl is not None


def _original(layer: nn.Module) -> nn.Module:
    """Return what `torch.compile` wrapped, known by name: importing its class takes seconds."""
    kind = type(layer)
    wrapped = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return _original(cast(nn.Module, layer._orig_mod)) if wrapped else layer
