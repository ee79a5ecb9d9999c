"""Clipped gradient sums for stacks of linear layers: all hosted nodes in one batched product per
layer.

Layer l maps a_l to z_l = W_l a_l + b_l; with delta_l the loss gradient at z_l, an example's
gradient has
|g|^2 = sum_l |delta_l|^2 (|a_l|^2 + 1), and the clipped sums are delta_l' a_l with scaled delta: no per-example
gradient is ever formed.

Legend: N hosted nodes, P places of a node in a pass (C chunks of R rows), D coordinates, I inputs
and O outputs of a layer. Reference: Goodfellow, "Efficient per-example gradient computations"
(2015)."""

from __future__ import annotations

import copy
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.ghost_norms import clip_factors, scaled, slices
from dpcsgp.privacy.clipping.layerwise import (
    NORM,
    LayerwiseEngine,
    Loss,
    See,
    check_losses,
    is_random,
)
from dpcsgp.privacy.clipping.squares import blank_infinite_rows_, squared_norms
from dpcsgp.privacy.passes import SUM_SLACK, PassShape, pass_slack

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
    """What one linear layer saw: its input (N, P, I) with squared lengths, and the loss gradient at
    its output (N, P, O)."""

    linear: _Linear
    inputs_NPI: Tensor
    squares_NP: Tensor
    delta_NPO: Tensor


def is_linear_stack(module: nn.Module) -> bool:
    """Tell whether a module is a sequence of linear layers and row-wise functions, each parameter
    used once.

    Nothing but what the types say: a hook, a patched forward or a weight computed from others
    (pruning, weight normalisation) would be passed over here."""
    if type(module) is not nn.Sequential or not all(_is_plain(layer) for layer in module.modules()):
        return False
    layers = list(_flat(module))
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    rowwise = all(_is_linear(layer) or _is_rowwise(layer) for layer in layers)
    return (
        rowwise
        and len(parameters) == len(set(parameters))
        and any(_is_linear(layer) for layer in layers)
    )


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether calling a layer does what its class says and no more."""
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
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

    def __init__(self, module: nn.Sequential, loss: Loss) -> None:
        self._module = module
        self._loss = loss
        self._layout = ParameterLayout.of(module)
        self._layerwise = LayerwiseEngine(module, loss)
        names = {
            id(parameter): name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._steps = [_step(layer, names) for layer in _flat(module)]

    def prepare(self, parameters_ND: Tensor, inputs: Tensor) -> None:
        """Look at the model only where the layerwise engine will have to serve these inputs."""
        if not self._is_flat(inputs):
            self._layerwise.prepare(parameters_ND, inputs)

    def pass_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
        see: See | None = None,
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of one pass: (N,
        D)."""
        if not self._is_flat(inputs):
            return self._layerwise.pass_sum(
                parameters_ND, inputs, targets, present_NP, clip_norm, shape, see
            )
        assert pass_slack(shape.rows, shape.chunks) <= SUM_SLACK
        passes = self._passes(self._layout.views(parameters_ND.detach()), inputs, targets, see)
        with torch.no_grad():
            squares_NP = torch.stack([_norm_squared(part) for part in passes]).sum(dim=0)
            if see is not None:
                _show(passes, squares_NP, see)
                return torch.zeros_like(parameters_ND)
            factors_NP = torch.where(present_NP, clip_factors(squares_NP, clip_norm), 0.0)
            return self._contract(passes, factors_NP, shape, torch.empty_like(parameters_ND))

    def slower(self) -> LayerwiseEngine | None:
        """Return an engine that passes fewer rows at a time, one node after the other."""
        return self._layerwise.slower()

    def without_chance(self, public: Tensor) -> LinearStackEngine:
        """Return this engine, or one for the module in eval() mode if it has layers that draw
        masks."""
        if not is_random(self._module, public):
            return self
        return LinearStackEngine(copy.deepcopy(self._module).eval(), self._loss)

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """All places of all nodes are one product."""
        if not self._is_flat(inputs[None]):
            return self._layerwise.checked_places(parameters_ND, inputs, shape)
        return len(parameters_ND), shape.places

    def _is_flat(self, inputs: Tensor) -> bool:
        """Tell whether the first linear layer sees one vector per example (not a sequence of
        vectors)."""
        return inputs.dim() == 3 or isinstance(_flat(self._module)[0], nn.Flatten)

    def _passes(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, see: See | None
    ) -> list[_Pass]:
        """Run all nodes forward, and backward to the outputs of the linear layers (never to the
        weights)."""
        num_nodes, num_places = inputs.shape[:2]
        hidden = inputs.reshape(num_nodes, num_places, -1)
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
                if see is not None:
                    see("the output of a layer", hidden.detach().flatten(0, 1))
            losses = self._loss(hidden.flatten(0, 1), targets.flatten(0, 1))
            check_losses(losses, num_nodes * num_places)
            if see is not None:
                see("the loss", losses.detach())
            deltas = torch.autograd.grad(losses.sum(), outputs)
        linears = [step for step in self._steps if isinstance(step, _Linear)]
        squares = [squared_norms(part) for part in seen]
        return [_Pass(*part) for part in zip(linears, seen, squares, deltas, strict=True)]

    def _contract(
        self, passes: list[_Pass], factors_NP: Tensor, shape: PassShape, total_ND: Tensor
    ) -> Tensor:
        """Write sum_e factor_e g_e into the flat vectors: products over the rows of a chunk, then a
        sum over chunks."""
        totals = self._layout.views(total_ND)
        factors = factors_NP.flatten()
        for linear, inputs_NPI, squares_NP, delta_NPO in passes:
            delta_NCRO = scaled(delta_NPO.flatten(0, 1), factors).view(
                len(delta_NPO), shape.chunks, shape.rows, delta_NPO.shape[2]
            )
            if linear.bias is not None:
                totals[linear.bias].copy_(delta_NCRO.sum(dim=2).sum(dim=1))
            if linear.weight is not None:
                # Their factor is zero already, but 0 x NaN is NaN. The inputs are not needed any
                # more.
                blank_infinite_rows_(inputs_NPI.flatten(0, 1), squares_NP.flatten())
                inputs_NCRI = inputs_NPI.view(*delta_NCRO.shape[:3], -1)
                weight = totals[linear.weight]
                for nodes in slices(len(weight), shape.chunks * weight[0].numel()):
                    _sum_of_products(delta_NCRO[nodes], inputs_NCRI[nodes], weight[nodes])
        return total_ND


def _sum_of_products(delta_NCRO: Tensor, inputs_NCRI: Tensor, total_NOI: Tensor) -> None:
    """Write sum_cr delta a' (N, O, I), in float32 and at most R or C terms at a time."""
    num_nodes, chunks = delta_NCRO.shape[:2]
    products = torch.bmm(delta_NCRO.flatten(0, 1).mT, inputs_NCRI.flatten(0, 1))
    if chunks == 1:
        # Not with `out=`: the rows of a flat vector lie apart, and a product straight into them is
        # slower.
        total_NOI.copy_(products)
    else:
        torch.sum(products.unflatten(0, (num_nodes, chunks)), dim=1, out=total_NOI)


def _norm_squared(part: _Pass) -> Tensor:
    """Return |delta|^2 (|a|^2 + 1) in double precision, frozen parameters left out: (N, P)."""
    has_weight, has_bias = part.linear.weight is not None, part.linear.bias is not None
    return squared_norms(part.delta_NPO) * (part.squares_NP * has_weight + has_bias)


def _show(passes: list[_Pass], squares_NP: Tensor, see: See) -> None:
    """Show what every example contributes: backprops and norm (activations were shown as outputs of
    layers)."""
    for linear, _, _, delta_NPO in passes:
        name = (linear.weight or linear.bias or "a frozen layer").rpartition(".")[0]
        see(f"the loss gradient at the outputs of layer '{name}'", delta_NPO.flatten(0, 1))
    see(NORM, squares_NP.flatten())


def _step(layer: nn.Module, names: dict[int, str]) -> _Linear | nn.Module:
    if not isinstance(layer, nn.Linear):
        return layer
    return _Linear(layer, names.get(id(layer.weight)), names.get(id(layer.bias)))


def _affine(linear: _Linear, parameters: dict[str, Tensor], rows_NBI: Tensor) -> Tensor:
    """Return W a + b for every node; frozen parameters are the module's own, the same for all
    nodes."""
    layer, num_nodes = linear.layer, len(rows_NBI)
    weight = (
        parameters[linear.weight]
        if linear.weight
        else layer.weight.detach().expand(num_nodes, -1, -1)
    )
    if layer.bias is None:
        return rows_NBI @ weight.mT
    bias = parameters[linear.bias] if linear.bias else layer.bias.detach().expand(num_nodes, -1)
    return torch.baddbmm(bias[:, None], rows_NBI, weight.mT)


def _without_inplace(layer: nn.Module) -> nn.Module:
    """Return the layer, or a shallow copy that leaves its input alone: inputs of activations are
    needed afterwards."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        layer.inplace = False  # pyright: ignore[reportArgumentType]
    return layer
