"""Ghost norms: norms and weighted sums of per-example gradients, mostly without forming them.

A layer that computes y = W a at several positions has the per-example gradient g_e = sum_t b_et
a_et', where a are the layer's inputs (activations) and b the loss gradients at its outputs
(backprops). Its norm and any weighted sum over examples follow from a and b alone; a `GradSample`
picks the cheapest way by counting multiplications and memory.

What bounds an example's influence is the length of what is *summed*, after rounding. Two ways give
that:

* the float32 gradient of every example is formed, measured in double precision, and summed over the
  examples;
* examples and positions are summed in one product (the ghost form). What an example adds then
  differs from its gradient by at most a tiny share of U_e = |a_e| |b_e|, which is larger than
  |g_e| where positions cancel. Clipping by |g_e| + MARGIN U_e bounds both; see
  `passes.ghost_slack` for when the share is tiny enough.

Legend: E examples of a chunk, T positions an example passes through a layer (sequence, image,
augmented views), I inputs and O outputs of a layer, P coordinates of one parameter. References:
Goodfellow, "Efficient per-example gradient computations" (2015); Li et al., "Large language models
can be strong differentially private learners" (2022), for the Gram form of the norm ("ghost
clipping"); Bu, Mao, Xu, "Scalable and efficient training of large convolutional neural networks
with differential privacy" (2022), for choosing between the forms layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpcsgp.privacy.clipping.squares import squared_norms
from dpcsgp.privacy.passes import ghost_slack

# Rough costs in multiplications, set by hand after timing the layer shapes of a ResNet-18 on one
# CPU: writing one per-example gradient coordinate to fresh memory, and passing once over one
# element of a tensor out of cache. They decide only which exact way is taken, never the result.
WRITE_COST: Final = 128
PASS_COST: Final = 8
SCRATCH_FLOATS = 2**22  # scratch memory for intermediate results
# scratch memory that stays in cache and is handed out again without page faults
CACHED_FLOATS: Final = 2**19
MARGIN: Final = 2.0**-6  # share of U by which ghost norms are raised
# the same where gradients are in double precision: Gram matrices are right to 2^-26 U
_DOUBLE_MARGIN: Final = 2.0**-24
# numbers above it are rounded by 2^-24 of themselves; smaller ones are set to zero
_TINY: Final = 2.0**-100
GHOST_SLACK: Final = 0.0165  # share of the clip norm that rounding of ghost sums may take
_ALIGNED: Final = 16  # parts of a workspace begin at a multiple of so many numbers
_POOLED: Final = 1024  # coordinates of parameters that are measured and summed together
_THIN: Final = 16  # columns of a product that fill a vector register
_MEMORY_RATIO: Final = 4  # per-example gradients may take so many times the activations' memory


def clip_factors(
    norm_squared: Tensor, clip_norm: float, margin_squared: Tensor | float = 0.0
) -> Tensor:
    """Return min(1, clip_norm / (|g| + MARGIN U)), zero where that is tiny or not finite.

    `norm_squared` is |g|^2 and `margin_squared` is (MARGIN U)^2 of the ghost sums, both in double
    precision. There is no branch on the data. Tiny: near the smallest float32 numbers a factor
    could be rounded up to twice itself.
    """
    margins = torch.as_tensor(margin_squared, dtype=norm_squared.dtype, device=norm_squared.device)
    # a Gram matrix may come out below zero by rounding
    lengths = norm_squared.clamp_min(0.0).sqrt() + margins.sqrt()
    factors = (clip_norm / lengths).clamp_max(1.0)
    return torch.where(lengths.isfinite() & (factors >= _TINY), factors, 0.0)


def finite_(values: Tensor) -> Tensor:
    """Set NaN and infinity to zero in place.

    An example with a finite norm holds only finite values, so this touches nothing but examples
    whose factor is zero; the factor alone would not remove them, since 0 x NaN is NaN.
    """
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def scaled(backprops: Tensor, factors_E: Tensor) -> Tensor:
    """Return factor_e b_e for a tensor (E, ...), exactly zero where factor or product is tiny.

    A tiny product could be rounded up to twice itself and meet an activation that is huge; zero is
    never longer.
    """
    products = backprops * factors_E.to(backprops.dtype).view(-1, *[1] * (backprops.dim() - 1))
    return finite_(F.hardshrink(products, _TINY))


def margin(backprops: Tensor) -> float:
    """Return the share of U by which ghost norms of such gradients are raised."""
    return _DOUBLE_MARGIN if backprops.dtype is torch.float64 else MARGIN


def may_sum_positions(num_examples: int, positions: int) -> bool:
    """Tell whether rounding allows to sum examples and positions in one product."""
    return positions == 1 or ghost_slack(num_examples, positions, MARGIN) <= GHOST_SLACK


@final
class Workspace:
    """Memory for per-example gradients that is kept from chunk to chunk.

    Fresh memory is brought in page by page at first use, which costs more than the arithmetic.

    `fewest_rows`: forms are chosen as for at least so many examples. Ghost norms, which fewer rows
    would allow, clip a little harder: how little memory there is must not change what is summed.
    """

    def __init__(self) -> None:
        self.fewest_rows = 1
        self._kept = torch.empty(0)
        self._taken = 0

    def reset(self) -> None:
        """Let everything that was handed out be overwritten."""
        self._taken = 0

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a contiguous tensor of unspecified values, of the dtype and device of `like`."""
        length = math.prod(shape)
        if self._kept.dtype != like.dtype or self._kept.device != like.device:
            self._kept, self._taken = like.new_empty(0), 0
        end = self._taken + length
        if end > len(self._kept):
            # those who hold parts of the old memory keep it alive
            self._kept, self._taken, end = like.new_empty(max(end, 2 * len(self._kept))), 0, length
        taken = self._kept[self._taken : end].view(*shape)
        self._taken = math.ceil(end / _ALIGNED) * _ALIGNED
        return taken


class GradSample(Protocol):
    """The per-example gradients (E, P) of one parameter, in whatever form is cheapest to hold."""

    def norm_squared(self) -> Tensor:
        """Return |g_e|^2 for every example, in double precision: (E,)."""
        ...

    def margin_squared(self) -> Tensor | float:
        """Return (MARGIN U_e)^2 in the ghost form; 0 where what is measured is what is summed."""
        ...

    def materialize(self, rows: slice) -> Tensor:
        """Return the gradients of some examples in full: (rows, P)."""
        ...

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        """Return sum_e factor_e g_e: (P,)."""
        ...

    def in_best_form(self, memory: Workspace) -> GradSample:
        """Return the form for norms and sums, once all uses of the parameter are known."""
        ...


def slices(length: int, floats_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut an axis into runs of at least one element that need at most `limit` floats of scratch."""
    step = max(1, (limit or SCRATCH_FLOATS) // max(1, floats_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def fits_beside_activations(num_coordinates: int, activations_per_example: int) -> bool:
    """Tell whether per-example gradients take little memory beside what the pass stores anyway."""
    return num_coordinates <= _MEMORY_RATIO * activations_per_example


@final
@dataclass(frozen=True)
class MaterializedGradSample:
    """Per-example gradients held in full: biases, normalisation scales, kernels that are formed."""

    gradient_EP: Tensor

    def norm_squared(self) -> Tensor:
        return squared_norms(self.gradient_EP)

    def margin_squared(self) -> float:
        return 0.0

    def materialize(self, rows: slice) -> Tensor:
        return self.gradient_EP[rows]

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        # Only rows without a finite norm hold values that are not finite, and their factor is zero.
        self.gradient_EP.index_fill_(0, (factors_E == 0).nonzero().flatten(), 0.0)
        return factors_E.to(self.gradient_EP.dtype) @ self.gradient_EP

    def in_best_form(self, memory: Workspace) -> GradSample:
        return self


@final
@dataclass(frozen=True)
class LinearGradSample:
    """The weight of a linear layer: g_e = sum_t b_et a_et', held as activations and backprops.

    |g_e|^2 = sum_st (a_es . a_et) (b_es . b_et), by two Gram matrices (the ghost norm) or in full,
    whichever is cheaper.
    """

    activations_ETI: Tensor
    backprops_ETO: Tensor

    def norm_squared(self) -> Tensor:
        num_examples, length, width = self.activations_ETI.shape
        if length == 1:  # a product of two vectors: its length is the product of theirs
            return self._sizes_squared()
        height = self.backprops_ETO.shape[2]
        if prefers_ghost_norm(length, width, height):
            return torch.cat([self._gram(rows) for rows in slices(num_examples, 4 * length**2)])
        parts = (self.materialize(rows) for rows in slices(num_examples, width * height))
        return torch.cat([squared_norms(part) for part in parts])

    def margin_squared(self) -> Tensor | float:
        if self.activations_ETI.shape[1] == 1:  # nothing can cancel
            return 0.0
        return margin(self.backprops_ETO) ** 2 * self._sizes_squared()

    def _sizes_squared(self) -> Tensor:
        """Return U_e^2 = |a_e|^2 |b_e|^2."""
        activations, backprops = self.activations_ETI.flatten(1), self.backprops_ETO.flatten(1)
        return squared_norms(activations) * squared_norms(backprops)

    def _gram(self, rows: slice) -> Tensor:
        # In double precision: where positions cancel, float32 would leave nothing but rounding
        # errors, and no norm to clip by.
        a, b = self.activations_ETI[rows].double(), self.backprops_ETO[rows].double()
        return (a @ a.mT).mul_(b @ b.mT).sum(dim=(1, 2))

    def materialize(self, rows: slice) -> Tensor:
        activations_ETI, backprops_ETO = self.activations_ETI[rows], self.backprops_ETO[rows]
        gradient_EOI = backprops_ETO.new_empty(len(backprops_ETO), *self._shape)
        return _form(activations_ETI, backprops_ETO, gradient_EOI).flatten(1)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.backprops_ETO.shape[2], self.activations_ETI.shape[2]

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        # Backprops are scaled, not activations: one product then sums examples and positions.
        backprops = scaled(self.backprops_ETO, factors_E)
        activations = finite_(self.activations_ETI.contiguous())  # which may be expanded
        return (backprops.flatten(0, 1).mT @ activations.flatten(0, 1)).flatten()

    def in_best_form(self, memory: Workspace) -> GradSample:
        num_examples, length, width = self.activations_ETI.shape
        if length == 1:
            return self
        height = self.backprops_ETO.shape[2]
        small = fits_beside_activations(width * height, length * (width + height))
        cheap = small and not prefers_ghost_norm(length, width, height)
        if cheap or not may_sum_positions(max(num_examples, memory.fewest_rows), length):
            gradient_EOI = memory.take((num_examples, *self._shape), self.backprops_ETO)
            _form(self.activations_ETI, self.backprops_ETO, gradient_EOI)
            return MaterializedGradSample(gradient_EOI.flatten(1))
        return self


def _form(activations_ETI: Tensor, backprops_ETO: Tensor, gradient_EOI: Tensor) -> Tensor:
    """Write every example's gradient sum_t b_et a_et' into memory that is given, and return it."""
    # Strided operands (recurrent layers have time first) cost the product more than their copies.
    activations, backprops = activations_ETI.contiguous(), backprops_ETO.contiguous()
    if activations.shape[2] < min(_THIN, backprops.shape[2]):
        # A product with few columns leaves most of a vector register idle, one with few rows does
        # not: for adapters of low rank it is several times faster.
        return gradient_EOI.copy_((activations.mT @ backprops).mT)
    return torch.bmm(backprops.mT, activations, out=gradient_EOI)


def prefers_ghost_norm(length: int, width: int, height: int) -> bool:
    """Tell whether two T x T Gram matrices cost less than writing O x I gradients per example."""
    return length**2 * (width + height + PASS_COST) <= (length + WRITE_COST) * width * height


@final
@dataclass(frozen=True)
class EmbeddingGradSample:
    """The weight of an embedding: row v of g_e sums b_et over the positions t that look up v.

    The positions of an example that look up one word are added first: `table_ETO` holds the sums
    (rows that are not needed are zero), `words_ET` whose rows they are. So the sum over examples
    adds each example once to a coordinate.
    """

    table_ETO: Tensor
    words_ET: Tensor
    num_rows: int

    @classmethod
    def of(cls, words_ET: Tensor, backprops_ETO: Tensor, num_rows: int) -> EmbeddingGradSample:
        """Add up what an example's positions say of the same word."""
        # Sorting brings equal words together; numbering the runs gives a table of T rows instead
        # of `num_rows`.
        ordered, order = words_ET.sort(dim=1)
        run = torch.zeros_like(ordered)
        run[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
        place = torch.empty_like(run).scatter_(1, order, run)
        table = torch.zeros_like(backprops_ETO)
        table.scatter_add_(1, place[:, :, None].expand_as(backprops_ETO), backprops_ETO)
        words = torch.zeros_like(words_ET).scatter_(1, place, words_ET)
        return cls(table, words, num_rows)

    def norm_squared(self) -> Tensor:
        return squared_norms(self.table_ETO.flatten(1))

    def margin_squared(self) -> float:
        return 0.0

    def materialize(self, rows: slice) -> Tensor:
        words, part = self.words_ET[rows], self.table_ETO[rows]
        table = part.new_zeros(len(words), self.num_rows, part.shape[2])
        return table.scatter_add_(1, words[:, :, None].expand_as(part), part).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        rows = scaled(self.table_ETO, factors_E).flatten(0, 1)
        table = rows.new_zeros(self.num_rows, rows.shape[1])
        return table.index_add_(0, self.words_ET.flatten(), rows).flatten()

    def in_best_form(self, memory: Workspace) -> GradSample:
        return self


@final
@dataclass(frozen=True)
class TiedGradSample:
    """A parameter used in several places: g_e is the sum over the uses, formed a few at a time."""

    uses: tuple[GradSample, ...]
    num_examples: int
    num_coordinates: int

    def norm_squared(self) -> Tensor:
        return torch.cat([squared_norms(self.materialize(rows)) for rows in self._runs()])

    def margin_squared(self) -> float:
        return 0.0

    def materialize(self, rows: slice) -> Tensor:
        total = self.uses[0].materialize(rows).clone()
        for use in self.uses[1:]:
            total += use.materialize(rows)
        return total

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        parts = (
            MaterializedGradSample(self.materialize(rows)).weighted_sum(factors_E[rows])
            for rows in self._runs()
        )
        return torch.stack(list(parts)).sum(dim=0)

    def in_best_form(self, memory: Workspace) -> GradSample:
        return self

    def _runs(self) -> Iterator[slice]:
        return slices(self.num_examples, 2 * self.num_coordinates)


def pool(samples: dict[str, GradSample]) -> tuple[dict[str, int], MaterializedGradSample | None]:
    """Take small formed gradients out of the samples and put them side by side.

    One norm and one sum then serve all biases and scales. Returns the names with their coordinates.
    """
    small = {
        name: sample
        for name, sample in samples.items()
        if isinstance(sample, MaterializedGradSample) and sample.gradient_EP.shape[1] <= _POOLED
    }
    if len(small) < 2:
        return {}, None
    for name in small:
        del samples[name]
    sizes = {name: sample.gradient_EP.shape[1] for name, sample in small.items()}
    together_EP = torch.cat([sample.gradient_EP for sample in small.values()], dim=1)
    return sizes, MaterializedGradSample(together_EP)


def merge(
    uses: Sequence[GradSample], num_examples: int, num_coordinates: int, memory: Workspace
) -> GradSample:
    """Return one sample for all uses of a parameter: norms are of the sum, never of the parts."""
    if len(uses) == 1:
        return uses[0].in_best_form(memory)
    linear = [use for use in uses if isinstance(use, LinearGradSample)]
    if len(linear) == len(uses):  # uses of one linear layer are just more positions
        activations_ETI = torch.cat([use.activations_ETI for use in linear], dim=1)
        backprops_ETO = torch.cat([use.backprops_ETO for use in linear], dim=1)
        return LinearGradSample(activations_ETI, backprops_ETO).in_best_form(memory)
    return TiedGradSample(tuple(uses), num_examples, num_coordinates)
