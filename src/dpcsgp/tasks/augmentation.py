"""Random views of images (shifted crops, mirror images), made per example before clipping.

Which view an example gets comes from the node's private stream. Public views could be keyed by the
example's place in the batch or by its number in the data set, and either way taking one example out
would move others to other views, in a way that a reader of the seed could see. Private ones are
independent draws, whoever takes which place: their law does not change.

Legend: N hosted nodes, E places for examples, M views of an example, B = N E M images, C channels,
H rows, W columns, K = 3 random words.
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
from dpcsgp.randomness import PrivateRandomness

_DRAWS: Final = 3  # random words per view: rows down, columns right, mirrored or not
_SHIFT: Final = 8  # images are shifted by up to an eighth of their side: 4 pixels for CIFAR-10


def check_augmentation(spec: str, input_shape: Sequence[int]) -> None:
    """Refuse to crop or flip what is not an image."""
    if spec != "none" and len(input_shape) != 3:
        raise ConfigError(
            f"task.augmentation = {spec!r}: expected images (C, H, W), but inputs have the shape "
            f'{tuple(input_shape)}; set task.augmentation = "none", or task.features to one that '
            'keeps images ("none", "standardize")'
        )


@final
@dataclass(frozen=True)
class Augmentation:
    """Views of the hosted nodes' examples: `spec` is "crop", "flip" or "crop-flip"."""

    spec: str
    views: int

    def __call__(
        self,
        inputs: Tensor,
        random: PrivateRandomness,
        step: int,
        rows: Sequence[int] | None = None,
        first_place: int = 0,
    ) -> Tensor:
        """Return views (N, E, M, C, H, W) of images (N, E, C, H, W); one view has no axis M.

        Args:
            inputs: Images of the drawn examples; blanks get views too.
            random: Private streams of the hosted nodes.
            step: Gradient step; every step has views of its own.
            rows: Which of the hosted nodes they are of; None: all.
            first_place: Which place of the batch is the first of these.
        """
        # Every view has its own random words, whether the spec uses them or not.
        num_nodes, num_places = inputs.shape[:2]
        stop = first_place + num_places
        draws_NEMK = torch.stack(
            [
                self._draws(stop, random, step, row)[first_place:]
                for row in (range(num_nodes) if rows is None else rows)
            ]
        )
        down_B, right_B, mirrored_B = draws_NEMK.to(inputs.device).flatten(0, 2).unbind(-1)

        # A view is a choice of pixel rows and columns; at first, all of them in order.
        height, width = inputs.shape[-2:]
        images = inputs.flatten(0, 1)
        rows_BH = torch.arange(height, device=inputs.device).expand(len(down_B), -1)
        columns_BW = torch.arange(width, device=inputs.device).expand(len(down_B), -1)

        # Mirror image: columns from right to left, where the random word is odd.
        if "flip" in self.spec:
            columns_BW = torch.where(mirrored_B[:, None] % 2 == 1, columns_BW.flip(1), columns_BW)

        # Shifted crop: a window of the old size in the image with a frame of zeros.
        if "crop" in self.spec:
            margins = [max(1, side // _SHIFT) for side in (height, width)]
            images = pad(images, (margins[1], margins[1], margins[0], margins[0]))
            rows_BH = rows_BH + (down_B % (2 * margins[0] + 1))[:, None]
            columns_BW = columns_BW + (right_B % (2 * margins[1] + 1))[:, None]

        # Pick all pixels at once; advanced indexing puts the channels last.
        which_B = torch.arange(len(images), device=inputs.device).repeat_interleave(self.views)
        views_BHWC = images[which_B[:, None, None], :, rows_BH[:, :, None], columns_BW[:, None, :]]
        views_BCHW = views_BHWC.permute(0, 3, 1, 2)
        lead = (num_nodes, num_places) if self.views == 1 else (num_nodes, num_places, self.views)
        return views_BCHW.reshape(*lead, *inputs.shape[2:])

    def _draws(self, num_places: int, random: PrivateRandomness, step: int, row: int) -> Tensor:
        """Return a node's random words (E, M, 3)."""
        num_bytes = 2 * num_places * self.views * _DRAWS
        words = (
            random.row_bytes("augmentation", step, row, num_bytes).view(np.uint16).astype(np.int64)
        )
        return torch.from_numpy(words).view(num_places, self.views, _DRAWS)
