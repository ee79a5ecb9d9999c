"""Run a module and record what its layers saw: the activations that ghost norms are made of.

A forward hook keeps the inputs of every layer with a ghost norm, and where its output lies in the
graph. Recurrent layers and attention, which are made of linear maps, compute the same function by a
forward of this package instead, which keeps the inputs of every map. The same record tells which
parameters ghost norms would get wrong: a parameter used past its own layer, or a layer whose first
axis is not the examples.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dpcsgp.privacy.clipping.attention import attention_forward
from dpcsgp.privacy.clipping.contract import Observer
from dpcsgp.privacy.clipping.layer_rules import COMPOSITES, has_rule
from dpcsgp.privacy.clipping.products import fast_products
from dpcsgp.privacy.clipping.projections import Projection, Record
from dpcsgp.privacy.clipping.recurrent import RECURRENT, recurrent_forward
from dpcsgp.randomness import torch_seed

Owned = dict[nn.Module, dict[str, str]]  # layer -> attribute -> name of the parameter
Slot = tuple[nn.Module, str, str]  # layer, attribute, name of the parameter
Shared = frozenset[tuple[nn.Module, int]]  # embeddings and which of their calls


class LayerCall(NamedTuple):
    """One use of a layer, or of one linear map inside it, in the forward pass."""

    layer: nn.Module
    activations: Tensor
    version: int
    edge: GradientEdge
    output_shape: torch.Size
    projection: Projection | None = None

    def parameters(self, owned: Owned) -> dict[str, str]:
        """Return attribute -> name of the parameters that this call uses."""
        own, map_ = owned[self.layer], self.projection
        if map_ is None:
            return own
        return {key: name for key, name in own.items() if key in (map_.weight, map_.bias)}


class Forward(NamedTuple):
    """What a forward pass gave, and what the way back needs around it.

    Within `way_back()` the module has the parameters and layers that it was passed with: under
    `torch.utils.checkpoint` activations are computed once more there.
    """

    outputs: Any
    calls: list[LayerCall]
    way_back: Callable[[], AbstractContextManager[None]]


def owned_parameters(module: nn.Module) -> Owned:
    """Return the trainable parameters of layers with ghost norms; tied weights share one name."""
    names = {
        id(parameter): name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    owned: Owned = {}
    for layer in module.modules():
        if has_rule(layer):
            own = {
                key: names[id(value)]
                for key, value in layer._parameters.items()
                if id(value) in names
            }
            if own:
                owned[layer] = own
    return owned


def parameter_slots(module: nn.Module) -> list[Slot]:
    """Return every place that holds a trainable parameter, with the parameter's name."""
    names = {id(value): name for name, value in module.named_parameters() if value.requires_grad}
    return [
        (layer, attribute, names[id(value)])
        for layer in module.modules()
        for attribute, value in layer._parameters.items()
        if id(value) in names
    ]


@contextmanager
def _parameters_replaced(slots: Sequence[Slot], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with other tensors in the place of its trainable parameters.

    What `functional_call` does, without its search through the module at every call.
    """
    before = [
        (layer._parameters, attribute, layer._parameters[attribute])
        for layer, attribute, _ in slots
    ]
    try:
        for layer, attribute, name in slots:
            layer._parameters[attribute] = values[name]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for place, attribute, value in before:
            place[attribute] = value


@final
class _Recorder:
    """Keeps the calls of the layers that are wanted, until the forward pass is over."""

    def __init__(self, wanted: Iterable[nn.Module], shared: Shared, num_rows: int) -> None:
        self.calls: list[LayerCall] = []
        self._wanted, self._shared, self._num_rows = set(wanted), shared, num_rows
        self._seen = Counter[nn.Module]()
        self._passed = False

    def keep(
        self,
        layer: nn.Module,
        activations: Tensor,
        output: Tensor,
        projection: Projection | None = None,
    ) -> None:
        """Keep one call; what a checkpoint computes once more is kept already."""
        if output.requires_grad and layer in self._wanted and not self._passed:
            # The edge, unlike the tensor, still means this layer's output after an in-place ReLU.
            edge, version = get_gradient_edge(output), activations._version
            self.calls.append(
                LayerCall(layer, activations.detach(), version, edge, output.shape, projection)
            )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the calls of a forward pass; composites call `keep` themselves."""
        handles = [
            layer.register_forward_hook(self._hook, with_kwargs=True, prepend=True)
            for layer in self._wanted
            if not isinstance(layer, COMPOSITES)
        ]
        try:
            yield
        finally:
            self._passed = True
            for handle in handles:
                handle.remove()

    def _hook(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        values = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(values) != 1:  # offsets and weights of bags have no closed form
            return None
        self._seen[layer] += 1
        if (layer, self._seen[layer] - 1) not in self._shared:
            self.keep(layer, values[0], output)
            return None
        repeated = _repeated(output, values[0], self._num_rows)
        self.keep(layer, _repeated(values[0], values[0], self._num_rows), repeated)
        return repeated


def recorded_forward(
    module: nn.Module,
    slots: Sequence[Slot],
    composites: Sequence[nn.Module],
    linears: Sequence[nn.Module],
    parameters: Mapping[str, Tensor],
    layers: Iterable[nn.Module],
    inputs: Tensor,
    shared: Shared,
) -> Forward:
    """Run the module with these parameters and record the calls of these layers.

    The outputs of `shared` calls, which serve all rows at once, are repeated for every row.
    `linears` are the layers whose products `products` computes.
    """
    recorder = _Recorder(layers, shared, len(inputs))
    # Weights ask for gradients only so that every output has a graph node; none is ever computed.
    leaves = {name: value.requires_grad_() for name, value in parameters.items()}

    @contextmanager
    def as_passed() -> Iterator[None]:
        with (
            composites_replaced(composites, recorder.keep),
            fast_products(linears),
            _parameters_replaced(slots, leaves),
        ):
            yield

    with torch.enable_grad(), recorder.listening(), as_passed():
        outputs = module(inputs)
    return Forward(outputs, recorder.calls, as_passed)


def _repeated(part: Tensor, words: Tensor, rows: int) -> Tensor:
    """Return what was looked up once for all rows, or its words, with an example axis."""
    return part.expand(rows, *part.shape[1:] if len(words) == 1 else part.shape)


def trained_composites(module: nn.Module, owned: Owned) -> list[nn.Module]:
    """Return the layers, trained at least in part, to be computed by forwards of this package."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, COMPOSITES)
        and has_rule(layer)
        and not owned.keys().isdisjoint(layer.modules())
    ]


@contextmanager
def composites_replaced(layers: Iterable[nn.Module], record: Record | None) -> Iterator[None]:
    """Let recurrent layers and attention compute by forwards of this package, which record.

    Without `record` only recurrent layers, in operations that torch.func can batch.
    """
    kept: list[nn.Module] = []
    fast = torch.backends.mha.get_fastpath_enabled()
    # Torch's own short cut for attention packs rows by their lengths: shapes would be private.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for layer in layers:
            if isinstance(layer, RECURRENT):
                setattr(layer, "forward", partial(recurrent_forward, layer, record))  # noqa: B010
                kept.append(layer)
            elif isinstance(layer, nn.MultiheadAttention) and record is not None:
                setattr(layer, "forward", partial(attention_forward, layer, record))  # noqa: B010
                kept.append(layer)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for layer in kept:
            del layer.forward


def wrongly_covered(
    owned: Owned,
    parameters: Mapping[str, Tensor],
    outputs: Any,
    calls: list[LayerCall],
    length: int,
) -> set[str]:
    """Return parameters whose ghost norms would be wrong, for a batch of `length` rows.

    Their layers see another first axis or activations that were changed in place, or the graph
    uses them more often than their layers were called.
    """
    nodes, uses = _graph(outputs)
    wrong: set[str] = set()
    recorded: Counter[str] = Counter()
    for call in calls:
        names = call.parameters(owned).values()
        by_row = len(call.activations) == length and call.output_shape[0] == length
        if not by_row or call.activations._version != call.version:
            wrong.update(names)
        if call.edge.node in nodes:
            recorded.update(names)
    used = {name: uses[id(value)] for name, value in parameters.items()}
    return wrong | {name for name, count in used.items() if count != recorded[name]}


def _graph(outputs: Any) -> tuple[set[Node], Counter[int]]:
    """Return the nodes of the graph behind the outputs, and how often it uses each leaf (by id)."""
    stack = [tensor.grad_fn for tensor in tensors_of(outputs) if tensor.grad_fn is not None]
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


@contextmanager
def outputs_shown(module: nn.Module, length: int, observe: Observer | None) -> Iterator[None]:
    """Show the outputs of all layers that have a row per example, as they come.

    The loss might hide what differs in them.
    """
    handles = []
    if observe is not None:

        def show(name: str, output: Any) -> None:
            title = f"the output of layer '{name}'" if name else "the output of the model"
            for part in tensors_of(output):
                if part.dim() and len(part) == length and part.element_size() in (2, 4, 8):
                    observe(title, part.detach())

        for name, layer in module.named_modules():
            handles.append(
                layer.register_forward_hook(lambda _layer, _args, out, name=name: show(name, out))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_random(module: nn.Module, public: Tensor) -> bool:
    """Tell whether outputs for the same inputs (K, ...) change when torch's generator moves on."""
    if not any(_may_be_random(layer) for layer in module.modules()):
        return False
    probe, found = copy.deepcopy(module), []
    for purpose in ("one", "other"):
        with torch_seed(0, f"row checks {purpose}"), torch.no_grad():
            found.append([part.detach() for part in tensors_of(probe(public))])
    return not all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*found, strict=True)
    )


def _may_be_random(layer: nn.Module) -> bool:
    builtin = type(layer).__module__.startswith("torch.nn.modules.")
    # recurrent layers and attention keep their rate of Dropout as a number
    drops = isinstance(layer, nn.modules.dropout._DropoutNd) or bool(getattr(layer, "dropout", 0))
    return drops or not builtin


def tensors_of(outputs: Any) -> Iterator[Tensor]:
    """Yield all tensors of a nested output."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from (tensor for value in outputs.values() for tensor in tensors_of(value))
    elif isinstance(outputs, list | tuple):
        yield from (tensor for value in outputs for tensor in tensors_of(value))


def warn_of_explicit_gradients(module: nn.Module, names: list[str]) -> None:
    """Warn, once per input shape, of parameters that have no ghost norm."""
    if not names:
        return
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = ", ".join(
        f"{owner or 'the model itself'} ({type(module.get_submodule(owner)).__name__})"
        for owner in owners
    )
    warnings.warn(
        f"no closed form for per-example gradients of {', '.join(names)} in {layers}: "
        "they are formed explicitly, which is slower and needs more memory",
        UserWarning,
        stacklevel=2,
    )
