"""Ghost clipping for stacks of linear layers: all hosted nodes in one batched product per layer.

Layer l maps its activations a_l to z_l = W_l a_l + bias_l; with the backprops b_l, the loss
gradients at z_l, the square of an example's ghost norm is |g|^2 = sum_l |b_l|^2 (|a_l|^2 + 1), and
the clipped sums are b_l' a_l with scaled b_l: no per-example gradient is ever formed.

Legend: N hosted nodes, P places of a node in a pass (C chunks of R rows), D coordinates, I inputs
and O outputs of a layer. Reference: Goodfellow, "Efficient per-example gradient computations"
(2015).
"""

from __future__ import annotations

import copy
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.contract import NORM, Loss, Observer, Pass, check_losses
from dpcsgp.privacy.clipping.ghost_norms import clip_factors, scaled, slices
from dpcsgp.privacy.clipping.layerwise import LayerwiseEngine
from dpcsgp.privacy.clipping.recording import is_random
from dpcsgp.privacy.clipping.squares import blank_infinite_rows_, squared_norms
from dpcsgp.privacy.passes import SUM_SLACK, PassShape, pass_slack

# Layers without parameters that treat every row of a (rows, features) matrix on its own.
_ROWWISE: Final = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SELU,
    nn.CELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid, nn.Tanhshrink, nn.Dropout,
)  # fmt: skip


class _Linear(NamedTuple):
    """A linear layer and the names of its parameters; None for a frozen or missing one."""

    layer: nn.Linear
    weight: str | None
    bias: str | None


class _LayerRecord(NamedTuple):
    """What one linear layer saw; `squares_NP` are |a|^2."""

    linear: _Linear
    activations_NPI: Tensor
    squares_NP: Tensor
    backprops_NPO: Tensor


def is_linear_stack(module: nn.Module) -> bool:
    """Tell whether a module is a sequence of linear layers and row-wise functions.

    Each parameter is used once, and nothing happens but what the types say: a hook, a patched
    forward or a weight computed from others (pruning, weight normalisation) would be passed over
    here.
    """
    if type(module) is not nn.Sequential or not all(_is_plain(layer) for layer in module.modules()):
        return False
    layers = list(_flat(module))
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    rowwise = all(_is_linear(layer) or _is_rowwise(layer) for layer in layers)
    untied = len(parameters) == len(set(parameters))
    return rowwise and untied and any(_is_linear(layer) for layer in layers)


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
    """Ghost clipping for stacks of linear layers, all nodes at once."""

    def __init__(
        self, module: nn.Sequential, loss: Loss, layerwise: LayerwiseEngine | None = None
    ) -> None:
        self._module = module
        self._loss = loss
        self._layout = ParameterLayout.of(module)
        self._layerwise = layerwise or LayerwiseEngine(module, loss)
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

    def pass_sum(self, batch: Pass, observe: Observer | None = None) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples: (N, D)."""
        if not self._is_flat(batch.inputs):
            return self._layerwise.pass_sum(batch, observe)
        assert pass_slack(batch.shape.rows, batch.shape.chunks) <= SUM_SLACK
        records = self._forward_backward(batch, observe)
        with torch.no_grad():
            squares_NP = torch.stack([_norm_squared(record) for record in records]).sum(dim=0)
            if observe is not None:
                _show(records, squares_NP, observe)
                return torch.zeros_like(batch.parameters_ND)
            factors_NP = clip_factors(squares_NP, batch.clip_norm)
            factors_NP = torch.where(batch.present_NP, factors_NP, 0.0)
            return self._weighted_sum(records, factors_NP, batch)

    def slower(self) -> LayerwiseEngine | None:
        """Return an engine that passes fewer rows at a time, one node after the other."""
        return self._layerwise.slower()

    def with_most_rows(self, most_rows: int) -> LinearStackEngine:
        """Return this engine, which runs the places of a pass at once: their number is bounded."""
        layerwise = self._layerwise.with_most_rows(most_rows)
        return LinearStackEngine(self._module, self._loss, layerwise)

    def row_bytes(self, parameters_1D: Tensor, public: Tensor) -> int:
        """Return what one more row keeps in memory from the forward to the backward pass."""
        return self._layerwise.row_bytes(parameters_1D, public)

    def deterministic(self, public: Tensor) -> LinearStackEngine:
        """Return this engine, or one in eval() mode if the module has layers that draw masks."""
        if not is_random(self._module, public):
            return self
        quiet = self._layerwise.in_eval_mode()
        assert isinstance(quiet.module, nn.Sequential)
        return LinearStackEngine(quiet.module, self._loss, quiet)

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """All places of all nodes are one product."""
        if not self._is_flat(inputs[None]):
            return self._layerwise.checked_places(parameters_ND, inputs, shape)
        return len(parameters_ND), shape.places

    def _is_flat(self, inputs: Tensor) -> bool:
        """Tell whether the first linear layer sees one vector per example (not a sequence)."""
        return inputs.dim() == 3 or isinstance(_flat(self._module)[0], nn.Flatten)

    def _forward_backward(self, batch: Pass, observe: Observer | None) -> list[_LayerRecord]:
        """Run all nodes forward, and backward to the outputs of linear layers (not to weights)."""
        parameters = self._layout.views(batch.parameters_ND.detach())
        num_nodes, num_places = batch.inputs.shape[:2]
        hidden = batch.inputs.reshape(num_nodes, num_places, -1)
        activations: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.enable_grad():
            for step in self._steps:
                if isinstance(step, _Linear):
                    activations.append(hidden.detach())
                    hidden = _affine(step, parameters, hidden)
                    # the first layer's output starts the graph: nothing before it is trained
                    outputs.append(hidden if hidden.requires_grad else hidden.requires_grad_())
                else:
                    rows = _without_inplace(step)(hidden.flatten(0, 1))
                    hidden = rows.view(num_nodes, -1, rows.shape[1])
                if observe is not None:
                    observe("the output of a layer", hidden.detach().flatten(0, 1))
            losses = self._loss(hidden.flatten(0, 1), batch.targets.flatten(0, 1))
            check_losses(losses, num_nodes * num_places)
            if observe is not None:
                observe("the loss", losses.detach())
            backprops = torch.autograd.grad(losses.sum(), outputs)
        linears = [step for step in self._steps if isinstance(step, _Linear)]
        squares = [squared_norms(part) for part in activations]
        parts = zip(linears, activations, squares, backprops, strict=True)
        return [_LayerRecord(*part) for part in parts]

    def _weighted_sum(self, records: list[_LayerRecord], factors_NP: Tensor, batch: Pass) -> Tensor:
        """Return sum_e factor_e g_e: products over the rows of a chunk, then a sum over chunks."""
        total_ND, shape = torch.empty_like(batch.parameters_ND), batch.shape
        totals, factors = self._layout.views(total_ND), factors_NP.flatten()
        for linear, activations_NPI, squares_NP, backprops_NPO in records:
            num_nodes, _, height = backprops_NPO.shape
            # chunks short enough for float32: `passes.pass_slack` bounds both sums
            backprops_NCRO = scaled(backprops_NPO.flatten(0, 1), factors).view(
                num_nodes, shape.chunks, shape.rows, height
            )
            if linear.bias is not None:
                totals[linear.bias].copy_(backprops_NCRO.sum(dim=2).sum(dim=1))
            if linear.weight is not None:
                # Rows whose activations are not finite have factor 0 already, but 0 x inf is NaN.
                # Nobody needs the activations after this.
                blank_infinite_rows_(activations_NPI.flatten(0, 1), squares_NP.flatten())
                activations_NCRI = activations_NPI.view(*backprops_NCRO.shape[:3], -1)
                weight = totals[linear.weight]
                for nodes in slices(num_nodes, shape.chunks * weight[0].numel()):
                    _sum_of_products(backprops_NCRO[nodes], activations_NCRI[nodes], weight[nodes])
        return total_ND


def _sum_of_products(backprops_NCRO: Tensor, activations_NCRI: Tensor, total_NOI: Tensor) -> None:
    """Write sum_cr b a' (N, O, I), in float32: sums of R products, then of C chunks."""
    num_nodes, chunks = backprops_NCRO.shape[:2]
    products = torch.bmm(backprops_NCRO.flatten(0, 1).mT, activations_NCRI.flatten(0, 1))
    if chunks == 1:
        # Not with `out=`: the rows of a flat vector lie apart, and a product straight into them
        # is slower.
        total_NOI.copy_(products)
    else:
        torch.sum(products.unflatten(0, (num_nodes, chunks)), dim=1, out=total_NOI)


def _norm_squared(record: _LayerRecord) -> Tensor:
    """Return the squared ghost norm |b|^2 (|a|^2 + 1), frozen parameters left out: (N, P).

    In double precision: a float32 square may be zero or infinite (see `squares`).
    """
    has_weight, has_bias = record.linear.weight is not None, record.linear.bias is not None
    return squared_norms(record.backprops_NPO) * (record.squares_NP * has_weight + has_bias)


def _show(records: list[_LayerRecord], squares_NP: Tensor, observe: Observer) -> None:
    """Show backprops and squared norms of every example (outputs of layers were shown before)."""
    for linear, _, _, backprops_NPO in records:
        name = (linear.weight or linear.bias or "a frozen layer").rpartition(".")[0]
        observe(f"the loss gradient at the outputs of layer '{name}'", backprops_NPO.flatten(0, 1))
    observe(NORM, squares_NP.flatten())


def _step(layer: nn.Module, names: dict[int, str]) -> _Linear | nn.Module:
    if not isinstance(layer, nn.Linear):
        return layer
    return _Linear(layer, names.get(id(layer.weight)), names.get(id(layer.bias)))


def _affine(linear: _Linear, parameters: dict[str, Tensor], activations_NPI: Tensor) -> Tensor:
    """Return W a + bias for every node; frozen parameters are the module's, alike for all nodes."""
    layer, num_nodes = linear.layer, len(activations_NPI)
    if linear.weight:
        weight = parameters[linear.weight]
    else:
        weight = layer.weight.detach().expand(num_nodes, -1, -1)
    if layer.bias is None:
        return activations_NPI @ weight.mT
    bias = parameters[linear.bias] if linear.bias else layer.bias.detach().expand(num_nodes, -1)
    return torch.baddbmm(bias[:, None], activations_NPI, weight.mT)


def _without_inplace(layer: nn.Module) -> nn.Module:
    """Return the layer, or a shallow copy that leaves its input alone: that is needed later."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        layer.inplace = False  # pyright: ignore[reportArgumentType]
    return layer
