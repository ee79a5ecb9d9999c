"""Clipped gradient sums of any module: one forward pass, one backward pass to layer outputs, closed forms per layer.

Node after node, the module runs with that node's parameters while every layer that has a closed form records its
input; the backward pass stops at layer outputs and forms no weight gradient. Parameters without closed form (unknown
layers, bare parameters of custom modules, weights used past their own layer) get explicit per-example gradients from
`torch.func`, a few examples at a time, and a warning once.

The module's own mode counts: in `train()` Dropout draws its masks, in `eval()` it does not. Where some parameters are
formed explicitly, their pass draws masks of its own; clipping still acts on the whole vector that is summed.

Legend: N hosted nodes, E examples, M augmented views of an example, D coordinates, P coordinates of one parameter.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.layers import RULES, has_rule
from dpcsgp.privacy.terms import Term, clip_factors, finite, merge, slices, squared_norms

Loss = Callable[[Any, Tensor], Tensor]


class _Call(NamedTuple):
    """One use of a layer in the forward pass."""

    layer: nn.Module
    inputs: Tensor
    version: int
    edge: GradientEdge
    output_length: int


@final
class LayerwiseEngine:
    """Clip per example for any module, from one forward and one backward pass per node."""

    def __init__(self, module: nn.Module, loss: Loss, views: int = 1) -> None:
        self._module = module
        self._loss = loss
        self._views = views
        self._layout = ParameterLayout.of(module)
        self._owned = _owned_parameters(module)
        self._plans: dict[tuple[torch.Size, torch.dtype, bool], frozenset[str]] = {}

    def clipped_sum(
        self, parameters_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor, clip_norm: float
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of every node: (N, D)."""
        total_ND = torch.zeros_like(parameters_ND)
        values, totals = self._layout.views(parameters_ND), self._layout.views(total_ND)
        for node, present_E in enumerate(present_NE):
            examples, labels = inputs[node][present_E], targets[node][present_E]
            if len(examples):
                parameters = {name: value[node].detach() for name, value in values.items()}
                sums = self._node_sums(parameters, examples, labels, clip_norm)
                for name, part in sums.items():
                    totals[name][node].copy_(part.view(totals[name].shape[1:]))
        return total_ND

    def _node_sums(
        self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, clip: float
    ) -> dict[str, Tensor]:
        closed = self._plan(parameters, inputs)
        rest = [name for name in self._layout.names if name not in closed]
        terms = self._terms(parameters, closed, inputs, targets) if closed else {}
        with torch.no_grad():
            norm_squared_E = inputs.new_zeros(len(inputs), dtype=next(iter(parameters.values())).dtype)
            for term in terms.values():
                norm_squared_E += term.norm_squared()
        sums: dict[str, Tensor] = {}
        if rest:
            sums, norm_squared_E = self._explicit_sums(parameters, rest, inputs, targets, norm_squared_E, clip)
        with torch.no_grad():
            factors_E = clip_factors(norm_squared_E, clip)
            while terms:  # each term frees its activations as soon as it is summed
                name, term = terms.popitem()
                sums[name] = term.weighted_sum(factors_E)
        return sums

    def _terms(
        self, parameters: dict[str, Tensor], closed: frozenset[str], inputs: Tensor, targets: Tensor
    ) -> dict[str, Term]:
        """Run the two passes and return the term of every parameter in `closed`."""
        outputs, calls = self._forward(parameters, closed, inputs)
        with torch.enable_grad():
            total = self._losses(outputs, targets, len(inputs)).sum()
        deltas = list(torch.autograd.grad(total, [call.edge for call in calls], allow_unused=True))
        uses: dict[str, list[Term]] = {}
        with torch.no_grad():
            while calls:
                call, delta = calls.pop(), deltas.pop()
                if delta is None:
                    continue
                for attribute, term in RULES[type(call.layer)](call.layer, call.inputs, delta, len(inputs)).items():
                    name = self._owned[call.layer][attribute]
                    if name in closed:
                        uses.setdefault(name, []).append(term)
        return {name: merge(parts, len(inputs), parameters[name].numel()) for name, parts in uses.items()}

    def _forward(self, parameters: dict[str, Tensor], closed: Iterable[str], inputs: Tensor) -> tuple[Any, list[_Call]]:
        """Run the module and record the calls of layers whose parameters are in `closed`."""
        calls: list[_Call] = []

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if output.requires_grad:
                # The edge, unlike the tensor, still means this layer's output after an in-place ReLU.
                value = args[0] if args else kwargs["input"]
                calls.append(_Call(layer, value.detach(), value._version, get_gradient_edge(output), len(output)))

        wanted = frozenset(closed)
        layers = [layer for layer, names in self._owned.items() if wanted.intersection(names.values())]
        handles = [layer.register_forward_hook(record, with_kwargs=True, prepend=True) for layer in layers]
        try:
            with torch.enable_grad():
                # Weights ask for gradients only so that every output has a graph node; none is ever computed.
                leaves = {name: value.requires_grad_() for name, value in parameters.items()}
                outputs = functional_call(self._module, leaves, (self._images(inputs),))
        finally:
            for handle in handles:
                handle.remove()
        return outputs, calls

    def _images(self, inputs: Tensor) -> Tensor:
        return inputs if self._views == 1 else inputs.flatten(0, 1)

    def _losses(self, outputs: Any, targets: Tensor, num_examples: int) -> Tensor:
        """Return the loss of every example, the mean over its views."""
        losses = self._loss(outputs, targets.repeat_interleave(self._views, dim=0) if self._views > 1 else targets)
        check_losses(losses, num_examples * self._views)
        return losses.view(num_examples, self._views).mean(dim=1)

    def _plan(self, parameters: dict[str, Tensor], inputs: Tensor) -> frozenset[str]:
        """Return the parameters whose closed forms are exact, found once per input shape on public zero inputs."""
        key = (inputs.shape[1:], inputs.dtype, self._module.training)
        if key not in self._plans:
            candidates = {name for names in self._owned.values() for name in names.values()}
            for num_examples in (2, 3):  # an axis that follows both sizes is the example axis
                zeros = inputs.new_zeros(num_examples, *inputs.shape[1:])
                outputs, calls = self._forward(parameters, candidates, zeros)
                candidates -= self._foreign(outputs, calls, num_examples * self._views, parameters)
            self._plans[key] = frozenset(candidates)
            _warn_about(self._module, [name for name in self._layout.names if name not in candidates])
        return self._plans[key]

    def _foreign(self, outputs: Any, calls: list[_Call], length: int, parameters: dict[str, Tensor]) -> set[str]:
        """Return parameters that closed forms would get wrong: other first axes, or uses outside their own layers."""
        nodes, uses = _graph(outputs)
        foreign: set[str] = set()
        recorded: Counter[str] = Counter()
        for call in calls:
            names = self._owned[call.layer].values()
            if len(call.inputs) != length or call.output_length != length or call.inputs._version != call.version:
                foreign.update(names)
            if call.edge.node in nodes:
                recorded.update(names)
        return foreign | {name for name, value in parameters.items() if uses[id(value)] != recorded[name]}

    def _explicit_sums(
        self,
        parameters: dict[str, Tensor],
        rest: list[str],
        inputs: Tensor,
        targets: Tensor,
        norm_squared_E: Tensor,
        clip: float,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Form per-example gradients of `rest` in runs of examples; return their clipped sums and the whole norms."""
        fixed = {name: value.detach() for name, value in parameters.items() if name not in rest}
        free = {name: parameters[name].detach() for name in rest}

        def example_loss(free: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
            batch = example[None] if self._views == 1 else example
            outputs = functional_call(self._module, {**fixed, **free}, (batch,))
            return self._losses(outputs, target[None], 1).sum()

        gradients = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")
        sums = {name: torch.zeros_like(value) for name, value in free.items()}
        norms: list[Tensor] = []
        for rows in slices(len(inputs), sum(value.numel() for value in free.values())):
            parts = {
                name: part.flatten(1) for name, part in _batched(gradients, free, inputs[rows], targets[rows]).items()
            }
            whole = [squared_norms(part) for part in parts.values()]
            norms.append(norm_squared_E[rows] + torch.stack(whole).sum(dim=0))
            factors_E = clip_factors(norms[-1], clip)
            for name, part in parts.items():
                sums[name] += (factors_E @ finite(part)).view_as(sums[name])
        return sums, torch.cat(norms)


def _batched(
    gradients: Callable[..., dict[str, Tensor]], free: dict[str, Tensor], inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Return the gradients (E, *shape) of the parameters in `free`, or say which layers cannot be batched."""
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
            parts = gradients(free, inputs, targets)
    except RuntimeError as error:
        names = ", ".join(repr(name) for name in free)
        raise ModelError(
            f"model parameters {names}: their layers have no closed form for per-example gradients and torch.func "
            f"cannot batch them ({error}); replace these layers, or freeze them with requires_grad_(False)"
        ) from error
    return parts


def check_losses(losses: Tensor, num_examples: int) -> None:
    """Refuse a loss that does not give one value per example."""
    if losses.shape != (num_examples,):
        raise ModelError(
            f"loss: expected one value per example, shape ({num_examples},), got {tuple(losses.shape)}; "
            "use reduction='none' and take the mean over all other axes"
        )


def _owned_parameters(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Return layer -> attribute -> parameter name for layers with closed forms; tied weights share one name."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    owned: dict[nn.Module, dict[str, str]] = {}
    for layer in module.modules():
        if has_rule(layer):
            own = {key: names[id(value)] for key, value in layer._parameters.items() if id(value) in names}
            if own:
                owned[layer] = own
    return owned


def _graph(outputs: Any) -> tuple[set[Node], Counter[int]]:
    """Return the nodes of the graph behind the outputs, and how often each leaf (by id) is used in it."""
    stack = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
    nodes: set[Node] = set(stack)
    uses: Counter[int] = Counter()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if hasattr(node, "variable"):
                uses[id(node.variable)] += 1  # pyright: ignore[reportAttributeAccessIssue]
            elif node not in nodes:
                nodes.add(node)
                stack.append(node)
    return nodes, uses


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from (tensor for value in outputs.values() for tensor in _tensors(value))
    elif isinstance(outputs, list | tuple):
        yield from (tensor for value in outputs for tensor in _tensors(value))


def _warn_about(module: nn.Module, names: list[str]) -> None:
    if not names:
        return
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = ", ".join(
        f"{owner or 'the model itself'} ({type(module.get_submodule(owner)).__name__})" for owner in owners
    )
    warnings.warn(
        f"no closed form for per-example gradients of {', '.join(names)} in {layers}: "
        "they are formed explicitly, which is slower and needs more memory",
        UserWarning,
        stacklevel=2,
    )
