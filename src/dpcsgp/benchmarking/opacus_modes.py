"""One private gradient by Opacus, in each of its modes: the peer that most people know.

Opacus is an optional extra (`pip install "dpcsgp[bench]"`) and is imported here only, when a
benchmark asks for it.

Legend: E examples.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

# (inputs, targets) -> private gradients in .grad of the parameters
Gradient = Callable[[Tensor, Tensor], None]

DEFAULT: Final = "hooks"
# Noise that withstands attacks on floating point, as ours does. Opacus draws it four times over for
# that; its own secure generator, which would cost more, has no build for today's torch, so this is
# torch's.
SECURE: Final = "ghost, secure noise"
MODES: Final = (DEFAULT, "functorch", "ew", "ghost", SECURE)
MISSING: Final = (
    'Opacus is not installed: its rows are left out; install it with: pip install "dpcsgp[bench]"'
)


def is_installed() -> bool:
    """Tell whether Opacus can be imported."""
    return importlib.util.find_spec("opacus") is not None


def private_gradient(
    mode: str, module: nn.Module, batch_size: int, clip_norm: float, noise: float
) -> Gradient:
    """Return what leaves `(clipped sum + noise) / batch size` in a copy's gradients."""
    model = copy.deepcopy(module).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mode in ("ghost", SECURE):
            return _ghost(model, batch_size, clip_norm, noise, secure=mode == SECURE)
        return _sampled(mode, model, batch_size, clip_norm, noise)


def _opacus(module: str) -> Any:
    """Import by name: a type checker must pass where the extra is not installed."""
    return importlib.import_module(f"opacus.{module}")


def _sampled(
    mode: str, model: nn.Module, batch_size: int, clip_norm: float, noise: float
) -> Gradient:
    wrapped: Any = _opacus("grad_sample.utils").wrap_model(
        model, mode, batch_first=True, loss_reduction="mean"
    )
    optimizer = _opacus("optimizers").DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=clip_norm,
        expected_batch_size=batch_size,
    )
    criterion = nn.CrossEntropyLoss()

    return lambda inputs, targets: _once(optimizer, criterion, wrapped, inputs, targets)


def _ghost(
    model: nn.Module, batch_size: int, clip_norm: float, noise: float, *, secure: bool
) -> Gradient:
    wrapped = _opacus("grad_sample").GradSampleModuleFastGradientClipping(
        model,
        batch_first=True,
        loss_reduction="mean",
        max_grad_norm=clip_norm,
        use_ghost_clipping=True,
    )
    optimizer = _opacus(
        "optimizers.optimizer_fast_gradient_clipping"
    ).DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=clip_norm,
        expected_batch_size=batch_size,
        secure_mode=secure,
    )
    loss = _opacus("utils.fast_gradient_clipping_utils").DPLossFastGradientClipping
    criterion: Any = loss(wrapped, optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean")

    return lambda inputs, targets: _once(optimizer, criterion, wrapped, inputs, targets)


def _once(optimizer: Any, criterion: Any, wrapped: Any, inputs: Tensor, targets: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on inputs without gradients, at every call
        optimizer.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimizer.pre_step()
