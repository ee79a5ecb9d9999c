"""Clipped gradient sums of any module: one forward pass, one backward pass to layer outputs, closed
forms per layer.

Node after node and chunk after chunk, the module runs with that node's parameters while every layer
that has a closed form records its input; the backward pass stops at layer outputs and forms no
weight gradient. Parameters without closed form (unknown layers, bare parameters of custom modules,
weights used past their own layer) get explicit per-example gradients from `torch.func`, a few
examples at a time, and a warning once.

All chunks have the same public number of rows, blank ones included; it follows from the model's
shapes alone.

The module's own mode counts: in `train()` Dropout draws its masks, in `eval()` it does not. Where
some parameters are formed explicitly, their pass draws masks of its own; clipping still acts on the
whole vector that is summed.

Legend: N hosted nodes, P places of a node in a pass, E rows of a chunk, M augmented views of an
example, D coordinates."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.ghost_norms import (
    GHOST_SLACK,
    Term,
    clip_factors,
    finite_,
    may_sum_positions,
    merge,
    slices,
)
from dpcsgp.privacy.clipping.layer_rules import RULES, has_rule, positions
from dpcsgp.privacy.clipping.squares import squared_norms
from dpcsgp.privacy.passes import SUM_SLACK, PassShape, pass_slack
from dpcsgp.randomness import torch_seed

Loss = Callable[[Any, Tensor], Tensor]
See = Callable[[str, Tensor], None]

NORM: Final = "the gradient's norm"  # what is shown last of every chunk
_MOST_ROWS: Final = 64  # of a chunk: more rows gain little speed and cost memory
_GROUPED_ROWS: Final = (
    256  # rows of the chunks that are summed in float32 before double precision takes over
)
_MOST_GROUPED: Final = 64
_KEPT_FLOATS: Final = 2**25  # per-example gradients that may be held at a time


class _Call(NamedTuple):
    """One use of a layer in the forward pass."""

    layer: nn.Module
    inputs: Tensor
    version: int
    edge: GradientEdge
    output_shape: torch.Size


class _Plan(NamedTuple):
    """Which parameters have closed forms for inputs of one shape, and how many rows a chunk has."""

    closed: frozenset[str]
    rows: int


class _Chunk(NamedTuple):
    """The rows that run together; blank ones are not present."""

    inputs: Tensor
    targets: Tensor
    present_E: Tensor

    @classmethod
    def of(cls, parts: tuple[Tensor, Tensor, Tensor], rows: slice, length: int) -> _Chunk:
        """Cut some rows out of a node's inputs, targets and presence, and add blank ones up to the
        length."""
        return cls(*(_filled(part[rows], length) for part in parts))


@final
class LayerwiseEngine:
    """Clip per example for any module, from one forward and one backward pass per node."""

    def __init__(
        self, module: nn.Module, loss: Loss, views: int = 1, most_rows: int = _MOST_ROWS
    ) -> None:
        self._module = module
        self._loss = loss
        self._views = views
        self._most_rows = most_rows
        self._layout = ParameterLayout.of(module)
        self._owned = _owned_parameters(module)
        self._plans: dict[tuple[torch.Size, torch.dtype, bool], _Plan] = {}

    def slower(self) -> LayerwiseEngine | None:
        """Return an engine that passes fewer rows at a time, down to one; None where there are no
        fewer."""
        if self._most_rows == 1:
            return None
        return LayerwiseEngine(
            self._module, self._loss, self._views, 1 if self._most_rows <= 16 else 16
        )

    def without_chance(self, public: Tensor) -> LayerwiseEngine:
        """Return this engine, or one for the module in eval() mode if its outputs are random in
        train() mode."""
        if not is_random(self._module, public):
            return self
        return LayerwiseEngine(
            copy.deepcopy(self._module).eval(), self._loss, self._views, self._most_rows
        )

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """One chunk of one node shows all there is: nodes and chunks follow one another, in memory
        of their own."""
        parameters = {
            name: value[0].detach() for name, value in self._layout.views(parameters_ND).items()
        }
        row = (
            inputs
            if self._views == 1
            else inputs[:, None].expand(-1, self._views, *inputs.shape[1:])
        )
        return 1, self._plan(parameters, row).rows

    def prepare(self, parameters_ND: Tensor, inputs: Tensor) -> None:
        """Find the closed forms and the rows of a chunk for inputs (N, E, ...) of this shape."""
        self._plan(
            {name: value[0].detach() for name, value in self._layout.views(parameters_ND).items()},
            inputs[0],
        )

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
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of one pass: (N, D).

        In double precision if there are more chunks than float32 may sum. The rows of a chunk
        follow from the model, not from `shape`."""
        values = self._layout.views(parameters_ND)
        plan = self._plan({name: value[0].detach() for name, value in values.items()}, inputs[0])
        chunks = list(_chunks(inputs.shape[1], plan.rows))
        group = min(_MOST_GROUPED, _GROUPED_ROWS // plan.rows)
        assert pass_slack(plan.rows, group) + GHOST_SLACK <= SUM_SLACK
        total_ND = torch.empty_like(
            parameters_ND, dtype=torch.float64 if len(chunks) > group else None
        )
        for node in range(len(parameters_ND)):
            parameters = {name: value[node].detach() for name, value in values.items()}
            totals = {
                name: value[0]
                for name, value in self._layout.views(total_ND[node : node + 1]).items()
            }
            for start in range(0, len(chunks), group):
                parts = (inputs[node], targets[node], present_NP[node])
                some = (_Chunk.of(parts, rows, plan.rows) for rows in chunks[start : start + group])
                sums = self._group_sums(parameters, plan, some, clip_norm, see)
                for name, total in totals.items():
                    part = (
                        sums[name].view_as(total)
                        if name in sums
                        else torch.zeros((), device=total.device)
                    )
                    total.copy_(part) if start == 0 else total.add_(part)
        return total_ND

    def _group_sums(
        self,
        parameters: dict[str, Tensor],
        plan: _Plan,
        chunks: Iterable[_Chunk],
        clip: float,
        see: See | None,
    ) -> dict[str, Tensor]:
        """Return each parameter's clipped sum over as many chunks as float32 may sum."""
        sums: dict[str, Tensor] = {}
        for chunk in chunks:
            for name, part in self._chunk_sums(parameters, plan.closed, chunk, clip, see).items():
                sums[name] = sums[name].add_(part) if name in sums else part
        return sums

    def _chunk_sums(
        self,
        parameters: dict[str, Tensor],
        closed: frozenset[str],
        chunk: _Chunk,
        clip: float,
        see: See | None,
    ) -> dict[str, Tensor]:
        """Return each parameter's clipped sum over the present rows of one chunk."""
        inputs, targets, present_E = chunk
        rest = [name for name in self._layout.names if name not in closed]
        terms = self._terms(parameters, closed, inputs, targets, see) if closed else {}
        squares_E = torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)
        loose_E = torch.zeros_like(squares_E)
        with torch.no_grad():
            for term in terms.values():
                squares_E += term.norm_squared()
                loose_E += term.loose_squared()
        sums: dict[str, Tensor] = {}
        if rest:
            sums, squares_E = self._explicit_sums(
                parameters, rest, chunk, squares_E, loose_E, clip, see
            )
        with torch.no_grad():
            if see is not None:
                see(NORM, torch.stack([squares_E, loose_E], dim=1))
                return {}
            factors_E = torch.where(present_E, clip_factors(squares_E, clip, loose_E), 0.0)
            while terms:  # each term frees its activations as soon as it is summed
                name, term = terms.popitem()
                sums[name] = term.weighted_sum(factors_E)
        return sums

    def _terms(
        self,
        parameters: dict[str, Tensor],
        closed: frozenset[str],
        inputs: Tensor,
        targets: Tensor,
        see: See | None,
    ) -> dict[str, Term]:
        """Run the two passes and return the term of every parameter in `closed`."""
        with _outputs_shown(self._module, len(inputs) * self._views, see):
            outputs, calls = self._forward(parameters, closed, inputs)
        with torch.enable_grad():
            losses = self._losses(outputs, targets, len(inputs))
            total = losses.sum()
        if see is not None:
            see("the loss", losses.detach())
        deltas = list(torch.autograd.grad(total, [call.edge for call in calls], allow_unused=True))
        uses: dict[str, list[Term]] = {}
        with torch.no_grad():
            while calls:
                call, delta = calls.pop(), deltas.pop()
                if delta is None:
                    continue
                if see is not None:
                    name = next(iter(self._owned[call.layer].values())).rpartition(".")[0]
                    see(f"the inputs of layer '{name}'", call.inputs)
                    see(f"the loss gradient at the outputs of layer '{name}'", delta)
                for attribute, term in RULES[type(call.layer)](
                    call.layer, call.inputs, delta, len(inputs)
                ).items():
                    name = self._owned[call.layer][attribute]
                    if name in closed:
                        uses.setdefault(name, []).append(term)
        return {
            name: merge(parts, len(inputs), parameters[name].numel())
            for name, parts in uses.items()
        }

    def _forward(
        self, parameters: dict[str, Tensor], closed: Iterable[str], inputs: Tensor
    ) -> tuple[Any, list[_Call]]:
        """Run the module and record the calls of layers whose parameters are in `closed`."""
        calls: list[_Call] = []

        def record(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if output.requires_grad:
                # The edge, unlike the tensor, still means this layer's output after an in-place
                # ReLU.
                value = args[0] if args else kwargs["input"]
                calls.append(
                    _Call(
                        layer,
                        value.detach(),
                        value._version,
                        get_gradient_edge(output),
                        output.shape,
                    )
                )

        wanted = frozenset(closed)
        layers = [
            layer for layer, names in self._owned.items() if wanted.intersection(names.values())
        ]
        handles = [
            layer.register_forward_hook(record, with_kwargs=True, prepend=True) for layer in layers
        ]
        try:
            with torch.enable_grad():
                # Weights ask for gradients only so that every output has a graph node; none is ever
                # computed.
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
        losses = self._loss(
            outputs, targets.repeat_interleave(self._views, dim=0) if self._views > 1 else targets
        )
        check_losses(losses, num_examples * self._views)
        return losses.view(num_examples, self._views).mean(dim=1)

    def _plan(self, parameters: dict[str, Tensor], inputs: Tensor) -> _Plan:
        """Return which closed forms are exact and the rows of a chunk, found once per input shape
        on public zeros."""
        key = (inputs.shape[1:], inputs.dtype, self._module.training)
        if key not in self._plans:
            candidates = {name for names in self._owned.values() for name in names.values()}
            calls: list[_Call] = []
            for num_examples in (2, 3):  # an axis that follows both sizes is the example axis
                zeros = inputs.new_zeros(num_examples, *inputs.shape[1:])
                outputs, calls = self._forward(parameters, candidates, zeros)
                candidates -= self._foreign(outputs, calls, num_examples * self._views, parameters)
            self._plans[key] = _Plan(frozenset(candidates), self._rows(calls))
            _warn_about(
                self._module, [name for name in self._layout.names if name not in candidates]
            )
        return self._plans[key]

    def _rows(self, calls: list[_Call]) -> int:
        """Return the most rows of a chunk whose per-example gradients, where they must be formed,
        fit into memory."""
        lengths: Counter[str] = Counter()
        sizes: dict[str, int] = {}
        for call in calls:
            for attribute, name in self._owned[call.layer].items():
                lengths[name] += self._views * positions(call.layer, call.output_shape)
                sizes[name] = getattr(call.layer, attribute).numel()
        rows = self._most_rows
        while rows > 1:
            formed = sum(
                sizes[name] for name in sizes if not may_sum_positions(rows, lengths[name])
            )
            if rows * formed <= _KEPT_FLOATS:
                return rows
            rows //= 2
        return rows

    def _foreign(
        self, outputs: Any, calls: list[_Call], length: int, parameters: dict[str, Tensor]
    ) -> set[str]:
        """Return parameters that closed forms would get wrong: other first axes, or uses outside
        their own layers."""
        nodes, uses = _graph(outputs)
        foreign: set[str] = set()
        recorded: Counter[str] = Counter()
        for call in calls:
            names = self._owned[call.layer].values()
            if (
                len(call.inputs) != length
                or call.output_shape[0] != length
                or call.inputs._version != call.version
            ):
                foreign.update(names)
            if call.edge.node in nodes:
                recorded.update(names)
        return foreign | {
            name for name, value in parameters.items() if uses[id(value)] != recorded[name]
        }

    def _explicit_sums(
        self,
        parameters: dict[str, Tensor],
        rest: list[str],
        chunk: _Chunk,
        squares_E: Tensor,
        loose_E: Tensor,
        clip: float,
        see: See | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Form per-example gradients of `rest` in runs of rows; return their clipped sums and the
        whole squared norms."""
        inputs, targets, present_E = chunk
        fixed = {name: value.detach() for name, value in parameters.items() if name not in rest}
        free = {name: parameters[name].detach() for name in rest}

        def example_loss(free: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
            batch = example[None] if self._views == 1 else example
            outputs = functional_call(self._module, {**fixed, **free}, (batch,))
            return self._losses(outputs, target[None], 1).sum()

        gradients = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")
        sums = {name: torch.zeros_like(value) for name, value in free.items()}
        norms: list[Tensor] = []
        seen: dict[str, list[Tensor]] = {name: [] for name in rest if see is not None}
        for rows in slices(len(inputs), sum(value.numel() for value in free.values())):
            parts = {
                name: part.flatten(1)
                for name, part in _batched(gradients, free, inputs[rows], targets[rows]).items()
            }
            for name, shown in seen.items():
                shown.append(parts[name].clone())
            norms.append(
                squares_E[rows]
                + torch.stack([squared_norms(part) for part in parts.values()]).sum(dim=0)
            )
            factors_E = torch.where(
                present_E[rows], clip_factors(norms[-1], clip, loose_E[rows]), 0.0
            )
            for name, part in parts.items():
                sums[name] += (factors_E.to(part.dtype) @ finite_(part)).view_as(sums[name])
        for name, shown in seen.items():
            assert see is not None
            see(f"the gradient of '{name}'", torch.cat(shown))
        return sums, torch.cat(norms)


@contextmanager
def _outputs_shown(module: nn.Module, length: int, see: See | None) -> Iterator[None]:
    """Show the outputs of all layers that have a row per example, as they come; the loss might hide
    what differs in them."""
    handles = []
    if see is not None:

        def show(name: str, output: Any) -> None:
            for part in _tensors(output):
                if part.dim() and len(part) == length and part.element_size() in (2, 4, 8):
                    see(
                        f"the output of layer '{name}'" if name else "the output of the model",
                        part.detach(),
                    )

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
    """Tell whether the module gives other outputs for the same inputs (K, ...) when torch's
    generator moves on."""
    if not any(
        isinstance(layer, nn.modules.dropout._DropoutNd) or not _is_builtin(layer)
        for layer in module.modules()
    ):
        return False
    probe, found = copy.deepcopy(module), []
    for purpose in ("one", "other"):
        with torch_seed(0, f"row checks {purpose}"), torch.no_grad():
            found.append([part.detach() for part in _tensors(probe(public))])
    return not all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*found, strict=True)
    )


def _is_builtin(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("torch.nn.modules.")


def _chunks(num_places: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, num_places, rows))


def _filled(part: Tensor, rows: int) -> Tensor:
    """Return the rows of a chunk, blank ones added where the last chunk of a pass is short.

    In memory of their own: kernels also round by how their operands are aligned.
    """
    if len(part) == rows:
        return part.clone()
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def _batched(
    gradients: Callable[..., dict[str, Tensor]],
    free: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> dict[str, Tensor]:
    """Return the gradients (E, *shape) of the parameters in `free`, or say which layers cannot be
    batched."""
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
            parts = gradients(free, inputs, targets)
    except RuntimeError as error:
        names = ", ".join(repr(name) for name in free)
        raise ModelError(
            f"model parameters {names}: their layers have no closed form for per-example "
            "gradients and torch.func "
            f"cannot batch them ({error}); replace these layers, or freeze them with "
            "requires_grad_(False)"
        ) from error
    return parts


def check_losses(losses: Tensor, num_examples: int) -> None:
    """Refuse a loss that does not give one value per example."""
    if losses.shape != (num_examples,):
        raise ModelError(
            f"loss: expected one value per example, shape ({num_examples},), got "
            f"{tuple(losses.shape)}; "
            "use reduction='none' and take the mean over all other axes"
        )


def _owned_parameters(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Return layer -> attribute -> parameter name for layers with closed forms; tied weights share
    one name."""
    names = {
        id(parameter): name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    owned: dict[nn.Module, dict[str, str]] = {}
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


def _graph(outputs: Any) -> tuple[set[Node], Counter[int]]:
    """Return the nodes of the graph behind the outputs, and how often each leaf (by id) is used in
    it."""
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
        f"{owner or 'the model itself'} ({type(module.get_submodule(owner)).__name__})"
        for owner in owners
    )
    warnings.warn(
        f"no closed form for per-example gradients of {', '.join(names)} in {layers}: "
        "they are formed explicitly, which is slower and needs more memory",
        UserWarning,
        stacklevel=2,
    )
