"""Clipped gradient sums for stacks of linear layers: all hosted nodes in one batched product per layer.

Layer l maps a_l to z_l = W_l a_l + b_l; with delta_l the loss gradient at z_l, an example's gradient has
|g|^2 = sum_l |delta_l|^2 (|a_l|^2 + 1), and the clipped sums are delta_l' a_l with scaled delta: no per-example
gradient is ever formed.

Legend: N hosted nodes, E examples, M augmented views of an example, B = E M rows, D coordinates, I inputs and O
outputs of a layer.
Reference: Goodfellow, "Efficient per-example gradient computations" (2015).
"""

from __future__ import annotations

import copy
import math
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.layerwise import LayerwiseEngine, Loss, check_losses
from dpcsgp.privacy.terms import at_most, clean_, clip_factors, scaled, slices, squared_norms

# Layers without parameters that treat every row of a (rows, features) matrix on its own.
_ROWWISE: Final = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU,
    nn.Mish, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink,
    nn.Dropout,
)  # fmt: skip


class _Linear(NamedTuple):
    """A linear layer and the names of its parameters; None for a frozen or missing one."""

    layer: nn.Linear
    weight: str | None
    bias: str | None


class _Pass(NamedTuple):
    """What one linear layer saw: its input (N, B, I) and the loss gradient at its output (N, B, O)."""

    linear: _Linear
    inputs_NBI: Tensor
    delta_NBO: Tensor


def is_linear_stack(module: nn.Module) -> bool:
    """Tell whether a module is a sequence of linear layers and row-wise functions, each parameter used once.

    Nothing but what the types say: a hook, a patched forward or a weight computed from others (pruning, weight
    normalisation) would be passed over here.
    """
    if type(module) is not nn.Sequential or not all(_is_plain(layer) for layer in module.modules()):
        return False
    layers = list(_flat(module))
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    rowwise = all(_is_linear(layer) or _is_rowwise(layer) for layer in layers)
    return rowwise and len(parameters) == len(set(parameters)) and any(_is_linear(layer) for layer in layers)


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether calling a layer does what its class says and no more."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks) and not {"forward", "__call__", "_call_impl"} & vars(layer).keys()


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer._parameters.keys() == {"weight", "bias"}


def _flat(module: nn.Module) -> list[nn.Module]:
    if type(module) is not nn.Sequential:
        return [module]
    return [layer for child in module for layer in _flat(child)]


def _is_rowwise(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    if isinstance(layer, nn.Softmax | nn.LogSoftmax):
        return layer.dim in (1, -1)
    return type(layer) in _ROWWISE


@final
class LinearStackEngine:
    """Clip per example for stacks of linear layers, all nodes at once."""

    def __init__(self, module: nn.Sequential, loss: Loss, views: int = 1) -> None:
        self._module = module
        self._loss = loss
        self._views = views
        self._layout = ParameterLayout.of(module)
        self._layerwise = LayerwiseEngine(module, loss, views)
        names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._steps = [_step(layer, names) for layer in _flat(module)]

    def clipped_sum(
        self, parameters_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor, clip_norm: float
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of every node: (N, D)."""
        if not present_NE.numel() or not self._is_flat(inputs):
            return self._layerwise.clipped_sum(parameters_ND, inputs, targets, present_NE, clip_norm)
        passes = self._passes(self._layout.views(parameters_ND.detach()), inputs, targets, present_NE)
        with torch.no_grad():
            squares = torch.stack([self._norm_squared(part, present_NE.shape[1]) for part in passes]).sum(dim=0)
            factors_NE = torch.where(present_NE, clip_factors(squares, clip_norm), 0.0)
            return self._contract(passes, factors_NE, torch.empty_like(parameters_ND))

    def _is_flat(self, inputs: Tensor) -> bool:
        """Tell whether the first linear layer sees one vector per example (not a sequence of vectors)."""
        axes = inputs.dim() - (2 if self._views == 1 else 3)
        return axes == 1 or isinstance(_flat(self._module)[0], nn.Flatten)

    def _passes(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, present_NE: Tensor
    ) -> list[_Pass]:
        """Run all nodes forward, and backward to the outputs of the linear layers (never to the weights)."""
        num_nodes, num_examples = present_NE.shape
        hidden = inputs.reshape(num_nodes, num_examples * self._views, -1)
        seen: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.enable_grad():
            for step in self._steps:
                if isinstance(step, _Linear):
                    seen.append(hidden.detach())
                    hidden = _affine(step, parameters, hidden)
                    outputs.append(hidden if hidden.requires_grad else hidden.requires_grad_())
                else:
                    rows = _without_inplace(step)(hidden.flatten(0, 1))
                    hidden = rows.view(num_nodes, -1, rows.shape[1])
            losses = self._losses(hidden.flatten(0, 1), targets, present_NE)
            deltas = torch.autograd.grad(losses.sum() / self._views, outputs)
        linears = [step for step in self._steps if isinstance(step, _Linear)]
        return [_Pass(*part) for part in zip(linears, seen, deltas, strict=True)]

    def _losses(self, outputs: Tensor, targets: Tensor, present_NE: Tensor) -> Tensor:
        absent = ~present_NE.view(*present_NE.shape, *[1] * (targets.dim() - 2))
        rows = targets.masked_fill(absent, 0).flatten(0, 1)  # padding may hold what a loss would choke on
        losses = self._loss(outputs, rows.repeat_interleave(self._views, dim=0) if self._views > 1 else rows)
        check_losses(losses, len(outputs))
        return losses

    def _norm_squared(self, part: _Pass, num_examples: int) -> Tensor:
        """Return |delta|^2 (|a|^2 + 1), frozen parameters left out: (N, E); views of one example are summed first."""
        weight, bias = part.linear.weight is not None, part.linear.bias is not None
        if self._views == 1:
            inputs_NE, delta_NE = (squared_norms(rows) for rows in part[1:])
            return delta_NE * (inputs_NE * weight + bias)
        inputs, delta = (rows.unflatten(1, (num_examples, self._views)) for rows in part[1:])
        sizes = [squared_norms(rows.flatten(2)) for rows in (inputs, delta)]
        inputs, delta = inputs.double(), delta.double()  # views may cancel: see `terms.at_most`
        squares = (inputs @ inputs.mT).mul_(delta @ delta.mT).sum(dim=(2, 3)).to(sizes[0].dtype)
        biases = squared_norms(delta.sum(dim=2)).to(sizes[0].dtype)
        inputs_NE, delta_NE = (size.sqrt() for size in sizes)
        most = at_most(squares, inputs_NE * delta_NE), at_most(biases, delta_NE * math.sqrt(self._views))
        return most[0] * weight + most[1] * bias

    def _contract(self, passes: list[_Pass], factors_NE: Tensor, total_ND: Tensor) -> Tensor:
        """Write sum_e factor_e g_e into the flat vectors."""
        totals = self._layout.views(total_ND)
        factors_B = factors_NE.repeat_interleave(self._views, dim=1).flatten()
        for linear, inputs_NBI, delta_NBO in passes:
            delta = scaled(delta_NBO.flatten(0, 1), factors_B).view_as(delta_NBO)
            if linear.bias is not None:
                torch.sum(delta, dim=1, out=totals[linear.bias])
            if linear.weight is not None:
                clean_(inputs_NBI)  # the inputs are not needed any more
                for nodes in slices(len(delta), totals[linear.weight][0].numel()):
                    # Not with `out=`: the rows of a flat vector lie apart, and a product straight into them is slower.
                    totals[linear.weight][nodes] = torch.bmm(delta[nodes].mT, inputs_NBI[nodes])
        return total_ND


def _step(layer: nn.Module, names: dict[int, str]) -> _Linear | nn.Module:
    if not isinstance(layer, nn.Linear):
        return layer
    return _Linear(layer, names.get(id(layer.weight)), names.get(id(layer.bias)))


def _affine(linear: _Linear, parameters: dict[str, Tensor], rows_NBI: Tensor) -> Tensor:
    """Return W a + b for every node; frozen parameters are the module's own, the same for all nodes."""
    layer, num_nodes = linear.layer, len(rows_NBI)
    weight = parameters[linear.weight] if linear.weight else layer.weight.detach().expand(num_nodes, -1, -1)
    if layer.bias is None:
        return rows_NBI @ weight.mT
    bias = parameters[linear.bias] if linear.bias else layer.bias.detach().expand(num_nodes, -1)
    return torch.baddbmm(bias[:, None], rows_NBI, weight.mT)


def _without_inplace(layer: nn.Module) -> nn.Module:
    """Return the layer, or a shallow copy that leaves its input alone: inputs of activations are needed afterwards."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        layer.inplace = False  # pyright: ignore[reportArgumentType]
    return layer
