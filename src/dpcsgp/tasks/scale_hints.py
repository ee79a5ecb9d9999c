"""Hints from the public test data: are inputs and targets of a size that private training likes?

Gradients are clipped to one length and drown in noise of a fixed size, so inputs of thousands make
every example look alike, and targets far from the model's first outputs cannot be reached in a few
steps. Private data are never looked at for this.

Legend: J examples.
"""

from __future__ import annotations

import warnings
from typing import Final

from torch import Tensor

_LARGE: Final = 20.0  # of a column's root mean square; digits and standardised columns lie below
_SMALL: Final = 0.3  # of the length of a whole example
_LARGE_TARGET: Final = 10.0


def warn_about_scale(inputs: Tensor, targets: Tensor) -> None:
    """Warn of public inputs that are very large or small, and of large floating-point targets."""
    if inputs.is_floating_point() and inputs.numel():
        _warn_about_inputs(inputs.reshape(len(inputs), -1).double())
    if targets.is_floating_point() and targets.numel():
        size = float(targets.double().square().mean().sqrt())
        if size > _LARGE_TARGET:
            _warn(
                f"test_data: targets are about {size:.3g} in size, and clipped gradients need many "
                "steps to get there; subtract a published mean and divide by a published deviation"
            )


def _warn_about_inputs(inputs_JW: Tensor) -> None:
    columns = inputs_JW.square().mean(0).sqrt()
    largest, column = (float(value) for value in columns.max(0))
    length = float(inputs_JW.square().sum(1).mean().sqrt())
    if largest > _LARGE:
        _warn(
            f"test_data: column {int(column)} of the inputs is about {largest:.3g} in size: it "
            "alone decides the direction of clipped gradients; scale columns to about 1 with "
            "published means and ranges",
            depth=6,
        )
    elif 0 < length < _SMALL:
        _warn(
            f"test_data: whole inputs have a length of about {length:.2g}: their gradients drown "
            "in the noise; scale columns to about 1 with published means and ranges",
            depth=6,
        )


def _warn(text: str, depth: int = 5) -> None:
    warnings.warn(text, stacklevel=depth)  # the line that called `train`
