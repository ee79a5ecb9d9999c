"""Ghost norms of convolution kernels, from the layer's activations and backprops.

One form serves Conv1d and Conv2d with any stride, padding, dilation and grouping. The kernel's
per-example gradients are, whichever is cheaper for the layer's shape, either formed in full by one
convolution in which every example is a group of its own, or only measured (the ghost norm) through
Gram matrices between positions: |g_e|^2 = sum_st (patch_es . patch_et) (b_es . b_et), b being the
loss gradients at the outputs (backprops).

Legend: E examples, M augmented views of an example, B = E M images, G channel groups, C channels
in, O channels out, H and W image sides, T = M x output positions, K kernel positions, P = O C K / G
coordinates of the kernel. Reference: Bu, Mao, Xu, "Scalable and efficient training of large
convolutional neural networks with differential privacy" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.clipping.ghost_norms import (
    PASS_COST,
    WRITE_COST,
    GradSample,
    MaterializedGradSample,
    Workspace,
    finite_,
    fits_beside_activations,
    margin,
    may_sum_positions,
    scaled,
    slices,
)
from dpcsgp.privacy.clipping.squares import squared_norms

Pair = tuple[int, int]

# positions of an image up to which products of patches beat a convolution with a group per example
_FEW_POSITIONS: Final = 128


@final
@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over an image; a sequence is an image of height one."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def kernel_gradient(
        self, activations_BCHW: Tensor, backprops_BOHW: Tensor, groups: int
    ) -> Tensor:
        """Return the kernel gradient (O, C / groups, *kernel) summed over the batch."""
        shape = (backprops_BOHW.shape[1], activations_BCHW.shape[1] // groups, *self.kernel)
        # the operator asks for a kernel but uses only its shape here
        unread = backprops_BOHW.new_empty(shape)
        walk = (self.stride, self.padding, self.dilation)
        only_kernel = (False, True, False)  # neither input nor bias gradients
        return torch.ops.aten.convolution_backward(
            backprops_BOHW,
            activations_BCHW,
            unread,
            None,
            *walk,
            False,
            (0, 0),
            groups,
            only_kernel,
        )[1]

    def windows(self, output_sides: Pair) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of the padded image that each kernel position meets."""
        for offset in product(range(self.kernel[0]), range(self.kernel[1])):
            starts = [place * step for place, step in zip(offset, self.dilation, strict=True)]
            rows, columns = (
                slice(start, start + stride * (side - 1) + 1, stride)
                for start, stride, side in zip(starts, self.stride, output_sides, strict=True)
            )
            yield rows, columns


@final
@dataclass(frozen=True)
class ConvolutionGradSample:
    """A kernel too large to hold a gradient per example: ghost norms, or in full, a few at a time.

    The ghost sum over examples and positions is one plain backward convolution.
    """

    activations_BCHW: Tensor
    backprops_BOHW: Tensor
    geometry: Geometry
    num_examples: int

    def norm_squared(self) -> Tensor:
        costs = self._costs()
        if costs.ghost_norm <= costs.materialize:
            runs = slices(self.num_examples, 2 * costs.gram_floats)
            return torch.cat([self._gram(rows, costs.gram_of_image) for rows in runs])
        parts = (self.materialize(rows) for rows in slices(self.num_examples, costs.coordinates))
        return torch.cat([squared_norms(part) for part in parts])

    def margin_squared(self) -> Tensor:
        pixels, outputs = (
            squared_norms(part.reshape(self.num_examples, -1))
            for part in (self.activations_BCHW, self.backprops_BOHW)
        )
        # A pixel is in as many patches as the kernel has places, at most.
        return margin(self.backprops_BOHW) ** 2 * prod(self.geometry.kernel) * pixels * outputs

    def in_best_form(self, memory: Workspace) -> GradSample:
        """Form the gradients if they are small and save work, or rounding forbids ghost sums."""
        costs = self._costs()
        cheap = costs.fits and costs.materialize <= costs.ghost_norm + costs.contraction
        rows = max(self.num_examples, memory.fewest_rows)
        if cheap or not may_sum_positions(rows, costs.positions):
            return MaterializedGradSample(self.materialize(slice(None)))
        return self

    def _costs(self) -> _Costs:
        return _Costs.of(
            self.activations_BCHW, self.backprops_BOHW, self.geometry, self.num_examples
        )

    def _gram(self, rows: slice, whole_image: bool) -> Tensor:
        (up, left), groups = self.geometry.padding, self.geometry.groups
        # In double precision, for positions that cancel (see `LinearGradSample`).
        padded = F.pad(self._images(self.activations_BCHW, rows).double(), (left, left, up, up))
        backprops = _by_group(self._images(self.backprops_BOHW, rows).double(), rows, groups)
        image = _by_group(padded, rows, groups)
        # patch_s . patch_t for all pairs of positions, times b_s . b_t, summed over the pairs
        gram = _gram_of_image if whole_image else _gram_of_windows
        patches = gram(image, self.geometry, (backprops.shape[3], backprops.shape[4]))
        columns = backprops.flatten(2)
        products = patches.mul_((columns.mT @ columns).view_as(patches))
        return products.view(rows.stop - rows.start, -1).sum(dim=1)

    def _images(self, batch: Tensor, rows: slice) -> Tensor:
        """Return the images of some examples, all views of them."""
        views = len(batch) // self.num_examples
        return batch[rows.start * views : rows.stop * views]

    def materialize(self, rows: slice) -> Tensor:
        rows = slice(*rows.indices(self.num_examples))
        count, geometry = rows.stop - rows.start, self.geometry
        if geometry.groups == 1 and prod(self.backprops_BOHW.shape[2:]) <= _FEW_POSITIONS:
            return self._from_patches(rows)
        activations, backprops = (
            _examples_as_groups(self._images(part, rows), rows)
            for part in (self.activations_BCHW, self.backprops_BOHW)
        )
        gradient = geometry.kernel_gradient(activations, backprops, count * geometry.groups)
        return gradient.reshape(count, -1)

    def _from_patches(self, rows: slice) -> Tensor:
        """Return the gradients as products of backprops and patches: faster for few positions."""
        walk, count = self.geometry, rows.stop - rows.start
        images = self._images(self.activations_BCHW, rows)
        patches = F.unfold(images, walk.kernel, walk.dilation, walk.padding, walk.stride)
        backprops = self._images(self.backprops_BOHW, rows).flatten(2)
        # (E M, channels, positions) -> (E, channels, M positions)
        patches, backprops = (
            part.unflatten(0, (count, -1)).transpose(1, 2).flatten(2)
            for part in (patches, backprops)
        )
        return torch.bmm(backprops, patches.mT).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        factors_B = factors_E.repeat_interleave(len(self.activations_BCHW) // self.num_examples)
        backprops = scaled(self.backprops_BOHW, factors_B)
        activations = finite_(self.activations_BCHW)
        return self.geometry.kernel_gradient(activations, backprops, self.geometry.groups).flatten()


def _examples_as_groups(images: Tensor, rows: slice) -> Tensor:
    """Return (E M, C, H, W) as (M, E C, H, W): examples become groups, views are summed over."""
    count = rows.stop - rows.start
    by_view = images.reshape(count, -1, *images.shape[1:]).transpose(0, 1)
    return by_view.reshape(-1, count * images.shape[1], *images.shape[2:])


def _by_group(images: Tensor, rows: slice, groups: int) -> Tensor:
    """Return (E M, C, H, W) as (E G, C / G, M, H, W)."""
    count, (height, width) = rows.stop - rows.start, images.shape[2:]
    split = images.reshape(count, -1, groups, images.shape[1] // groups, height, width)
    return split.permute(0, 2, 3, 1, 4, 5).flatten(0, 1)


def _gram_of_image(image: Tensor, geometry: Geometry, output_sides: Pair) -> Tensor:
    """Return patch_s . patch_t as sums over the kernel of one Gram matrix between all pixels."""
    pixels, sides = image.flatten(2), image.shape[2:]
    gram = (pixels.mT @ pixels).view(-1, *sides, *sides)
    shape = (len(image), sides[0], *output_sides, sides[0], *output_sides)
    total = image.new_zeros(shape)
    for rows, columns in geometry.windows(output_sides):
        total += gram[:, :, rows, columns, :, rows, columns]
    return total


def _gram_of_windows(image: Tensor, geometry: Geometry, output_sides: Pair) -> Tensor:
    """Return patch_s . patch_t as a sum of a Gram matrix per kernel position (cheap if strided)."""
    length = image.shape[2] * prod(output_sides)
    total = image.new_zeros(len(image), length, length)
    for rows, columns in geometry.windows(output_sides):
        window = image[..., rows, columns].flatten(2)
        total.baddbmm_(window.mT, window)
    return total


@final
@dataclass(frozen=True)
class _Costs:
    """Multiplications per example of each way to the norms, memory traffic included.

    `gram_floats` is the scratch of an example's Gram matrices, `contraction` the price of the ghost
    sum, `fits` whether full gradients take little memory.
    """

    coordinates: int
    positions: int
    materialize: int
    ghost_norm: int
    gram_of_image: bool
    gram_floats: int
    contraction: int
    fits: bool

    @classmethod
    def of(
        cls, activations_BCHW: Tensor, backprops_BOHW: Tensor, geometry: Geometry, num_examples: int
    ) -> _Costs:
        channels_in, channels_out = activations_BCHW.shape[1], backprops_BOHW.shape[1]
        views, positions = len(activations_BCHW) // num_examples, prod(geometry.kernel)
        length = views * prod(backprops_BOHW.shape[2:])
        padded = zip(activations_BCHW.shape[2:], geometry.padding, strict=True)
        pixels = views * prod(side + 2 * padding for side, padding in padded)
        coordinates = channels_out * channels_in * positions // geometry.groups
        # two ways to the Gram matrix of patches: once between all pixels, or once per window
        of_image = pixels**2 * channels_in + PASS_COST * geometry.groups * positions * length**2
        of_windows = positions * channels_in * length * (length + PASS_COST)
        between_backprops = length**2 * (channels_out + PASS_COST * geometry.groups)
        stored = (activations_BCHW.numel() + backprops_BOHW.numel()) // num_examples
        return cls(
            coordinates=coordinates,
            positions=length,
            materialize=(length + WRITE_COST) * coordinates,
            ghost_norm=min(of_image, of_windows) + between_backprops,
            gram_of_image=of_image < of_windows,
            gram_floats=geometry.groups
            * ((pixels**2 if of_image < of_windows else 0) + 2 * length**2),
            contraction=length * coordinates,
            fits=fits_beside_activations(coordinates, stored),
        )


def kernel_grad_sample(
    layer: nn.Conv1d | nn.Conv2d, activations: Tensor, backprops: Tensor, num_examples: int
) -> GradSample:
    """Return the kernel's per-example gradients."""
    activations_BCHW, geometry = _as_images(layer, activations)
    backprops_BOHW = backprops if backprops.dim() == 4 else backprops.unsqueeze(2)
    return ConvolutionGradSample(activations_BCHW, backprops_BOHW, geometry, num_examples)


def _as_images(layer: nn.Conv1d | nn.Conv2d, activations: Tensor) -> tuple[Tensor, Geometry]:
    """Return the activations as images, and how the kernel walks over them."""
    # padding that is not plain zeros, equal on both sides, is carried out here
    sides = _padding(layer)
    if layer.padding_mode != "zeros" or any(before != after for before, after in sides):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        widths = [side for pair in reversed(sides) for side in pair]
        activations = F.pad(activations, widths, mode=mode)
        sides = [(0, 0)] * len(sides)
    padding = tuple(before for before, _ in sides)
    walk = (layer.kernel_size, layer.stride, padding, layer.dilation)
    if activations.dim() == 4:
        kernel, stride, padding, dilation = ((sides[0], sides[1]) for sides in walk)
        return activations, Geometry(kernel, stride, padding, dilation, layer.groups)
    # a sequence: height one, nothing to pad there
    kernel, stride, (_, side), dilation = ((1, sides[0]) for sides in walk)
    geometry = Geometry(kernel, stride, (0, side), dilation, layer.groups)
    return activations.unsqueeze(2), geometry


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[Pair]:
    """Return the padding before and after each side; 'same' puts the odd one after."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in layer.padding]
