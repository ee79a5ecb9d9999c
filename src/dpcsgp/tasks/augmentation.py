"""Random views of images (shifted crops, mirror images), made per example before clipping.

Which view an example gets follows from the public seed and from (node, step, the example's own number), never from its
place in the drawn batch. That is what lets the randomness be public: for every value of it, each example's views depend
on that example alone, so adding or removing another example changes nothing but that one's term in the sum, and the
guarantee holds for each value of the seed. Numbered by place instead, one example more in the batch would move all
those after it to other views, and a reader of the seed could tell.

Legend: N hosted nodes, E places for examples, M views of an example, B = N E M images, C channels, H rows, W columns.
Reference: De et al. (2022), arXiv 2204.13650, section 3 (augmentation multiplicity).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpcsgp.errors import ConfigError
from dpcsgp.randomness import PublicRandomness

_DRAWS: Final = 3  # random words per view: rows down, columns right, mirrored or not
_SHIFT: Final = 8  # images are shifted by up to an eighth of their side: 4 pixels for CIFAR-10


def check_augmentation(spec: str, input_shape: Sequence[int]) -> None:
    """Refuse to crop or flip what is not an image."""
    if spec != "none" and len(input_shape) != 3:
        raise ConfigError(
            f"task.augmentation = {spec!r}: expected images (C, H, W), but inputs have the shape {tuple(input_shape)}; "
            'set task.augmentation = "none", or task.features to one that keeps images ("none", "standardize")'
        )


@final
@dataclass(frozen=True)
class Augmentation:
    """Views of the hosted nodes' examples: `spec` is "crop", "flip" or "crop-flip"."""

    spec: str
    views: int
    num_examples: tuple[int, ...]
    random: PublicRandomness

    def __call__(self, inputs: Tensor, indices_NE: Tensor, step: int) -> Tensor:
        """Turn images (N, E, C, H, W) into views (N, E, M, C, H, W), without the axis M if there is one view."""
        draws_NEMK = self._draws(indices_NE, step).to(inputs.device)
        down_B, right_B, mirrored_B = draws_NEMK.flatten(0, 2).unbind(-1)
        height, width = inputs.shape[-2:]
        images = inputs.flatten(0, 1)
        rows_BH = torch.arange(height, device=inputs.device).expand(len(down_B), -1)
        columns_BW = torch.arange(width, device=inputs.device).expand(len(down_B), -1)
        if "flip" in self.spec:
            columns_BW = torch.where(mirrored_B[:, None] % 2 == 1, columns_BW.flip(1), columns_BW)
        if "crop" in self.spec:
            margins = [max(1, side // _SHIFT) for side in (height, width)]
            images = pad(images, (margins[1], margins[1], margins[0], margins[0]))
            rows_BH = rows_BH + (down_B % (2 * margins[0] + 1))[:, None]
            columns_BW = columns_BW + (right_B % (2 * margins[1] + 1))[:, None]
        which_B11 = torch.arange(len(images), device=inputs.device).repeat_interleave(self.views)[:, None, None]
        chosen = images[which_B11, :, rows_BH[:, :, None], columns_BW[:, None, :]].permute(0, 3, 1, 2)  # (B, C, H, W)
        lead = indices_NE.shape if self.views == 1 else (*indices_NE.shape, self.views)
        return chosen.reshape(*lead, *inputs.shape[2:])

    def _draws(self, indices_NE: Tensor, step: int) -> Tensor:
        """Return random words (N, E, M, 3), each node's row drawn for all its examples and looked up by their numbers."""
        rows = []
        for row, total in enumerate(self.num_examples):
            known = max(total, 1)  # a node without data has padding to look up, which may point anywhere
            num_bytes = 2 * known * self.views * _DRAWS
            words = self.random.row_bytes("augmentation", step, row, num_bytes).view(np.uint16).astype(np.int64)
            rows.append(
                torch.from_numpy(words).view(known, self.views, _DRAWS)[indices_NE[row].cpu().clamp(max=known - 1)]
            )
        return torch.stack(rows)
