"""Ask the clipping engine itself: is the clipped sum of a batch that of its examples' gradients?

And is the fast gradient torch's own, parameter by parameter? Probes use public or random examples.

Legend: D coordinates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import SMALLEST_CLIP, Loss, clipping_engine

Pair = tuple[Tensor, Tensor]
Sums = Callable[[Pair, float], Tensor]
_SUM_TOLERANCE: Final = 1e-3
_FEWEST_KEPT: Final = 0.25  # of the clip norm, where ghost norms clip harder
_NO_CLIPPING: Final = 2.0**60


def check_reference(module: nn.Module, loss: Loss, sums: Sums, batch: Pair) -> None:
    """Refuse unless the fast gradient of a batch is torch's own, parameter by parameter.

    `check_sums` then holds norms and clipping against it. A parameter that the fast way forgets
    would never move but by noise, and after noise nobody could tell.
    """
    layout = ParameterLayout.of(module)
    parameters = dict(module.named_parameters())
    with torch.enable_grad():
        total = loss(module(batch[0].clone()), batch[1]).double().sum()
        slow = torch.autograd.grad(
            total, [parameters[name] for name in layout.names], allow_unused=True
        )
    fast = layout.views(sums(batch, _NO_CLIPPING)[None])
    size = sum(_norm(gradient) ** 2 for gradient in slow if gradient is not None) ** 0.5
    differing: list[str] = []
    for name, gradient in zip(layout.names, slow, strict=True):
        expected = torch.zeros_like(fast[name][0]) if gradient is None else gradient
        allowed = _SUM_TOLERANCE * (_norm(expected) + 1e-2 * size) + 1e-30
        # Not finite in both: what such rows do is tried elsewhere.
        if _norm(fast[name][0] - expected) > allowed:
            differing.append(name)
    if differing:
        raise ModelError(
            f"model parameters {', '.join(map(repr, differing))}: the fast gradient differs from "
            "torch's own, so they would be trained wrongly; write the layer that holds them with "
            "plain operations on its parameters, or freeze it with requires_grad_(False)"
        )


def clipped_sums(module: nn.Module, loss: Loss, rows_per_unit: int = 1) -> Sums:
    """Return a function from a batch and a clip norm to the clipped sum of the engine.

    With several rows per unit the batch holds whole units, (K, M, ...).
    """
    models_1D = ParameterLayout.of(module).flatten(module)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is slow; the run says it once
        engine = clipping_engine(module, loss, rows_per_unit=rows_per_unit)

    def clipped_sum(batch: Pair, clip: float) -> Tensor:
        inputs, targets = batch
        present = torch.ones(1, len(inputs), dtype=torch.bool, device=inputs.device)
        filled = present[:, :, None].expand(-1, -1, rows_per_unit) if rows_per_unit > 1 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return engine.clipped_sum(
                models_1D, inputs[None].clone(), targets[None], present, clip, filled_NEM=filled
            )[0]

    return clipped_sum


def check_units(module: nn.Module, loss: Loss, sums: Sums, units: Pair, rows_per_unit: int) -> None:
    """Refuse unless the gradient of a unit is the sum of its rows', clipped as one.

    Args:
        module: the model.
        loss: one value per row.
        sums: of single rows, checked before.
        units: (K, M, ...) inputs and targets.
        rows_per_unit: M.
    """
    of_units = clipped_sums(module, loss, rows_per_unit)
    check_sums(of_units, units)
    rows = units[0].flatten(0, 1), units[1].flatten(0, 1)
    lengths = [
        _norm(of_units((x[None], y[None]), _NO_CLIPPING)) for x, y in zip(*units, strict=True)
    ]
    _refuse_difference(of_units(units, _NO_CLIPPING) - sums(rows, _NO_CLIPPING), sum(lengths))


def check_sums(sums: Sums, batch: Pair, together: int = 1) -> None:
    """Refuse unless the clipped sum of a batch is the sum over its parts of `together` examples.

    That is what bounds an example's influence, whatever layers, hooks, losses and batch sizes do.
    """
    clip, longest = 0.0, 0.0
    whole_D = torch.zeros_like(sums(batch, _NO_CLIPPING), dtype=torch.float64)
    short_D = whole_D.clone()
    for start in range(0, len(batch[0]), together):
        part = batch[0][start : start + together], batch[1][start : start + together]
        gradient_D = sums(part, _NO_CLIPPING)
        length = _norm(gradient_D)
        shorter = max(length / together / 2, SMALLEST_CLIP) if length else 0.0
        clip, longest = clip or shorter, max(longest, length)
        whole_D += gradient_D
        if clip:
            clipped_D = sums(part, clip)
            if together == 1:  # held against the gradient: that tests the clipping as well
                _refuse_wrong_clipping(clipped_D, gradient_D, clip)
            short_D += clipped_D
    _refuse_difference(sums(batch, _NO_CLIPPING) - whole_D, longest * len(batch[0]))
    if clip:
        _refuse_difference(sums(batch, clip) - short_D, clip * len(batch[0]))


def _refuse_wrong_clipping(clipped_D: Tensor, gradient_D: Tensor, clip: float) -> None:
    """Refuse unless one example's clipped gradient is its gradient, shortened to the clip norm.

    Where positions cancel, ghost norms clip a little harder (`ghost_norms`), never less.
    """
    length = _norm(gradient_D)
    wanted, axis_D = min(length, clip), gradient_D.double() / max(length, 1e-30)
    along = float(clipped_D.double() @ axis_D)
    _refuse_difference(clipped_D - along * axis_D, clip)
    if not _FEWEST_KEPT * wanted <= along + 1e-30 or along > wanted * (1 + _SUM_TOLERANCE):
        _refuse_difference(clipped_D - wanted * axis_D, 0.0)


def _norm(vector_D: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector_D, dtype=torch.float64))


def _refuse_difference(difference_D: Tensor, size: float) -> None:
    """Refuse if the whole is not the sum of its parts."""
    if not _norm(difference_D) <= _SUM_TOLERANCE * size + 1e-30:
        raise ModelError(
            "loss or model: the gradient of a batch is not the sum of the gradients of its "
            "examples. Something depends on the other examples or on how many there are (a mean "
            "over the batch, a recurrent layer without batch_first=True), so no example has a "
            "gradient of its own; divide by public constants and treat examples one by one"
        )
