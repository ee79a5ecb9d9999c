"""Does the loss teach anything? If no gradient ever differs from zero, only noise would be trained.

Probes use public or random examples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.modes import training_copy
from dpcsgp.privacy.clipping.engine import Loss
from dpcsgp.randomness import torch_seed

Pair = tuple[Tensor, Tensor]


def refuse_dead_loss(module: nn.Module, loss: Loss, few: Pair, more: Pair, *, public: bool) -> None:
    """Refuse a loss whose gradient is zero in all parameters, on all rows tried.

    Single parameters or rows without gradient are usual: behind a head that starts at zero, or
    where a hinge is met.

    Args:
        module: the model; it is copied, never changed.
        loss: one value per example.
        few: rows that are tried first.
        more: rows that are tried if these say nothing.
        public: whether they are real rows, or random ones.
    """
    if _teaches(module, loss, few) or _teaches(module, loss, more):
        return
    rows = f"{len(more[0])} {'test' if public else 'random'} rows"
    remedy = "" if public else ", or give test_data to have it tried on real rows"
    raise ModelError(
        "the loss does not depend on the model's parameters: its gradient is zero on all "
        f"{rows} tried, so that only noise would be trained; check for a constant loss, rounding, "
        f"argmax or comparisons, and for a last layer that is stuck at zero (ReLU){remedy}"
    )


def _teaches(module: nn.Module, loss: Loss, batch: Pair) -> bool:
    """Tell whether some row has a gradient in some parameter; one that is not finite counts."""
    probe = training_copy(module)
    parameters = [parameter for parameter in probe.parameters() if parameter.requires_grad]
    with torch_seed(0, "model probe masks"), torch.enable_grad():
        losses = loss(probe(batch[0].clone()), batch[1].clone())
    # The sum first: it is zero by chance only where rows cancel.
    return any(
        _any_nonzero(torch.autograd.grad(part, parameters, retain_graph=True, allow_unused=True))
        for part in (losses.sum(), *losses)
    )


def _any_nonzero(gradients: tuple[Tensor | None, ...]) -> bool:
    return any(gradient is not None and bool((gradient != 0).any()) for gradient in gradients)
