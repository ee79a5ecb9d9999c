"""Refuse models in which an exception leaves something behind.

A row on which the model raises counts as zero, and nobody is told (`clipping/engine.py`). That
holds only if the passes after it compute what they would have computed without it: a list that is
emptied at the end of `forward` still holds that row, and the next pass would read it. So an
exception is planted in every layer in turn, on public or random rows, and the next batch has to be
what it is in a fresh copy, to the bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.modes import training_copy
from dpcsgp.privacy.memory_probes import same_bits, tensors
from dpcsgp.privacy.model_checks import label
from dpcsgp.randomness import torch_seed

_ROWS: Final = 2  # of a batch: values do not matter here


class _Planted(Exception):
    """Raised inside of a layer by this check."""


def check_after_exceptions(module: nn.Module, inputs: Tensor) -> None:
    """Refuse a model that computes something else after a batch on which it raised.

    Args:
        module: the model; it is copied.
        inputs: some public or random rows.

    Raises:
        ModelError: with the layer in which an exception was planted.
    """
    inputs = inputs[:_ROWS]
    fresh, probe = _run(training_copy(module), inputs), training_copy(module)
    if not _equal(fresh, _run(training_copy(module), inputs)):
        return  # a device that adds in any order: the row check refuses it, if it matters
    for name, layer in list(probe.named_modules()):
        if next(layer.children(), None) is not None:
            continue
        # Before the layer and behind it: there the code around it may raise.
        for before in (True, False):
            hook = layer.register_forward_pre_hook if before else layer.register_forward_hook
            handle = hook(_raise)
            try:
                _run(probe, inputs.flip(0))
            except _Planted:
                pass
            finally:
                handle.remove()
            if not _equal(fresh, _run(probe, inputs)):
                raise ModelError(
                    f"model layer {label(name, layer)}: after an exception there, the next batch "
                    "gives other values, so something of the batch that raised is kept, and it "
                    "would carry private data past the noise; keep nothing between calls of "
                    "forward, and clear what it collects at the beginning, too"
                )


def _raise(*_: Any) -> None:
    raise _Planted


def _run(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    with torch_seed(0, "model probe masks"), torch.no_grad():
        return tensors(module(inputs.clone()))


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))
