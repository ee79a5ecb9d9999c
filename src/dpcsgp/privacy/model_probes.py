"""Run a model and its loss before any budget is spent, and refuse what could not be private.

Probes use public examples where there are some (test data), else random ones of the right shapes;
never private data. They compare what will be released with what is promised: rows of a batch are
compared bit for bit among other companions (`row_probes`), copies that saw other data must hold and
compute the same (`memory_probes`), and the clipping engine itself is asked whether the clipped sum
of a batch is the sum of its examples' clipped gradients (`sum_probes`).

Legend: P probe examples, D coordinates.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.modes import training_copy
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.contract import check_losses
from dpcsgp.privacy.clipping.engine import Loss
from dpcsgp.privacy.dead_losses import refuse_dead_loss
from dpcsgp.privacy.memory_probes import check_memory
from dpcsgp.privacy.model_checks import RefuseLowPrecision, label
from dpcsgp.privacy.raise_probes import check_after_exceptions
from dpcsgp.privacy.row_checks import units_of_rows
from dpcsgp.privacy.row_probes import RowDependence, RowProbe, nested, watch_outputs
from dpcsgp.privacy.sum_probes import (
    Pair,
    check_reference,
    check_sums,
    check_units,
    clipped_sums,
)
from dpcsgp.randomness import torch_seed

__all__ = [
    "RowDependence",
    "check_examples_independent",
    "check_gradients_reach",
    "most_rows_summed",
    "row_probe",
]

_NUM_EXAMPLES: Final = 11  # an unlikely length for any other axis
_REMEMBERED: Final = 4  # rows of the batches of which nothing may be kept
# of such batches: what is kept may be one bit, alike in most
_SIZES: Final = (1.0, 1.0, 30.0, -30.0, 30.0, -30.0, 1e-3, -1.0)
_DEAD_ROWS: Final = 128  # more rows, if the first have no gradient
_LADDER: Final = (17, 33, 65, 129, 257, 5, 3, 2)  # just above the likely thresholds
_SUM_SIZES: Final = (17, 65, 257)
# Limits of what is not needed but telling: together a few seconds on one core.
_MOST_WORK: Final = 3e10  # multiplications of the comparisons of rows
_MOST_SUM_WORK: Final = 1e10  # and of the sums
_MOST_VALUES: Final = 2**26  # outputs of layers kept at a time
_MOST_GRADIENTS: Final = 2e8  # examples x coordinates of the sums


def check_examples_independent(
    module: nn.Module,
    example_input: Tensor,
    public: Tensor | None = None,
    batch_sizes: Sequence[int] = (),
) -> tuple[RowDependence, ...]:
    """Refuse a model whose output for one example depends on the others, or that remembers.

    The probe runs in training mode, in batches of P rows, of the sizes given and of others as far
    as they are cheap. Warns about layers whose output is changed in place by the code around them.

    Args:
        module: the model; it is copied, never changed.
        example_input: one example without batch axis; only its shape and dtype are used.
        public: rows to probe with instead of random ones.
        batch_sizes: sizes that the run will use.

    Returns:
        Where one example's values differ in the last place only.

    Raises:
        ModelError: with the layer and what to do.
    """
    probe = training_copy(module)
    first = _probe_batch(example_input, "first", public)
    originals = first.clone()
    _warn_about_in_place(probe, first.clone())
    probe = training_copy(module)
    with torch_seed(0, "model probe masks"), torch.enable_grad(), RefuseLowPrecision():
        probe(first)
    if not torch.equal(first, originals):
        raise ModelError(
            "the model changes its input in place, and with it the data; write `x = x + 1` "
            "instead of `x += 1`"
        )
    example = example_input, example_input.new_zeros(())
    found = _check_rows(
        module, None, example, None if public is None else (public, public), batch_sizes
    )
    check_after_exceptions(module, originals)
    return found


def _check_rows(
    module: nn.Module,
    loss: Loss | None,
    example: Pair,
    public: Pair | None,
    batch_sizes: Sequence[int],
) -> tuple[RowDependence, ...]:
    """Refuse memory, then dependence between rows, at all sizes that can be afforded."""
    batch = partial(_probe_pair, example, public=public)
    settle = batch(_REMEMBERED, "first")
    batches = [
        _resized(batch(_REMEMBERED, f"batch {number}"), size) for number, size in enumerate(_SIZES)
    ]
    check_memory(module, loss, settle, batches, _hostile(settle))
    probe, thorough, sizes = _row_probe(module, loss, batch, batch_sizes)
    probe.compare(_NUM_EXAMPLES, thorough)
    for size in sizes:
        probe.compare(size, thorough=False)
    return probe.found


def _row_probe(
    module: nn.Module,
    loss: Loss | None,
    batch: Callable[[int, str], Pair],
    batch_sizes: Sequence[int],
) -> tuple[RowProbe, bool, list[int]]:
    """Return what compares rows, whether the small batch is tried thoroughly, and other sizes."""
    probed = training_copy(module)
    steady = _deterministic(probed, batch(_NUM_EXAMPLES, "first")[0])
    probe = RowProbe(probed, loss, batch, steady)
    # The small batch always, thoroughly if that is cheap; others as far as the work allows.
    work, values = _work_per_row(steady, batch(2, "first")[0])
    passes = 2 * (3 if loss else 1)  # backward costs twice as much as forward
    thorough = _NUM_EXAMPLES * work * 5 * passes <= _MOST_WORK
    most = _MOST_VALUES // values
    sizes = [size for size in (*batch_sizes, *_LADDER) if size <= most]
    return probe, thorough, _affordable(sizes, _MOST_WORK / (work * passes))


def row_probe(
    module: nn.Module, loss: Loss | None, public: Pair, batch_sizes: Sequence[int]
) -> tuple[Callable[[int], None], int]:
    """Return what compares so many rows, and the most rows that the checks give it: for plans.

    Args:
        module: the model; it is copied, never changed.
        loss: one value per example; None: the model alone is compared.
        public: rows to probe with.
        batch_sizes: sizes that the run will use.
    """
    batch = partial(_probe_pair, (public[0][0], public[1][0]), public=public)
    probe, _, sizes = _row_probe(module, loss, batch, batch_sizes)
    return partial(probe.compare, thorough=False), max((_NUM_EXAMPLES, *sizes))


def most_rows_summed(module: nn.Module, two_rows: Tensor, batch_sizes: Sequence[int]) -> int:
    """Return how many rows the largest of the clipped sums has that are compared at the start."""
    return max((_NUM_EXAMPLES, *_sum_sizes(module, two_rows, batch_sizes)))


def _sum_sizes(module: nn.Module, two_rows: Tensor, batch_sizes: Sequence[int]) -> list[int]:
    room = _MOST_GRADIENTS / ParameterLayout.of(module).dim / 4
    room = min(room, _MOST_SUM_WORK / 12 / _work_per_row(module, two_rows)[0])
    sizes = [size for size in (*batch_sizes, *_SUM_SIZES) if size > _NUM_EXAMPLES]
    return _affordable(sizes, room)


def _hostile(batch: Pair) -> Pair:
    """Return a batch whose rows are infinite, huge, missing and denormal; whole numbers stay."""
    inputs, targets = (part.clone() for part in batch)
    for part in (inputs, targets):
        if part.is_floating_point():
            for row, value in enumerate((float("inf"), 1e30, float("nan"), 1e-40)):
                part[row] = value
    return inputs, targets


def _work_per_row(module: nn.Module, two_rows: Tensor) -> tuple[float, int]:
    """Estimate the multiplications and count the values of all layers, for one row forward."""
    values, work = 2, 2.0

    def count(name: str, layer: nn.Module, output: Any) -> None:
        nonlocal values, work
        weights = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        for part in nested(output):
            channels = part.shape[1 if isinstance(layer, nn.modules.conv._ConvNd) else -1]
            values += part.numel()
            work += 10 * part.numel() + weights * part.numel() / max(channels, 1)

    with torch.no_grad():
        watch_outputs(module, two_rows, list(module.named_modules()), count)
    return work / 2, values // 2


def _affordable(sizes: Sequence[int], rows: float) -> list[int]:
    """Return the batch sizes, first come first served, that have so many rows together."""
    chosen: list[int] = []
    for size in dict.fromkeys(sizes):
        if size > 1 and sum(chosen) + size <= rows:
            chosen.append(size)
    return chosen


def _probe_batch(
    example: Tensor, purpose: str, public: Tensor | None = None, rows: int = _NUM_EXAMPLES
) -> Tensor:
    """Return rows of `public`, or random ones; whole numbers are 0 or 1, in any vocabulary."""
    shape = (rows, *example.shape)
    with torch_seed(0, f"model probe {purpose}"):
        if public is not None:
            return public[torch.randint(len(public), (rows,))].clone()
        if example.is_floating_point() or example.is_complex():
            return torch.randn(shape, dtype=example.dtype).to(example.device)
        return torch.randint(0, 2, shape).to(example.device, example.dtype)


def _warn_about_in_place(module: nn.Module, batch: Tensor) -> None:
    """Warn about outputs of layers that later code writes into, such as `relu_(layer(x))`."""
    seen: list[tuple[str, nn.Module, Tensor, int]] = []

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        if not getattr(layer, "inplace", False):  # `check_model` warns about these
            seen.extend((name, layer, part, part._version) for part in nested(output))

    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    with torch.no_grad():
        watch_outputs(module, batch, layers, keep)
    if any(getattr(layer, "inplace", False) for _, layer in layers):
        return
    changed = dict.fromkeys(
        label(name, layer) for name, layer, part, version in seen if part._version != version
    )
    if changed:
        warnings.warn(
            f"the outputs of {', '.join(changed)} are changed in place in the forward pass: "
            "gradients stay exact, but writing `x = relu(x)` instead of `relu_(x)` is safer and "
            "costs only memory",
            UserWarning,
            stacklevel=3,
        )


def check_gradients_reach(
    module: nn.Module,
    loss: Loss,
    example: Pair,
    public: Pair | None = None,
    batch_sizes: Sequence[int] = (),
    rows_per_unit: int = 1,
) -> tuple[RowDependence, ...]:
    """Refuse trainable parameters that the loss does not reach: they would only collect noise.

    A loss that does not give one value per example, mixes them or remembers them is refused too.

    Args:
        module: the model; it is copied, never changed.
        loss: one value per example.
        example: one (input, target) without batch axis; only shapes and dtypes are used.
        public: rows to probe with instead of random ones.
        batch_sizes: sizes that the run will use.
        rows_per_unit: rows whose gradients are added up and clipped as one.

    Returns:
        Where one example's loss or gradients differ in the last place only.

    Raises:
        ModelError: with the parameter, layer or loss, and what to do.
    """
    inputs, targets = _probe_pair(example, _NUM_EXAMPLES, "input", public)
    _refuse_unreached(module, loss, (inputs, targets))
    more = _probe_pair(example, _DEAD_ROWS, "dead loss", None)
    if public is not None:
        more = public[0][:_DEAD_ROWS], public[1][:_DEAD_ROWS]
    refuse_dead_loss(module, loss, (inputs, targets), more, public=public is not None)
    found = _check_rows(module, loss, example, public, batch_sizes)
    # Last the engine itself, on clipped sums: single examples, then halves of larger batches.
    steady = _deterministic(module, inputs)
    sums = clipped_sums(steady, loss)
    check_reference(steady, loss, sums, (inputs, targets))
    check_sums(sums, (inputs, targets))
    if rows_per_unit > 1:  # the engine that will run adds up rows before it clips
        units = units_of_rows((inputs, targets), rows_per_unit)
        check_units(steady, loss, sums, units, rows_per_unit)
    for size in _sum_sizes(steady, inputs[:2], batch_sizes):
        check_sums(sums, _probe_pair(example, size, "input", public), (size + 1) // 2)
    _run_as_it_trains(module, loss, (inputs, targets), rows_per_unit)
    return found


def _run_as_it_trains(module: nn.Module, loss: Loss, batch: Pair, rows_per_unit: int) -> None:
    """Run the engine once in the model's own mode, masks and all: what fails there is refused."""
    rows = units_of_rows(batch, rows_per_unit)
    sums = clipped_sums(copy.deepcopy(module), loss, rows_per_unit)
    with torch_seed(0, "model probe masks"):
        sums(rows, 1.0)


def _refuse_unreached(module: nn.Module, loss: Loss, batch: Pair) -> None:
    """Refuse a loss without one value per example, and parameters that get no gradient from it."""
    probe = training_copy(module)
    named = [
        (name, parameter) for name, parameter in probe.named_parameters() if parameter.requires_grad
    ]
    with torch_seed(0, "model probe masks"), torch.enable_grad():
        losses = loss(probe(batch[0]), batch[1])
    if not isinstance(losses, Tensor):
        raise ModelError(
            f"loss: expected a tensor with one value per example, got {type(losses).__name__}"
        )
    check_losses(losses, len(batch[0]))
    total = losses.sum()
    if not total.requires_grad:
        raise ModelError(
            "the loss does not depend on the model's parameters; check the forward pass for "
            "detach()"
        )
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
    missing = [
        name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is None
    ]
    if missing:
        raise ModelError(
            f"model parameters {', '.join(repr(name) for name in missing)} get no gradient from "
            "the loss: they would only collect noise; use them in the forward pass or freeze them "
            "with requires_grad_(False)"
        )


def _probe_pair(example: Pair, rows: int, purpose: str, public: Pair | None) -> Pair:
    """Return inputs and targets of the same rows."""
    inputs, targets = (
        _probe_batch(part, purpose, None if public is None else public[kind], rows)
        for kind, part in enumerate(example)
    )
    if public is None and not targets.is_floating_point():
        both = torch.tensor([0, 1], dtype=targets.dtype).view(2, *[1] * (targets.dim() - 1))
        targets[:2] = both[: len(targets)]  # both kinds, always
    return inputs, targets


def _resized(batch: Pair, size: float) -> Pair:
    """Return the rows with inputs of another size, whole numbers as they are."""
    inputs, targets = batch
    return (inputs * size if inputs.is_floating_point() else inputs), targets


def _deterministic(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a copy in train() mode if that repeats itself on the same inputs, else in eval()."""
    copied = training_copy(module)
    traces: list[list[Tensor]] = []
    for purpose in ("one", "other"):
        with torch_seed(0, f"model probe chance {purpose}"), torch.no_grad():
            traces.append([part.detach() for part in nested(copied(inputs))])
    repeats = all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(*traces, strict=True)
    )
    return copied if repeats else copied.eval()
