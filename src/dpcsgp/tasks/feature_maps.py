"""Public features: maps of one image at a time that look at no other data and cost no privacy.

A private linear model on good features beats a private network on pixels, because noise is added to
every coordinate: the fewer a model needs, the better. Two things help a clipped gradient, and the
maps below see to both: features have no large common part (it would use up the clip norm and tell
nothing), and all images have the same norm.

Legend: E examples, C channels, H rows and W columns of an image, K channels of the features.
References: Dalal, Triggs (2005), "Histograms of oriented gradients for human detection"; Tramer,
Boneh (2021), arXiv 2011.11660, on hand-made features for private learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpcsgp.errors import ConfigError

Shape = tuple[int, int, int]

CHUNK: Final = 250  # images at a time
HOG_NORM: Final = 8.0  # of an image's features
COLOUR_WEIGHT: Final = 0.6  # norm of the colours beside shapes of norm one
_FLOOR: Final = 0.01  # smallest deviation or norm to divide by: a blank image stays near zero


class FeatureMap(Protocol):
    """A map from images (E, C, H, W) to float32 features (E, K, H', W').

    Images are uint8, or float32 from 0 to 1.
    """

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
        pixels = images.to(torch.float32)
        return pixels / 255 if images.dtype == torch.uint8 else pixels


@final
@dataclass(frozen=True)
class Standardize:
    """Each image with mean 0 and standard deviation 1: (x - mean(x)) / max(deviation(x), 0.01)."""

    spec: str = "standardize"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of the image."""
        return input_shape

    def apply(self, images: Tensor) -> Tensor:
        """Return standardised pixels, all channels together."""
        return in_chunks(_standardize, images)


@final
@dataclass(frozen=True)
class LowFrequencies:
    """The k x k lowest frequencies of the standardised image, scaled to norm 2 k sqrt(C).

    Frequencies are those of the orthonormal cosine transform (DCT-II).
    """

    size: int

    @property
    def spec(self) -> str:
        """Canonical spelling."""
        return f"dct:{self.size}"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return (C, k, k)."""
        if self.size > min(input_shape[1:]):
            raise ConfigError(
                f"task.features = {self.spec!r}: images of {input_shape[1]} x {input_shape[2]} "
                f"have fewer frequencies; try 'dct:{min(input_shape[1:])}'"
            )
        return input_shape[0], self.size, self.size

    def apply(self, images: Tensor) -> Tensor:
        """Return R x S^T with the first k cosine rows R, S for the image's height and width."""
        # Refuse images that are too small.
        self.output_shape((images.shape[1], images.shape[2], images.shape[3]))
        # The transform is separable: cosines along the rows, then along the columns.
        rows, columns = (cosines(self.size, side).to(images.device) for side in images.shape[2:])
        norm = 2 * self.size * math.sqrt(images.shape[1])
        return in_chunks(
            lambda chunk: scale_to_norm(rows @ _standardize(chunk) @ columns.T, norm), images
        )


@final
@dataclass(frozen=True)
class OrientedGradients:
    """Histograms of gradient directions in cells of 4 x 4 pixels, scaled to norm 8.

    Sides below 16 pixels have cells of 2. A pixel's gradient length is shared between the two
    nearest of `orientations` directions round the full circle, and between the nearest cells
    (tents). Each cell holds square roots minus their mean over directions. Of a colour image the
    channel with the longest gradient counts, and the colours themselves follow as a small picture.
    """

    orientations: int

    @property
    def spec(self) -> str:
        """Canonical spelling."""
        return f"hog:{self.orientations}"

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return (orientations, cells down, cells across); colours add one channel each."""
        channels, height, width = input_shape
        colours = channels if channels > 1 else 0
        return self.orientations + colours, num_cells(height), num_cells(width)

    def apply(self, images: Tensor) -> Tensor:
        """Return centred square roots of the histograms."""
        return in_chunks(self._of_chunk, images)

    def _of_chunk(self, images: Tensor) -> Tensor:
        # Histograms: votes of the pixels, averaged over each cell by tents down and across.
        pixels = Pixels().apply(images)
        down, across = (tents(num_cells(side), side).to(pixels.device) for side in pixels.shape[2:])
        # Square roots tame strong edges; what all directions share would use up the clip norm.
        roots = (down @ self._votes(pixels) @ across.T).sqrt()
        roots -= roots.mean(1, keepdim=True)
        if pixels.shape[1] == 1:
            return scale_to_norm(roots, HOG_NORM)
        # Colours: the image at the size of the cells. Both parts together have norm HOG_NORM.
        colours = down @ pixels @ across.T
        colours -= colours.mean((1, 2, 3), keepdim=True)
        unit = HOG_NORM / math.hypot(1, COLOUR_WEIGHT)
        return torch.cat(
            [scale_to_norm(roots, unit), scale_to_norm(colours, COLOUR_WEIGHT * unit)], 1
        )

    def _votes(self, pixels: Tensor) -> Tensor:
        """Return (E, orientations, H, W): gradient lengths, shared by the nearest directions."""
        # Central differences; the border pixels are repeated once outside the image.
        framed = pad(pixels, (1, 1, 1, 1), mode="replicate")
        across = framed[:, :, 1:-1, 2:] - framed[:, :, 1:-1, :-2]
        down = framed[:, :, 2:, 1:-1] - framed[:, :, :-2, 1:-1]
        # Of the channels, the one with the longest gradient gives length and angle.
        length, strongest = torch.hypot(across, down).max(1, keepdim=True)
        angle = torch.atan2(down.gather(1, strongest), across.gather(1, strongest))
        # The vote falls linearly to zero at a distance of one direction, round the circle.
        position = angle * (self.orientations / (2 * math.pi))
        direction = torch.arange(self.orientations, device=pixels.device).view(1, -1, 1, 1)
        distance = (position - direction).remainder(self.orientations)
        distance = torch.minimum(distance, self.orientations - distance)
        return length * (1 - distance).clamp_min(0)


def num_cells(side: int) -> int:
    """Return the number of cells along a side: one per 4 pixels, one per 2 for tiny images."""
    return max(1, side // (4 if side >= 16 else 2))


def in_chunks(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Apply a map to 250 images at a time; its temporaries then fit the processor's cache."""
    first = function(images[:CHUNK])
    features = first.new_empty(len(images), *first.shape[1:])
    features[:CHUNK] = first
    for start in range(CHUNK, len(images), CHUNK):
        features[start : start + CHUNK] = function(images[start : start + CHUNK])
    return features


def _standardize(images: Tensor) -> Tensor:
    pixels = Pixels().apply(images)
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    deviation = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
    return centred / deviation.clamp_min(_FLOOR)


def cosines(num_frequencies: int, num_points: int) -> Tensor:
    """Return the first rows of the orthonormal DCT-II, (num_frequencies, num_points).

    rows[f, p] = sqrt(2 / P) cos(pi f (p + 1/2) / P), row 0 divided by sqrt(2), P = num_points.
    """
    frequency = torch.arange(num_frequencies, dtype=torch.float32)[:, None]
    point = torch.arange(num_points, dtype=torch.float32) + 0.5
    rows = torch.cos(math.pi * frequency * point / num_points) * math.sqrt(2 / num_points)
    rows[:1] /= math.sqrt(2)
    return rows


def scale_to_norm(features: Tensor, norm: float) -> Tensor:
    """Scale each example's features (E, ...) to one Euclidean norm; near-zero ones stay small."""
    own = features.flatten(1).norm(dim=1).clamp_min(_FLOOR)
    return features * (norm / own).view(-1, *[1] * (features.dim() - 1))


def tents(num_cells: int, num_points: int) -> Tensor:
    """Return (num_cells, num_points): one tent of weights per cell, two cells wide, of sum 1."""
    width = num_points / num_cells
    centre = (torch.arange(num_cells, dtype=torch.float32)[:, None] + 0.5) * width - 0.5
    point = torch.arange(num_points, dtype=torch.float32)
    weight = (1 - (point - centre).abs() / width).clamp_min(0)
    return weight / weight.sum(1, keepdim=True)
