"""Ghost clipping of any module: one forward pass, one backward pass to layer outputs.

Node after node and chunk after chunk, the module runs with that node's parameters while every layer
that has a ghost norm records its activations; the backward pass stops at layer outputs (backprops)
and forms no weight gradient. Parameters without ghost norm (unknown layers, bare parameters of
custom modules, weights used past their own layer) get explicit per-example gradients from
`torch.func`, a few examples at a time, and a warning once.

All chunks have the same public number of rows, blank ones included; it follows from the model's
shapes and the places of a pass alone.

The module's own mode counts: in `train()` Dropout draws its masks, in `eval()` it does not. Where
some parameters are formed explicitly, their pass draws masks of its own; clipping still acts on the
whole vector that is summed.

An example may be a unit of several rows, with a target each: the layers see them as further
positions of the example, as they see views, so all ghost norms are those of the unit's summed loss.

Legend: N hosted nodes, P places of a node in a pass, E examples of a chunk, M augmented views of an
example or rows of a unit, D coordinates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpcsgp.errors import ModelError
from dpcsgp.modes import frozen_statistics
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.chunk_plans import MOST_ROWS, ChunkPlan, bytes_kept, rows_that_fit
from dpcsgp.privacy.clipping.contract import NORM, Chunk, Loss, Observer, Pass, check_losses
from dpcsgp.privacy.clipping.ghost_norms import (
    GHOST_SLACK,
    GradSample,
    Workspace,
    clip_factors,
    merge,
    pool,
)
from dpcsgp.privacy.clipping.layer_rules import grad_samples, has_rule
from dpcsgp.privacy.clipping.materialized import ExampleLoss, materialized_sums
from dpcsgp.privacy.clipping.products import linear_layers, weights_left_out
from dpcsgp.privacy.clipping.recording import (
    Forward,
    LayerCall,
    Shared,
    composites_replaced,
    is_random,
    outputs_shown,
    owned_parameters,
    parameter_slots,
    recorded_forward,
    trained_composites,
    warn_of_explicit_gradients,
    wrongly_covered,
)
from dpcsgp.privacy.clipping.recurrent import RECURRENT
from dpcsgp.privacy.clipping.shared_lookups import shared_lookups
from dpcsgp.privacy.passes import SUM_SLACK, PassShape, pass_slack
from dpcsgp.randomness import torch_seed

# rows of the chunks that are summed in float32 before double precision takes over
_GROUPED_ROWS: Final = 256
_MOST_GROUPED: Final = 64
_POOLED: Final = ""  # the name of several parameters together: no parameter has it


class _Node(NamedTuple):
    """What all chunks of a node have in common."""

    parameters: dict[str, Tensor]
    plan: ChunkPlan
    clip_norm: float
    observe: Observer | None


@final
class LayerwiseEngine:
    """Ghost clipping for any module, from one forward and one backward pass per chunk."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        views: int = 1,
        most_rows: int = MOST_ROWS,
        unit: bool = False,
        fit_rows: int | None = None,
    ) -> None:
        self.module: Final = module
        self._loss = loss
        self._views = views
        self._most_rows = most_rows
        self._unit = unit
        self._fit_rows = most_rows if fit_rows is None else fit_rows  # what memory allows for
        self._layout = ParameterLayout.of(module)
        self._owned = owned_parameters(module)
        self._slots = parameter_slots(module)
        self._composites = trained_composites(module, self._owned)
        self._linears = linear_layers(module)
        self._memory = Workspace()
        self._still = frozen_statistics(module)
        self._plans: dict[tuple[torch.Size, torch.dtype, bool], ChunkPlan] = {}

    def slower(self) -> LayerwiseEngine | None:
        """Return an engine that passes fewer rows at a time; None where it is one already."""
        if self._most_rows == 1:
            return None
        return self._like(self.module, 1 if self._most_rows <= 16 else 16)

    def with_most_rows(self, most_rows: int) -> LayerwiseEngine:
        """Return an engine whose chunks have at most so many rows, views and units taken apart."""
        examples = max(1, most_rows // self._views)
        if examples >= self._most_rows:
            return self
        return LayerwiseEngine(
            self.module, self._loss, self._views, self._most_rows, self._unit, examples
        )

    def row_bytes(self, parameters_1D: Tensor, public: Tensor) -> int:
        """Return what one more row keeps in memory from the forward to the backward pass."""
        parameters = self._parameters_of(parameters_1D, 0)
        names = {name for own in self._owned.values() for name in own.values()}

        def run(rows: Tensor) -> list[LayerCall]:
            return self._run(parameters, names, rows, frozenset()).calls

        few, many = (bytes_kept(run, public.new_zeros(n, *public.shape[1:])) for n in (2, 4))
        return max(1, (many - few) // 2)

    def _like(self, module: nn.Module, most_rows: int) -> LayerwiseEngine:
        fit_rows = min(self._fit_rows, most_rows)
        return LayerwiseEngine(module, self._loss, self._views, most_rows, self._unit, fit_rows)

    def deterministic(self, public: Tensor) -> LayerwiseEngine:
        """Return this engine, or one in eval() mode if outputs are random in train() mode."""
        return self.in_eval_mode() if is_random(self.module, public) else self

    def in_eval_mode(self) -> LayerwiseEngine:
        """Return an engine for a copy of the module in eval() mode."""
        return self._like(copy.deepcopy(self.module).eval(), self._most_rows)

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return one chunk of one node: all chunks run alike, in memory of their own."""
        if self._views > 1 and not self._unit:
            inputs = inputs[:, None].expand(-1, self._views, *inputs.shape[1:])
        plan = self._plan(parameters_ND, inputs)
        return 1, plan.rows_for(shape.places)

    def prepare(self, parameters_ND: Tensor, inputs: Tensor) -> None:
        """Find the ghost norms and the rows of a chunk for inputs (N, E, ...) of this shape.

        Raises:
            ModelError: if a layer with frozen statistics was put into train() mode: it mixes rows.
        """
        if any(layer.training for layer in self._still):
            raise ModelError(
                "model: batch normalisation was put into train() mode after the start, where it "
                "mixes examples; keep it in eval() mode"
            )
        self._plan(parameters_ND, inputs[0])

    def pass_sum(self, batch: Pass, observe: Observer | None = None) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples: (N, D).

        In double precision if there are more chunks than float32 may sum.
        """
        plan = self._plan(batch.parameters_ND, batch.inputs[0])
        size = plan.rows_for(batch.shape.places)
        chunks = [slice(start, start + size) for start in range(0, batch.inputs.shape[1], size)]
        # Few enough rows are summed in float32, groups of them in double precision.
        group = min(_MOST_GROUPED, _GROUPED_ROWS // size)
        assert pass_slack(size, group) + GHOST_SLACK <= SUM_SLACK
        precision = torch.float64 if len(chunks) > group else None
        total_ND = torch.empty_like(batch.parameters_ND, dtype=precision)
        for row in range(len(total_ND)):
            parameters = self._parameters_of(batch.parameters_ND, row)
            node = _Node(parameters, plan, batch.clip_norm, observe)
            totals = self._parameters_of(total_ND, row)
            for start in range(0, len(chunks), group):
                some = (Chunk.of(batch, row, rows, size) for rows in chunks[start : start + group])
                sums = self._group_sums(node, some)
                for name, total in totals.items():
                    # a parameter that the loss does not reach has no sum
                    zero = torch.zeros((), device=total.device)
                    part = sums[name].view_as(total) if name in sums else zero
                    total.copy_(part) if start == 0 else total.add_(part)
        return total_ND

    def _parameters_of(self, flat_ND: Tensor, row: int) -> dict[str, Tensor]:
        """Return one node's parameters by name, as views of its flat vector."""
        return self._layout.parts(flat_ND[row].detach())

    def _group_sums(self, node: _Node, chunks: Iterable[Chunk]) -> dict[str, Tensor]:
        """Return each parameter's clipped sum over as many chunks as float32 may sum."""
        sums: dict[str, Tensor] = {}
        for chunk in chunks:
            for name, part in self._chunk_sums(node, chunk).items():
                sums[name] = sums[name].add_(part) if name in sums else part
        return sums

    def _chunk_sums(self, node: _Node, chunk: Chunk) -> dict[str, Tensor]:
        """Return each parameter's clipped sum over the present rows of one chunk."""
        parameters, plan, clip_norm, observe = node
        samples = self._grad_samples(node, chunk) if plan.ghost else {}
        sizes, pooled = pool(samples)
        if pooled is not None:
            samples[_POOLED] = pooled
        # Norms first, over all parameters: one factor per example scales its whole gradient.
        squares_E = torch.zeros(len(chunk.inputs), dtype=torch.float64, device=chunk.inputs.device)
        margins_E = torch.zeros_like(squares_E)
        with torch.no_grad():
            for sample in samples.values():
                squares_E += sample.norm_squared()
                margins_E += sample.margin_squared()
        sums: dict[str, Tensor] = {}
        if plan.explicit:
            free = {name: parameters[name].detach() for name in plan.explicit}
            example_loss = self._example_loss(node)
            sums, squares_E = materialized_sums(
                example_loss, free, chunk, squares_E, margins_E, clip_norm, observe
            )
        with torch.no_grad():
            if observe is not None:
                observe(NORM, torch.stack([squares_E, margins_E], dim=1))
                return {}
            factors_E = clip_factors(squares_E, clip_norm, margins_E)
            factors_E = torch.where(chunk.present_E, factors_E, 0.0)
            while samples:  # each frees its activations as soon as it is summed
                name, sample = samples.popitem()
                sums[name] = sample.weighted_sum(factors_E)
        if pooled is not None:
            parts = sums.pop(_POOLED).split(list(sizes.values()))
            sums.update(zip(sizes, parts, strict=True))
        return sums

    def _grad_samples(self, node: _Node, chunk: Chunk) -> dict[str, GradSample]:
        """Run the two passes; return the per-example gradients of parameters with ghost norms."""
        (parameters, plan, _, observe), num_examples = node, len(chunk.inputs)
        with outputs_shown(self.module, num_examples * self._views, observe):
            forward = self._forward(parameters, plan.ghost, chunk.inputs, plan.shared)
        with torch.enable_grad():
            losses = self._losses(forward.outputs, chunk.targets, num_examples, chunk.filled_EM)
            total = losses.sum()
        if observe is not None:
            observe("the loss", losses.detach())
        # The backward pass ends at layer outputs: no weight gradient is ever formed.
        calls = forward.calls
        edges = [call.edge for call in calls]
        with forward.way_back(), weights_left_out():
            all_backprops = list(torch.autograd.grad(total, edges, allow_unused=True))
        self._memory.reset()  # what the chunk before held there is summed
        if plan.rows < plan.usual_rows:
            self._memory.fewest_rows = plan.usual_rows
        uses: dict[str, list[GradSample]] = {}
        with torch.no_grad():
            while calls:
                call, backprops = calls.pop(), all_backprops.pop()
                if backprops is None:
                    continue
                call = _of_filled_rows(call, chunk.filled_EM)
                owned = call.parameters(self._owned)
                if observe is not None:
                    name = next(iter(owned.values())).rpartition(".")[0]
                    observe(f"the inputs of layer '{name}'", call.activations)
                    observe(f"the loss gradient at the outputs of layer '{name}'", backprops)
                found = grad_samples(
                    call.layer, call.projection, call.activations, backprops, num_examples
                )
                for attribute, sample in found.items():
                    if owned[attribute] in plan.ghost:
                        uses.setdefault(owned[attribute], []).append(sample)
        return {
            name: merge(parts, num_examples, parameters[name].numel(), self._memory)
            for name, parts in uses.items()
        }

    def _forward(
        self, parameters: dict[str, Tensor], wanted: Iterable[str], inputs: Tensor, shared: Shared
    ) -> Forward:
        """Run the module and record the calls of layers that have some of these parameters."""
        rows = inputs if self._views == 1 else inputs.flatten(0, 1)
        return self._run(parameters, wanted, rows, shared)

    def _run(
        self, parameters: dict[str, Tensor], wanted: Iterable[str], rows: Tensor, shared: Shared
    ) -> Forward:
        names = frozenset(wanted)
        layers = [layer for layer, own in self._owned.items() if names.intersection(own.values())]
        return recorded_forward(
            self.module,
            self._slots,
            self._composites,
            self._linears,
            parameters,
            layers,
            rows,
            shared,
        )

    def _losses(
        self, outputs: Any, targets: Tensor, num_examples: int, filled_EM: Tensor | None
    ) -> Tensor:
        """Return the loss of every example: the mean over its views, the sum over a unit's rows."""
        if filled_EM is not None:
            targets = targets.flatten(0, 1)
        elif self._views > 1:
            targets = targets.repeat_interleave(self._views, dim=0)
        losses = self._loss(outputs, targets)
        check_losses(losses, num_examples * self._views)
        by_example = losses.view(num_examples, self._views)
        if filled_EM is None:
            return by_example.mean(dim=1)
        # Rows that are not there: their loss, and so every backprop behind it, is exactly zero.
        return torch.where(filled_EM, by_example, 0.0).sum(dim=1)

    def _example_loss(self, node: _Node) -> ExampleLoss:
        """Return one example's loss as a function of the parameters without ghost norm."""
        explicit = node.plan.explicit
        fixed = {
            name: value.detach() for name, value in node.parameters.items() if name not in explicit
        }

        recurrent = [
            layer
            for layer in self.module.modules()
            if isinstance(layer, RECURRENT) and has_rule(layer)
        ]

        def example_loss(
            free: dict[str, Tensor], example: Tensor, target: Tensor, filled_M: Tensor | None = None
        ) -> Tensor:
            batch = example[None] if self._views == 1 else example
            with composites_replaced(recurrent, None):
                outputs = functional_call(self.module, {**fixed, **free}, (batch,))
            filled_1M = None if filled_M is None else filled_M[None]
            return self._losses(outputs, target[None], 1, filled_1M).sum()

        return example_loss

    def _plan(self, parameters_ND: Tensor, inputs: Tensor) -> ChunkPlan:
        """Return which ghost norms are exact and the rows of a chunk, found on public rows."""
        key = (inputs.shape[1:], inputs.dtype, self.module.training)
        if key not in self._plans:
            parameters = self._parameters_of(parameters_ND, 0)
            exact = {name for names in self._owned.values() for name in names.values()}

            def forward(
                rows: int, shared: Shared, mixed: bool = False
            ) -> tuple[Any, list[LayerCall]]:
                public = inputs.new_zeros(rows // self._views, *inputs.shape[1:])
                if mixed:  # with ones among the zeros, the same in every pass
                    with torch_seed(0, "rows of zeros and ones"):
                        public += torch.randint(0, 2, public.shape).to(public)
                return self._forward(parameters, exact, public, shared)[:2]

            shared = shared_lookups(self.module, forward, self._views)
            calls: list[LayerCall] = []
            for num_examples in (2, 3):  # an axis that follows both sizes is the example axis
                length = num_examples * self._views
                with torch_seed(0, "rows of a chunk"):
                    outputs, calls = forward(length, shared)
                exact -= wrongly_covered(self._owned, parameters, outputs, calls, length)
            explicit = [name for name in self._layout.names if name not in exact]
            usual = rows_that_fit(calls, self._owned, self._views, self._most_rows)
            rows = min(usual, self._fit_rows)
            self._plans[key] = ChunkPlan(frozenset(exact), tuple(explicit), rows, shared, usual)
            warn_of_explicit_gradients(self.module, explicit)
        return self._plans[key]


def _of_filled_rows(call: LayerCall, filled_EM: Tensor | None) -> LayerCall:
    """Return a call without the activations of rows that are not there: they measure nothing."""
    if filled_EM is None or not call.activations.is_floating_point():
        return call
    filled = filled_EM.reshape(-1, *[1] * (call.activations.dim() - 1))
    return call._replace(activations=torch.where(filled, call.activations, 0.0))
