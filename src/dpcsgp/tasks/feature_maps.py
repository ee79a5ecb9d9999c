"""Public features of an image: maps of one image at a time that look at no other data, so they cost no privacy.

A private linear model on good features beats a private network on pixels, because noise is added to every coordinate:
the fewer a model needs, the better. Two things help a clipped gradient, and the maps below see to both: features have no
large common part (it would use up the clip norm and tell nothing), and all images have the same norm.

Legend: E examples, C channels, H rows and W columns of an image, K channels of the features.
References: Dalal, Triggs (2005), "Histograms of oriented gradients for human detection"; Tramer, Boneh (2021),
arXiv 2011.11660, on hand-made features for private learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad

Shape = tuple[int, int, int]

HOG_NORM: Final = 8.0
_FLOOR: Final = 0.01  # smallest deviation or norm to divide by: a blank image stays near zero


class FeatureMap(Protocol):
    """A map from images (E, C, H, W), uint8 or float32 in [0, 1], to float32 features (E, K, H', W')."""

    @property
    def spec(self) -> str:
        """Canonical spelling, as in a config."""
        ...

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of one image's features."""
        ...

    def apply(self, images: Tensor) -> Tensor:
        """Return the features of each image."""
        ...


@final
@dataclass(frozen=True)
class Pixels:
    """The image itself: bytes divided by 255."""

    spec: str = "none"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of the image."""
        return input_shape

    def apply(self, images: Tensor) -> Tensor:
        """Return values from 0 to 1."""
        return images.to(torch.float32) / 255 if images.dtype == torch.uint8 else images.to(torch.float32)


@final
@dataclass(frozen=True)
class Standardize:
    """Each image with mean zero and standard deviation one: (x - mean(x)) / max(deviation(x), 0.01)."""

    spec: str = "standardize"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of the image."""
        return input_shape

    def apply(self, images: Tensor) -> Tensor:
        """Return standardised pixels, all channels together."""
        pixels = Pixels().apply(images)
        deviation, mean = torch.std_mean(pixels, (1, 2, 3), correction=0, keepdim=True)
        return (pixels - mean) / deviation.clamp_min(_FLOOR)


@final
@dataclass(frozen=True)
class LowFrequencies:
    """The k x k lowest frequencies of the standardised image's orthonormal cosine transform, scaled to norm 2 k sqrt(C)."""

    size: int

    @property
    def spec(self) -> str:
        """Canonical spelling."""
        return f"dct:{self.size}"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return (C, k, k)."""
        return input_shape[0], self.size, self.size

    def apply(self, images: Tensor) -> Tensor:
        """Return R x S^T with the first k cosine rows R, S for the image's height and width."""
        rows, columns = (cosines(self.size, side).to(images.device) for side in images.shape[2:])
        block = rows @ Standardize().apply(images) @ columns.T
        return scale_to_norm(block, 2 * self.size * math.sqrt(images.shape[1]))


def cosines(num_frequencies: int, num_points: int) -> Tensor:
    """Return the first rows of the orthonormal cosine transform (DCT-II), (num_frequencies, num_points)."""
    frequency = torch.arange(num_frequencies, dtype=torch.float32)[:, None]
    point = torch.arange(num_points, dtype=torch.float32) + 0.5
    rows = torch.cos(math.pi * frequency * point / num_points) * math.sqrt(2 / num_points)
    rows[:1] /= math.sqrt(2)
    return rows


def scale_to_norm(features: Tensor, norm: float) -> Tensor:
    """Scale the features of each example (E, ...) to one Euclidean norm; near-zero features stay small."""
    own = features.flatten(1).norm(dim=1).clamp_min(_FLOOR)
    return features * (norm / own).view(-1, *[1] * (features.dim() - 1))


def tents(num_cells: int, num_points: int) -> Tensor:
    """Return (num_cells, num_points): weighted means over overlapping tents, one per cell, each as wide as two cells."""
    width = num_points / num_cells
    centre = (torch.arange(num_cells, dtype=torch.float32)[:, None] + 0.5) * width - 0.5
    weight = (1 - (torch.arange(num_points, dtype=torch.float32) - centre).abs() / width).clamp_min(0)
    return weight / weight.sum(1, keepdim=True)
