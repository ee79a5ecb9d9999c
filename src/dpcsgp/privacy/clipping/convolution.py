"""Per-example gradients of convolution kernels, from the layer's inputs and the loss gradient at
its outputs.

One form serves Conv1d and Conv2d with any stride, padding, dilation and grouping. The kernel's
per-example gradients are, whichever is cheaper for the layer's shape, either formed in full by one
convolution in which every example is a group of its own, or only measured through Gram matrices
between positions:
|g_e|^2 = sum_st (patch_es . patch_et) (delta_es . delta_et).

Legend: E examples, M augmented views of an example, B = E M images, G channel groups, C channels
in, O channels out, H and W image sides, T = M x output positions, K kernel positions, P = O C K / G
coordinates of the kernel."""

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
    ExplicitTerm,
    Term,
    finite_,
    margin,
    may_sum_positions,
    scaled,
    slices,
    worth_keeping,
)
from dpcsgp.privacy.clipping.squares import squared_norms

Pair = tuple[int, int]

_FEW_POSITIONS: Final = (
    128  # of an image, up to which products of patches beat a convolution with a group per example
)


@final
@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over an image; a sequence is an image of height one."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def kernel_gradient(self, inputs_BCHW: Tensor, delta_BOHW: Tensor, groups: int) -> Tensor:
        """Return the kernel gradient (O, C / groups, *kernel) summed over the batch."""
        shape = (delta_BOHW.shape[1], inputs_BCHW.shape[1] // groups, *self.kernel)
        # the operator asks for a kernel but uses only its shape here
        unread = delta_BOHW.new_empty(shape)
        stride, padding, dilation, mask = (
            self.stride,
            self.padding,
            self.dilation,
            (False, True, False),
        )
        return torch.ops.aten.convolution_backward(
            delta_BOHW,
            inputs_BCHW,
            unread,
            None,
            stride,
            padding,
            dilation,
            False,
            (0, 0),
            groups,
            mask,
        )[1]

    def windows(self, output_sides: Pair) -> Iterator[tuple[slice, slice]]:
        """Yield, for every kernel position, the rows and columns of the padded image that it
        meets."""
        for offset in product(range(self.kernel[0]), range(self.kernel[1])):
            starts = [
                place * dilation for place, dilation in zip(offset, self.dilation, strict=True)
            ]
            rows, columns = (
                slice(start, start + stride * (side - 1) + 1, stride)
                for start, stride, side in zip(starts, self.stride, output_sides, strict=True)
            )
            yield rows, columns


@final
@dataclass(frozen=True)
class ConvolutionTerm:
    """A kernel too large to hold one gradient per example: norms by Gram matrices or in full, a few
    at a time."""

    inputs_BCHW: Tensor
    delta_BOHW: Tensor
    geometry: Geometry
    num_examples: int

    def norm_squared(self) -> Tensor:
        costs = self._costs()
        if costs.gram <= costs.explicit:
            runs = slices(self.num_examples, 2 * costs.gram_floats)
            return torch.cat([self._gram(rows, costs.gram_of_image) for rows in runs])
        parts = (self.explicit(rows) for rows in slices(self.num_examples, costs.coordinates))
        return torch.cat([squared_norms(part) for part in parts])

    def loose_squared(self) -> Tensor:
        # A pixel is in as many patches as the kernel has places, at most.
        pixels, deltas = (
            squared_norms(b.reshape(self.num_examples, -1))
            for b in (self.inputs_BCHW, self.delta_BOHW)
        )
        return margin(self.delta_BOHW) ** 2 * prod(self.geometry.kernel) * pixels * deltas

    def settled(self) -> Term:
        """Form the kernel gradients if they take little memory and save work, or if rounding
        forbids the ghost form."""
        costs = self._costs()
        cheap = costs.keep and costs.explicit <= costs.gram + costs.contraction
        if cheap or not may_sum_positions(self.num_examples, costs.positions):
            return ExplicitTerm(self.explicit(slice(None)))
        return self

    def _costs(self) -> _Costs:
        return _Costs.of(self.inputs_BCHW, self.delta_BOHW, self.geometry, self.num_examples)

    def _gram(self, rows: slice, whole_image: bool) -> Tensor:
        (up, left), groups = self.geometry.padding, self.geometry.groups
        # In double precision, for terms that cancel (see `OuterTerm`).
        padded = F.pad(self._images(self.inputs_BCHW, rows).double(), (left, left, up, up))
        delta = _by_group(self._images(self.delta_BOHW, rows).double(), rows, groups)
        image = _by_group(padded, rows, groups)
        output_sides = (delta.shape[3], delta.shape[4])
        patches = (_gram_of_image if whole_image else _gram_of_windows)(
            image, self.geometry, output_sides
        )
        columns = delta.flatten(2)
        products = patches.mul_((columns.mT @ columns).view_as(patches))
        return products.view(rows.stop - rows.start, -1).sum(dim=1)

    def _images(self, batch: Tensor, rows: slice) -> Tensor:
        views = len(batch) // self.num_examples
        return batch[rows.start * views : rows.stop * views]

    def explicit(self, rows: slice) -> Tensor:
        rows = slice(*rows.indices(self.num_examples))
        count, geometry = rows.stop - rows.start, self.geometry
        if geometry.groups == 1 and prod(self.delta_BOHW.shape[2:]) <= _FEW_POSITIONS:
            return self._from_patches(rows)
        inputs, delta = (
            _examples_as_groups(self._images(b, rows), rows)
            for b in (self.inputs_BCHW, self.delta_BOHW)
        )
        return geometry.kernel_gradient(inputs, delta, count * geometry.groups).reshape(count, -1)

    def _from_patches(self, rows: slice) -> Tensor:
        """Return the gradients as products of output gradients and patches: faster where there are
        few positions."""
        geometry, count = self.geometry, rows.stop - rows.start
        patches = F.unfold(
            self._images(self.inputs_BCHW, rows),
            geometry.kernel,
            geometry.dilation,
            geometry.padding,
            geometry.stride,
        )
        delta = self._images(self.delta_BOHW, rows).flatten(2)
        # (E M, channels, positions) -> (E, channels, M positions)
        patches, delta = (
            part.unflatten(0, (count, -1)).transpose(1, 2).flatten(2) for part in (patches, delta)
        )
        return torch.bmm(delta, patches.mT).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        factors_B = factors_E.repeat_interleave(len(self.inputs_BCHW) // self.num_examples)
        delta, inputs = scaled(self.delta_BOHW, factors_B), finite_(self.inputs_BCHW)
        return self.geometry.kernel_gradient(inputs, delta, self.geometry.groups).flatten()


def _examples_as_groups(images: Tensor, rows: slice) -> Tensor:
    """Return (E M, C, H, W) as (M, E C, H, W): views stay a batch to be summed over, examples
    become groups."""
    count = rows.stop - rows.start
    by_view = images.reshape(count, -1, *images.shape[1:]).transpose(0, 1)
    return by_view.reshape(-1, count * images.shape[1], *images.shape[2:])


def _by_group(images: Tensor, rows: slice, groups: int) -> Tensor:
    """Return (E M, C, H, W) as (E G, C / G, M, H, W)."""
    count, (height, width) = rows.stop - rows.start, images.shape[2:]
    split = images.reshape(count, -1, groups, images.shape[1] // groups, height, width)
    return split.permute(0, 2, 3, 1, 4, 5).flatten(0, 1)


def _gram_of_image(image: Tensor, geometry: Geometry, output_sides: Pair) -> Tensor:
    """Return patch_s . patch_t as sums over the kernel of entries of one Gram matrix between all
    pixels."""
    pixels, sides = image.flatten(2), image.shape[2:]
    gram = (pixels.mT @ pixels).view(-1, *sides, *sides)
    shape = (len(image), sides[0], *output_sides, sides[0], *output_sides)
    total = image.new_zeros(shape)
    for rows, columns in geometry.windows(output_sides):
        total += gram[:, :, rows, columns, :, rows, columns]
    return total


def _gram_of_windows(image: Tensor, geometry: Geometry, output_sides: Pair) -> Tensor:
    """Return patch_s . patch_t as a sum of one Gram matrix per kernel position (cheaper for strided
    layers)."""
    length = image.shape[2] * prod(output_sides)
    total = image.new_zeros(len(image), length, length)
    for rows, columns in geometry.windows(output_sides):
        window = image[..., rows, columns].flatten(2)
        total.baddbmm_(window.mT, window)
    return total


@final
@dataclass(frozen=True)
class _Costs:
    """Multiplications per example of each way to the norms, memory traffic included, and the
    scratch they need."""

    coordinates: int
    positions: int
    explicit: int
    gram: int
    gram_of_image: bool
    gram_floats: int
    contraction: int
    keep: bool

    @classmethod
    def of(
        cls, inputs_BCHW: Tensor, delta_BOHW: Tensor, geometry: Geometry, num_examples: int
    ) -> _Costs:
        channels_in, channels_out = inputs_BCHW.shape[1], delta_BOHW.shape[1]
        views, positions = len(inputs_BCHW) // num_examples, prod(geometry.kernel)
        length = views * prod(delta_BOHW.shape[2:])
        padded = zip(inputs_BCHW.shape[2:], geometry.padding, strict=True)
        pixels = views * prod(side + 2 * padding for side, padding in padded)
        coordinates = channels_out * channels_in * positions // geometry.groups
        of_image = pixels**2 * channels_in + PASS_COST * geometry.groups * positions * length**2
        of_windows = positions * channels_in * length * (length + PASS_COST)
        activations = (inputs_BCHW.numel() + delta_BOHW.numel()) // num_examples
        return cls(
            coordinates=coordinates,
            positions=length,
            explicit=(length + WRITE_COST) * coordinates,
            gram=min(of_image, of_windows)
            + length**2 * (channels_out + PASS_COST * geometry.groups),
            gram_of_image=of_image < of_windows,
            gram_floats=geometry.groups
            * ((pixels**2 if of_image < of_windows else 0) + 2 * length**2),
            contraction=length * coordinates,
            keep=worth_keeping(coordinates, activations),
        )


def kernel_term(
    layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, delta: Tensor, num_examples: int
) -> Term:
    """Return the kernel's term."""
    inputs_BCHW, geometry = _as_images(layer, inputs)
    delta_BOHW = delta if delta.dim() == 4 else delta.unsqueeze(2)
    return ConvolutionTerm(inputs_BCHW, delta_BOHW, geometry, num_examples)


def _as_images(layer: nn.Conv1d | nn.Conv2d, inputs: Tensor) -> tuple[Tensor, Geometry]:
    """Return the inputs as images, and the geometry; padding that is not plain and even is carried
    out here."""
    sides = _padding(layer)
    if layer.padding_mode != "zeros" or any(before != after for before, after in sides):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, [side for pair in reversed(sides) for side in pair], mode=mode)
        sides = [(0, 0)] * len(sides)
    padding = tuple(before for before, _ in sides)
    if inputs.dim() == 4:
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        return inputs, Geometry(
            _pair(kernel), _pair(stride), _pair(padding), _pair(dilation), layer.groups
        )
    kernel, stride, dilation = (
        (1, layer.kernel_size[0]),
        (1, layer.stride[0]),
        (1, layer.dilation[0]),
    )
    return inputs.unsqueeze(2), Geometry(kernel, stride, (0, padding[0]), dilation, layer.groups)


def _pair(sides: tuple[int, ...]) -> Pair:
    return sides[0], sides[1]


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[Pair]:
    """Return the padding before and after each side; 'same' puts the odd one after."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in layer.padding]
