"""What public test data tell about a model before anything is spent: finite outputs, gradients.

Legend: J test rows.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from dpcsgp.config import Config
from dpcsgp.errors import DpcsgpError, ModelError
from dpcsgp.modes import evaluation_mode
from dpcsgp.randomness import torch_seed
from dpcsgp.runs.telling import tell
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.supervised import EVALUATION_BATCH, logits_of

Rows = tuple[Tensor, Tensor]

_ROWS_TRIED: Final = 4000  # whether outputs are finite; of more rows, some from all over
_ROWS: Final = 32  # whose gradients are looked at
_ROWS_OF_LARGE_MODELS: Final = 8
_LARGE_MODEL: Final = 10**6  # parameters
_TOO_SHORT: Final = 20.0  # times below the clip norm
_TOO_LONG: Final = 100.0
_PRACTICALLY_ALL: Final = 0.95


def refuse_unfinite_outputs(module: nn.Module, loss: LossPerExample, test: Rows | None) -> None:
    """Refuse a model whose first outputs or losses on test rows are not finite.

    Outputs of minus infinity, for classes that a model rules out, pass if the loss is finite.
    """
    if test is None:
        return
    probe = copy.deepcopy(module).eval()  # nothing that it keeps may reach the run
    every = math.ceil(len(test[0]) / _ROWS_TRIED)
    some = [part[::every] for part in test]
    outputs_bad, losses_bad = [], []
    with torch_seed(0, "finite outputs"), torch.no_grad():
        for inputs, targets in zip(*(part.split(EVALUATION_BATCH) for part in some), strict=True):
            outputs = probe(inputs.clone())
            outputs_bad.append(_bad_rows(logits_of(outputs), len(inputs)))
            losses = loss(outputs, targets.clone())
            one_each = isinstance(losses, Tensor) and losses.shape == (len(inputs),)
            losses_bad.append(_bad_rows(losses, len(inputs), True) if one_each else outputs_bad[-1])
    for what, found in (("outputs", outputs_bad), ("losses", losses_bad)):
        bad_J = torch.cat(found)
        if bool(bad_J.any()):
            raise ModelError(
                f"model: {what} for {int(bad_J.sum())} of {len(bad_J)} test rows are not finite at "
                f"the start (first: row {every * int(bad_J.nonzero()[0])}); such rows teach "
                "nothing, and nothing can be measured on them. Look for logarithms and roots of "
                "negative numbers, divisions by zero and very large inputs"
            )


def _bad_rows(outputs: Any, count: int, minus_too: bool = False) -> Tensor:
    """Return which rows hold a value that is missing or infinite."""
    bad_J = torch.zeros(count, dtype=torch.bool)
    if isinstance(outputs, Tensor) and outputs.is_floating_point() and len(outputs) == count:
        flat = outputs.reshape(count, -1)
        wrong = ~flat.isfinite() if minus_too else flat.isnan() | (flat == math.inf)
        return wrong.any(1).cpu()
    return bad_J


@final
@dataclass(frozen=True)
class Gradients:
    """How long the gradients of public examples are at the start."""

    median: float
    share_clipped: float  # longer than the clip norm

    @classmethod
    def of(cls, norms_J: Tensor, clip_norm: float) -> Gradients:
        """Hold the lengths against the clip norm."""
        return cls(float(norms_J.median()), float((norms_J > clip_norm).double().mean()))

    def misfit(self, clip_norm: float, rows_per_unit: int = 1) -> str:
        """Say that the clip norm is far off, and what would fit; empty: it is not."""
        median = f"the gradients of public test data have a median length of {self.median:.2g}"
        if 0 < self.median * rows_per_unit < clip_norm / _TOO_SHORT and not self.share_clipped:
            fitting = f"{self.median * rows_per_unit:.1g}"
            times = clip_norm / self.median / rows_per_unit
            return (
                f"privacy.clip_norm = {clip_norm:g} is too large: {median} at the start, so noise "
                f"is {times:.0f} times what they need; set it to {fitting}"
            )
        if self.median > _TOO_LONG * clip_norm and self.share_clipped >= _PRACTICALLY_ALL:
            return (
                f"privacy.clip_norm = {clip_norm:g} is very small: {median} at the start, and all "
                "are clipped to the same length, so examples that are far off count no more than "
                "others; scale inputs and targets to about 1, or set it to "
                f"{float(f'{self.median:.1g}'):g} with a learning rate as much smaller"
            )
        return ""


def warn_about_clip_norm(
    config: Config, module: nn.Module, loss: LossPerExample, test: Rows | None
) -> None:
    """Warn where the gradients of public test rows are far from the clip norm."""
    if test is None:
        return
    clip_norm, rows = config.privacy.clip_norm, max(config.privacy.max_rows_per_unit, 1)
    large = sum(p.numel() for p in module.parameters()) > _LARGE_MODEL
    norms_J = gradient_norms(module, loss, test, _ROWS_OF_LARGE_MODELS if large else _ROWS)
    if text := Gradients.of(norms_J, clip_norm).misfit(clip_norm, rows):
        tell(f"{text} (`dpcsgp.plan(..., test_data=...)` proposes settings)")


def gradient_norms(module: nn.Module, loss: LossPerExample, test: Rows, most: int) -> Tensor:
    """Return the lengths of the gradients of some public examples at the starting point."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    inputs, targets = (part[:most] for part in test)
    norms = []
    with torch_seed(0, "gradient norms"), evaluation_mode(module), torch.enable_grad():
        for row in range(len(inputs)):
            try:
                value = loss(module(inputs[row : row + 1]), targets[row : row + 1]).sum()
            except DpcsgpError:
                raise
            except Exception as error:
                raise ModelError(
                    f"model and loss fail on the first test examples: {error}"
                ) from error
            found = torch.autograd.grad(value, parameters, allow_unused=True)
            norms.append(math.hypot(*(float(part.norm()) for part in found if part is not None)))
    return torch.tensor(norms, dtype=torch.float64)
