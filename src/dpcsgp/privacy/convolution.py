"""Per-example gradients of convolution kernels, from the layer's inputs and the loss gradient at its outputs.

One convolution serves Conv1d and Conv2d with any stride, padding, dilation and grouping. The kernel's per-example
gradients are, whichever is cheaper for the layer's shape, either formed in full by one convolution in which every
example is a group of its own, or only measured through Gram matrices between positions:
|g_e|^2 = sum_st (patch_es . patch_et) (delta_es . delta_et).

Legend: E examples, M augmented views of an example, B = E M images, C channels in, O channels out, H and W image
sides, T = M x output positions, K kernel positions, P = O C K / groups coordinates of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.terms import PASS_COST, WRITE_COST, ClipFactors, ExplicitTerm, Term, slices, worth_keeping

Pair = tuple[int, int]


@final
@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over an image; a sequence is an image of height one."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @classmethod
    def of(cls, layer: nn.Conv1d | nn.Conv2d, padding: Pair) -> Geometry:
        """Read the geometry of a layer whose padding is already known."""
        kernel, stride, dilation = (_pair(sides) for sides in (layer.kernel_size, layer.stride, layer.dilation))
        return cls(kernel, stride, padding, dilation, layer.groups)

    def weight_gradient(self, inputs_BCHW: Tensor, delta_BOHW: Tensor, groups: int) -> Tensor:
        """Return the kernel gradient (O, C / groups, *kernel) summed over the batch."""
        shape = (delta_BOHW.shape[1], inputs_BCHW.shape[1] // groups, *self.kernel)
        unread = delta_BOHW.new_empty(shape)  # the operator asks for a kernel but uses only its shape here
        return torch.ops.aten.convolution_backward(
            delta_BOHW, inputs_BCHW, unread, None, self.stride, self.padding, self.dilation, False, (0, 0), groups,
            (False, True, False),
        )[1]  # fmt: skip


def _pair(sides: tuple[int, ...]) -> Pair:
    return (sides[0], sides[1]) if len(sides) == 2 else (_sequence_side(sides), sides[0])


def _sequence_side(sides: tuple[int, ...]) -> int:
    return 1 if sides[0] else 0
