"""Refuse models that cannot be trained privately, before any budget is spent.

Per-example clipping bounds an example's influence only if every example has a gradient of its own:
layers that mix examples or keep statistics of the data are refused, with a replacement that works.
This looks at the layers only; `model_probes` runs the model.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from dpcsgp.errors import ModelError
from dpcsgp.modes import has_frozen_statistics

_LOW_PRECISION: Final = (torch.bfloat16, torch.float16)
_MOST_NAMED: Final = 3  # layers that a warning lists
_WARNED: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


def check_model(module: nn.Module, warn: bool = True) -> None:
    """Refuse a model that cannot be trained privately; the error names the layer and a replacement.

    Warns once of in-place layers and of Dropout, which work but deserve a thought, unless `warn` is
    False.
    """
    # Layers first, because their errors name a remedy; then parameters; then what only warns.
    for name, layer in module.named_modules():
        problem = _problem(layer)
        if problem:
            raise ModelError(f"model layer {label(name, layer)}: {problem}")
    _check_parameters(module)
    if warn and module not in _WARNED:
        _WARNED.add(module)
        _warn(module)


def label(name: str, layer: nn.Module) -> str:
    """Return how errors name a layer: its path in the model and its type."""
    kind = type(layer).__name__
    return f"'{name}' ({kind})" if name else f"(the model itself, {kind})"


def _few(labels: list[str]) -> str:
    """List the first of many layers."""
    more = len(labels) - _MOST_NAMED
    return ", ".join(labels[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _problem(layer: nn.Module) -> str | None:
    """Return what is wrong with one layer and how to mend it."""
    # Statistics over the batch or kept from one batch to the next.
    if has_frozen_statistics(layer):
        return None
    if isinstance(layer, _BatchNorm):
        group_norm = _group_norm(layer.num_features)
        return (
            "it normalises over the batch, which mixes examples; keep what it learned from public "
            f"data with layer.requires_grad_(False).eval(), or replace it by {group_norm}"
        )
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        settings = f"{layer.num_features}, affine={layer.affine}, track_running_stats=False"
        fixed = f"nn.{type(layer).__name__}({settings})"
        return f"it keeps running statistics of the data; replace it by {fixed}"
    # Options of embeddings that look at the words of the batch.
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            return (
                f"max_norm={layer.max_norm} rewrites the weights of the words it meets; leave "
                "max_norm out"
            )
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq counts words over the whole batch; leave it out"
    if isinstance(layer, nn.LSTM) and layer.proj_size and _is_trained(layer):
        return (
            f"proj_size={layer.proj_size} has no per-example gradients; use an LSTM without it, "
            f"then nn.Linear({layer.hidden_size * (1 + layer.bidirectional)}, {layer.proj_size})"
        )
    # Layers of other libraries, known only by the names of their buffers.
    for name, _ in layer.named_buffers(recurse=False):
        if name.startswith("running_") or name == "num_batches_tracked":
            return (
                f"its buffer '{name}' looks like running statistics of the data; use a layer "
                "without them, e.g. GroupNorm"
            )
    if _has_spectral_norm(layer):
        return (
            "spectral normalisation changes its buffers in every forward pass; remove it from "
            "this layer"
        )
    return None


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _group_norm(channels: int) -> str:
    """Return a GroupNorm that fits: up to 32 groups, of two channels or more if possible."""
    if not channels:
        return "nn.GroupNorm(num_groups, channels)"
    groups = max(
        count
        for count in range(1, 33)
        if channels % count == 0 and (count == 1 or channels // count >= 2)
    )
    return f"nn.GroupNorm({groups}, {channels})"


def _has_spectral_norm(layer: nn.Module) -> bool:
    # Torch has it twice: as a parametrization and, older, as a hook.
    hooks = (type(hook).__name__ for hook in layer._forward_pre_hooks.values())
    return type(layer).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks


class RefuseLowPrecision(TorchFunctionMode):
    """Refuses gradients through bfloat16 or float16 while it is on.

    Rounded to 8 or 11 bits, activations would enter the sums that the noise is calibrated for, and
    the fast gradient is no longer torch's own. Frozen parts may compute as they like.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and part.requires_grad and part.dtype in _LOW_PRECISION:
                raise ModelError(
                    f"model: its forward pass computes in {part.dtype} ({func.__name__}), and "
                    "gradients go through it; expected torch.float32. Leave out torch.autocast, "
                    "bfloat16() and half(), or freeze what uses them with requires_grad_(False)"
                )
        return result


def _check_parameters(module: nn.Module) -> None:
    # A lazy layer has no shape before its first input, so nothing to count or to clip.
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(
                f"model parameter '{name}' has no shape yet; run the model once on a sample "
                "input first"
            )
        trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if trainable and tensor.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"model parameter '{name}' has dtype {tensor.dtype}; convert it, e.g. model.float()"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            "the model has no trainable parameters; set requires_grad_(True) on those to be trained"
        )


def _warn(module: nn.Module) -> None:
    # Leaves only: a container is not named for what it contains.
    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    inplace = [label(name, layer) for name, layer in layers if getattr(layer, "inplace", False)]
    if inplace:
        warnings.warn(
            f"in-place layers {_few(inplace)}: gradients stay exact, but inplace=False is "
            "safer and costs only memory",
            UserWarning,
            stacklevel=3,
        )
    dropout = [
        label(name, layer)
        for name, layer in layers
        if layer.training and isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
    ]
    if dropout:
        warnings.warn(
            f"Dropout layers {_few(dropout)}: their masks do not add to privacy; with noisy "
            "gradients training is often better without them",
            UserWarning,
            stacklevel=3,
        )
