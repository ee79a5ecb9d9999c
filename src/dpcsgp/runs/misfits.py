"""Where model, loss and data do not fit: what to write instead.

Torch's own words name types and shapes of its kernels; these name the caller's data.
"""

from __future__ import annotations

import re
from typing import Final

import torch
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.tasks.trees import Packing

# what torch says where a layer of one number format meets another
_OTHER_FORMAT: Final = re.compile(
    r"same dtype|should be the same|expected scalar type|not implemented for '|promote|dtype",
)
_NO_INDEX: Final = re.compile(r"indices.*scalar types|tensors used as indices")


def remedy(inputs: Packing, error: Exception) -> str:
    """Return what to do about an error that comes from the number format of inputs; "" if none."""
    text = str(error)
    if _NO_INDEX.search(text) and any(dtype.is_floating_point for dtype in inputs.dtypes):
        return "; words and other numbers to look up are whole: give them as .long()"
    if not inputs.has_whole_numbers or not _OTHER_FORMAT.search(text):
        return ""
    if torch.uint8 in inputs.dtypes:
        return "; inputs are torch.uint8: give them as .float() / 255, which the layers expect"
    return (
        "; inputs are whole numbers, which only embeddings take: give them as .float(), which the "
        "layers expect"
    )


def check_class_targets(logits: Tensor, targets: Packing) -> None:
    """Refuse targets that cross-entropy cannot take for such outputs, with the way out.

    Args:
        logits: the outputs of one example, (1, classes).
        targets: the form of all targets.
    """
    if logits.dim() != 2:
        return
    (shape, dtype), classes = (targets.shapes[0], targets.dtypes[0]), logits.shape[1]
    given = f'loss = "cross_entropy": targets are {dtype} of shape {shape} per example'
    if classes == 1:
        raise ModelError(
            'loss = "cross_entropy": the model has 1 output, and needs one per class: give it 2 '
            "for labels 0 and 1 (labels -1 and 1 become (labels + 1) // 2), or a loss of your own, "
            "such as binary_cross_entropy_with_logits(..., reduction='none')"
        )
    if dtype.is_floating_point and shape != (classes,):
        raise ModelError(
            f"{given}; give class numbers from 0 to {classes - 1} as whole numbers "
            f'(targets.long(){".squeeze(1)" if shape == (1,) else ""}), or loss="mse" for '
            "numbers that are no classes"
        )
    if not dtype.is_floating_point and shape == (1,):
        raise ModelError(f"{given}; expected one number per example: give targets.squeeze(1)")
    if not dtype.is_floating_point and shape:
        raise ModelError(
            f"{given}; expected one class number per example: give targets.argmax(dim=1) where "
            "they are one-hot, or targets.float() where they are probabilities"
        )
