"""Products of activations with the weights of linear layers, by oneDNN where torch has it.

Torch multiplies matrices in float32 by MKL, which leaves half of the vector registers of some
processors idle. oneDNN, which torch brings along for convolutions, makes kernels for the processor
at hand: a layer of 64 x 64 takes half the time on one with AVX-512 that is not Intel's. Both are
float32 throughout; `row_checks` holds the rows of this product against each other as it does for
any other. Where torch was built without oneDNN, on other devices, and for small products, it is
torch's own.

Legend: R rows (examples times positions), I inputs, O outputs of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

# multiplications below which the detour costs as much as it gains; shapes are public
_WORTH_IT: Final = 2**22
_LINEAR: Final = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_only_inputs: ContextVar[bool] = ContextVar("only_inputs", default=False)


def linear(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return inputs W' + b over the last axis, as `torch.nn.functional.linear` does."""
    if not _suits(inputs, weight_OI, bias_O):
        return F.linear(inputs, weight_OI, bias_O)
    return _Product.apply(inputs, weight_OI, bias_O)  # pyright: ignore[reportReturnType]


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """Return the plain linear layers of a module, trained or not: subclasses may do anything."""
    return [
        layer
        for layer in module.modules()
        if type(layer) in _LINEAR and "forward" not in vars(layer)
    ]


@contextmanager
def fast_products(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let these linear layers multiply by `linear`.

    Keep it until the way back is done: layers under `torch.utils.checkpoint` run once more there.
    """
    replaced = [layer for layer in layers if "forward" not in vars(layer)]
    try:
        for layer in replaced:
            vars(layer)["forward"] = functools.partial(_forward, layer)
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)  # the model may have taken it away itself


@contextmanager
def weights_left_out() -> Iterator[None]:
    """Form no weight gradients on a way back that ends at the outputs of layers."""
    token = _only_inputs.set(True)
    try:
        yield
    finally:
        _only_inputs.reset(token)


def _forward(layer: Any, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _suits(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Tell, from public shapes and settings, whether oneDNN takes this product."""
    parts = (inputs, weight_OI) if bias_O is None else (inputs, weight_OI, bias_O)
    return (
        inputs.numel() * weight_OI.shape[0] >= _WORTH_IT
        and all(_is_plain(part) for part in parts)
        and weight_OI.dim() == 2
        # the operator reads a bias as if it were so, whatever it is
        and (bias_O is None or (bias_O.shape == weight_OI.shape[:1] and bias_O.is_contiguous()))
        # Derivatives inside of a model, other than by its way back: they need operations that they
        # can take apart.
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _operator() is not None
    )


def _is_plain(part: Tensor) -> bool:
    """Tell whether a tensor holds float32 numbers on a processor, and nothing else by its class."""
    return (
        type(part) in (Tensor, nn.Parameter)
        and part.dtype is torch.float32
        and part.device.type == "cpu"
        and part.layout is torch.strided
    )


@functools.cache
def _operator() -> Callable[..., Tensor] | None:
    """Return oneDNN's product if torch has it and it gives the right numbers."""
    cpu = {"dtype": torch.float32, "device": "cpu"}
    rows, weight = torch.ones(4, 3, **cpu), torch.arange(6, **cpu).view(2, 3)
    try:
        product = torch.ops.mkldnn._linear_pointwise.default
        found = product(rows, weight, torch.ones(2, **cpu), "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    right = torch.tensor([[4.0, 13.0]], **cpu).expand(4, 2)
    return product if torch.equal(found, right) else None


class _Product(torch.autograd.Function):
    """inputs W' + b; its way back is made of such products again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # Activations are kept only for weights that could ask for a gradient.
        ctx.save_for_backward(weight_OI, inputs if weight_OI.requires_grad else None)
        operator = _operator()
        assert operator is not None
        rows_RI = inputs.reshape(-1, inputs.shape[-1])
        out_RO = operator(rows_RI, weight_OI, bias_O, "none", [], "")
        # not a view, which models could not change in place
        return torch.ops.aten._unsafe_view(out_RO, [*inputs.shape[:-1], len(weight_OI)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, backprops: Tensor
    ) -> tuple[Tensor | None, ...]:
        weight_OI, inputs = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        d_inputs = linear(backprops, weight_OI.t()) if wants_inputs else None
        if _only_inputs.get():
            return d_inputs, None, None
        # a model that differentiates by its own weights, on the way forward
        rows_RO = backprops.reshape(-1, backprops.shape[-1])
        d_weight = rows_RO.t() @ inputs.reshape(-1, inputs.shape[-1]) if wants_weight else None
        return d_inputs, d_weight, rows_RO.sum(dim=0) if wants_bias else None
