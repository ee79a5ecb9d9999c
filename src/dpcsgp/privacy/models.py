"""Refuse models that cannot be trained privately, before any budget is spent.

Per-example clipping bounds an example's influence only if every example has a gradient of its own: layers that mix
examples or keep statistics of the data are refused, with a replacement that works. `check_model` looks at the layers;
the probes run the model on random inputs, never on private data.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dpcsgp.errors import ModelError
from dpcsgp.privacy.layerwise import check_losses
from dpcsgp.randomness import torch_seed

_PROBE_EXAMPLES: Final = 4
_TOLERANCE: Final = 1e-4


def check_model(module: nn.Module) -> None:
    """Refuse a model that cannot be trained privately; the error names the layer and a replacement.

    Warns about in-place layers and about Dropout, which work but deserve a thought.
    """
    for name, layer in module.named_modules():
        problem = _problem(layer)
        if problem:
            raise ModelError(f"model layer {_label(name, layer)}: {problem}")
    _check_parameters(module)
    _warn(module)


def _label(name: str, layer: nn.Module) -> str:
    return f"'{name}' ({type(layer).__name__})" if name else f"(the model itself, {type(layer).__name__})"


def _problem(layer: nn.Module) -> str | None:
    """Return what is wrong with one layer and how to mend it."""
    if isinstance(layer, _BatchNorm):
        return f"it normalises over the batch, which mixes examples; replace it by {_group_norm(layer.num_features)}"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        fixed = f"nn.{type(layer).__name__}({layer.num_features}, affine={layer.affine}, track_running_stats=False)"
        return f"it keeps running statistics of the data; replace it by {fixed}"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            return f"max_norm={layer.max_norm} rewrites the weights of the words it meets; leave max_norm out"
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq counts words over the whole batch; leave it out"
    for name, _ in layer.named_buffers(recurse=False):
        if name.startswith("running_") or name == "num_batches_tracked":
            return f"its buffer '{name}' looks like running statistics of the data; use a layer without them, e.g. GroupNorm"
    if _has_spectral_norm(layer):
        return "spectral normalisation changes its buffers in every forward pass; remove it from this layer"
    return None


def _group_norm(channels: int) -> str:
    """Return a GroupNorm that fits: the most groups, up to 32, that keep two channels or more together."""
    if not channels:
        return "nn.GroupNorm(num_groups, channels)"
    groups = max(count for count in range(1, 33) if channels % count == 0 and (count == 1 or channels // count >= 2))
    return f"nn.GroupNorm({groups}, {channels})"


def _has_spectral_norm(layer: nn.Module) -> bool:
    hooks = (type(hook).__name__ for hook in layer._forward_pre_hooks.values())
    return type(layer).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks


def _check_parameters(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ModelError(f"model parameter '{name}' has no shape yet; run the model once on a sample input first")
        trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if trainable and tensor.dtype not in (torch.float32, torch.float64):
            raise ModelError(f"model parameter '{name}' has dtype {tensor.dtype}; convert it, e.g. model.float()")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError("the model has no trainable parameters; set requires_grad_(True) on those to be trained")


def _warn(module: nn.Module) -> None:
    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    inplace = [_label(name, layer) for name, layer in layers if getattr(layer, "inplace", False)]
    if inplace:
        warnings.warn(
            f"in-place layers {', '.join(inplace)}: gradients stay exact, but inplace=False is safer and costs only memory",
            UserWarning,
            stacklevel=3,
        )
    dropout = [_label(name, layer) for name, layer in layers if isinstance(layer, nn.modules.dropout._DropoutNd)]
    if dropout:
        warnings.warn(
            f"Dropout layers {', '.join(dropout)}: their masks do not add to privacy; with noisy gradients training is "
            "often better without them",
            UserWarning,
            stacklevel=3,
        )


def check_examples_independent(module: nn.Module, example_input: Tensor) -> None:
    """Refuse a model whose output for one example depends on the others, or that changes its buffers or its input.

    `example_input` is one example without batch axis; only its shape and dtype are used. The probe runs in training
    mode on random inputs: the same first example among different companions must give the same first output. Warns
    about layers whose output is changed in place by the code around them.
    """
    probe = copy.deepcopy(module).train()
    buffers = {name: buffer.clone() for name, buffer in probe.named_buffers()}
    first, second = _probe_batch(example_input, "first"), _probe_batch(example_input, "second")
    second[0] = first[0]
    originals = first.clone()
    _warn_about_in_place(probe, first.clone())
    traces = [_trace(probe, batch) for batch in (first, second)]
    for (name, one), (_, other) in zip(*traces, strict=False):
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * float(one.abs().max()), equal_nan=True):
            layer = probe.get_submodule(name)
            raise ModelError(
                f"model layer {_label(name, layer)}: its output for one example depends on the other examples of the "
                "batch, so no example has a gradient of its own; use a layer that treats examples one by one"
            )
    if not torch.equal(first, originals):
        raise ModelError(
            "the model changes its input in place, and with it the data; write `x = x + 1` instead of `x += 1`"
        )
    for name, buffer in probe.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise ModelError(
                f"model buffer '{name}' changes in the forward pass, so it would carry private data past the noise; "
                "use a layer without running statistics"
            )


def _probe_batch(example: Tensor, purpose: str) -> Tensor:
    """Return random examples of the shape and dtype of `example`; whole numbers are 0 or 1, valid in any vocabulary."""
    shape = (_PROBE_EXAMPLES, *example.shape)
    with torch_seed(0, f"model probe {purpose}"):
        if example.is_floating_point() or example.is_complex():
            return torch.randn(shape, dtype=example.dtype).to(example.device)
        return torch.randint(0, 2, shape).to(example.device, example.dtype)


def _trace(module: nn.Module, batch: Tensor) -> list[tuple[str, Tensor]]:
    """Return the first example's row of every layer's output, in the order in which layers finish."""
    rows: list[tuple[str, Tensor]] = []

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        rows.extend((name, part[0].detach().clone()) for part in _batched(output))

    _watch_outputs(module, batch, list(module.named_modules()), keep)
    return rows


def _watch_outputs(
    module: nn.Module,
    batch: Tensor,
    layers: Sequence[tuple[str, nn.Module]],
    see: Callable[[str, nn.Module, Any], None],
) -> None:
    """Run the module once and show the output of each of these layers as it comes."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, output: see(name, layer, output)

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
    try:
        with torch_seed(0, "model probe masks"), torch.no_grad():
            module(batch)
    finally:
        for handle in handles:
            handle.remove()


def _warn_about_in_place(module: nn.Module, batch: Tensor) -> None:
    """Warn about outputs of layers that later code writes into, such as `relu_(layer(x))`."""
    seen: list[tuple[str, nn.Module, Tensor, int]] = []

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        seen.extend((name, layer, part, part._version) for part in _batched(output))

    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    if any(getattr(layer, "inplace", False) for _, layer in layers):
        return  # `check_model` warns about these
    _watch_outputs(module, batch, layers, keep)
    changed = dict.fromkeys(_label(name, layer) for name, layer, part, version in seen if part._version != version)
    if changed:
        warnings.warn(
            f"the outputs of {', '.join(changed)} are changed in place in the forward pass: gradients stay exact, but "
            "writing `x = relu(x)` instead of `relu_(x)` is safer and costs only memory",
            UserWarning,
            stacklevel=3,
        )


def _batched(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output whose first axis is the batch."""
    if isinstance(output, Tensor):
        if output.dim() and len(output) == _PROBE_EXAMPLES:
            yield output
    elif isinstance(output, list | tuple):
        yield from (tensor for part in output for tensor in _batched(part))
    elif isinstance(output, dict):
        yield from (tensor for part in output.values() for tensor in _batched(part))


def check_gradients_reach(
    module: nn.Module, loss: Callable[[Any, Tensor], Tensor], example: tuple[Tensor, Tensor]
) -> None:
    """Refuse a model with trainable parameters that the loss does not depend on: they would only collect noise.

    A loss that does not give one value per example is refused too.
    `example` is one (input, target) pair without batch axis; only shapes and dtypes are used.
    """
    probe = copy.deepcopy(module).train()
    inputs, targets = (_probe_batch(part, purpose) for part, purpose in zip(example, ("input", "target"), strict=True))
    named = [(name, parameter) for name, parameter in probe.named_parameters() if parameter.requires_grad]
    with torch_seed(0, "model probe masks"), torch.enable_grad():
        losses = loss(probe(inputs), targets)
    if not isinstance(losses, Tensor):
        raise ModelError(f"loss: expected a tensor with one value per example, got {type(losses).__name__}")
    check_losses(losses, _PROBE_EXAMPLES)
    total = losses.sum()
    if not total.requires_grad:
        raise ModelError("the loss does not depend on the model's parameters; check the forward pass for detach()")
    _refuse_mixing_loss(loss, probe, inputs, targets)
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
    missing = [name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is None]
    if missing:
        raise ModelError(
            f"model parameters {', '.join(repr(name) for name in missing)} get no gradient from the loss: they would "
            "only collect noise; use them in the forward pass or freeze them with requires_grad_(False)"
        )


def _refuse_mixing_loss(
    loss: Callable[[Any, Tensor], Tensor], probe: nn.Module, inputs: Tensor, targets: Tensor
) -> None:
    """Refuse a loss whose value or slope for the first example depends on its companions or on how many there are."""
    others = _probe_batch(inputs[0], "companions")
    others[0] = inputs[0]
    turned = (
        _probe_batch(targets[0], "companions")
        if targets.is_floating_point()
        else (1 - targets.to(torch.int64)).to(targets.dtype)
    )
    turned[0] = targets[0]
    batches = [(inputs, targets, slice(None)), (others, turned, slice(None)), (inputs, targets, slice(None, -1))]
    seen: list[list[Tensor]] = []
    for batch, labels, rows in batches:
        with torch_seed(0, "model probe masks"), torch.no_grad():
            outputs = probe(batch)
        leaves = [part.detach().requires_grad_() for part in _batched(outputs) if part.is_floating_point()]
        if isinstance(outputs, Tensor) and leaves:
            losses = loss(leaves[0][rows], labels[rows])
            slope = torch.autograd.grad(losses.sum(), leaves[0], allow_unused=True)[0]
            seen.append([losses[0].detach(), *([] if slope is None else [slope[0]])])
        elif rows == slice(None):
            with torch.no_grad():
                seen.append([loss(outputs, labels)[0]])
    for other in seen[1:]:
        for one, another in zip(seen[0], other, strict=True):
            if not torch.allclose(
                one, another, rtol=_TOLERANCE, atol=_TOLERANCE * float(one.abs().max()), equal_nan=True
            ):
                raise ModelError(
                    "loss: its value or slope for one example depends on the other examples of the batch, so no example has a "
                    "gradient of its own; divide by public constants instead of sums or means over the batch"
                )
