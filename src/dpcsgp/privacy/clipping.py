"""Sum per-example clipped gradients of all hosted nodes without storing per-example gradients.

Clipping is what makes an example's influence bounded: g_e is scaled by min(1, clip_norm / |g_e|) before it is summed,
so adding or removing one example moves the sum by at most `clip_norm`. An example whose squared gradient norm is not
finite counts as zero, silently and without a branch on the data: to stop or to warn would reveal it.

Legend: N hosted nodes, E places for examples, M augmented views of an example, D coordinates.
Reference: Abadi et al., "Deep learning with differential privacy" (2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.layerwise import LayerwiseEngine, Loss
from dpcsgp.privacy.linear_stack import LinearStackEngine, is_linear_stack
from dpcsgp.privacy.models import check_model

__all__ = ["ClippingEngine", "Loss", "clipping_engine"]


class ClippingEngine(Protocol):
    """Sums per-example clipped gradients of one model and loss."""

    def clipped_sum(
        self, parameters_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor, clip_norm: float
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of every node: (N, D).

        g_e is the gradient of loss(module(x_e), y_e) at the node's parameters, in the order of `ParameterLayout`.
        `inputs` is (N, E, *input shape), or (N, E, M, *input shape) with M > 1 augmented views, over which the loss of
        an example is averaged before clipping; `targets` is (N, E, ...). Places with `present_NE` false are padding
        and contribute exactly zero, whatever they hold. Values of `inputs` that are not finite may be set to zero in place.
        """
        ...


def clipping_engine(module: nn.Module, loss: Loss, views: int = 1) -> ClippingEngine:
    """Choose how to clip for a model: all nodes at once for stacks of linear layers, layer by layer otherwise.

    `loss(outputs, targets)` returns one value per example, as with `reduction="none"`. The module itself is not changed
    and its parameter values are not used, except frozen ones; its mode (`train()` or `eval()`) is. Raises ModelError
    for models that cannot be trained privately.
    """
    check_model(module)
    if views < 1:
        raise ConfigError(f"task.augmentation_multiplicity = {views}: expected at least 1")
    if is_linear_stack(module):
        assert isinstance(module, nn.Sequential)
        return _Checked(LinearStackEngine(module, loss, views), ParameterLayout.of(module), views)
    return _Checked(LayerwiseEngine(module, loss, views), ParameterLayout.of(module), views)


@final
class _Checked:
    """Refuse arguments whose shapes do not fit before any of them is touched."""

    def __init__(self, engine: ClippingEngine, layout: ParameterLayout, views: int) -> None:
        self.engine = engine
        self._layout = layout
        self._views = views

    def clipped_sum(
        self, parameters_ND: Tensor, inputs: Tensor, targets: Tensor, present_NE: Tensor, clip_norm: float
    ) -> Tensor:
        """Check shapes and clip norm, then sum."""
        places = tuple(present_NE.shape)
        if not clip_norm > 0:
            raise ConfigError(f"privacy.clip_norm = {clip_norm}: expected a number above 0")
        if parameters_ND.shape != (places[0], self._layout.dim):
            raise ModelError(
                f"parameters: expected shape {(places[0], self._layout.dim)} for this model and {places[0]} nodes, "
                f"got {tuple(parameters_ND.shape)}"
            )
        lead = places if self._views == 1 else (*places, self._views)
        if inputs.shape[: len(lead)] != lead or targets.shape[:2] != places:
            raise ModelError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: expected leading axes {lead} and "
                f"{places} (nodes, examples{', views' if self._views > 1 else ''})"
            )
        with _full_precision(inputs.device):
            return self.engine.clipped_sum(parameters_ND, inputs, targets, present_NE, clip_norm)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Keep float32: half precision or TF32 would make gradients longer than the norm they were clipped to."""
    kind = device.type if device.type in ("cpu", "cuda") else "cpu"
    with torch.autocast(kind, enabled=False), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        matmul, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = matmul
