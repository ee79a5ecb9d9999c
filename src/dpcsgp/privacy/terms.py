"""What one parameter's per-example gradients look like, and their norms and weighted sums without storing them.

A layer that computes y = W a at several positions has the per-example gradient g_e = sum_t delta_et a_et', where a are
the layer's inputs and delta the loss gradient at its outputs. Its norm and any weighted sum over examples follow from
a and delta alone; a term picks the cheapest way by counting multiplications and memory.

Legend: E examples, T positions an example passes through a layer (sequence, image, augmented views), I inputs and O
outputs of a layer, P coordinates of one parameter.
Reference: Goodfellow, "Efficient per-example gradient computations" (2015); Li et al., "Large language models can be
strong differentially private learners" (2022), for the Gram form of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
from torch import Tensor

# Rough costs in multiplications, set by hand after timing the layer shapes of a ResNet-18 on one CPU: writing one
# per-example gradient coordinate to fresh memory, and passing once over one element of a tensor out of cache. They
# decide only which exact way is taken, never the result.
WRITE_COST: Final = 128
PASS_COST: Final = 8
SCRATCH_FLOATS = 2**22  # scratch memory for intermediate results
CACHED_FLOATS: Final = 2**19  # scratch memory that stays in cache and is handed out again without page faults
_KEEP_RATIO: Final = 4
_SHORT_ROW: Final = 2**12


def clip_factors(norm_squared: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / |g|) elementwise, zero where |g|^2 is not finite (no branch on the data)."""
    factors = (clip_norm / norm_squared.clamp_min(0.0).sqrt()).clamp_max(1.0)
    return torch.where(norm_squared.isfinite(), factors, 0.0)


def at_most(norm_squared: Tensor, uncancelled: Tensor) -> Tensor:
    """Return `(|g| + 8 u s)^2`, u the unit of rounding and s what |g| could be if its terms did not cancel.

    A gradient `sum_t delta_t a_t'` may be much smaller than its terms. Its float32 sum is then wrong by about 2^-24 of the
    terms, not of itself, and must still not be longer than the clip norm.
    """
    rounding = 8 * torch.finfo(norm_squared.dtype).eps
    return (norm_squared.clamp_min(0.0).sqrt() + rounding * uncancelled).square()


def finite(values: Tensor) -> Tensor:
    """Return a copy with NaN and infinity set to zero.

    An example with a finite norm holds only finite values, so this touches nothing but examples whose factor is zero;
    the factor alone would not remove them, since 0 x NaN is NaN.
    """
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def clean_(values: Tensor) -> Tensor:
    """Do the same in place."""
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def scaled(gradient: Tensor, factors_E: Tensor) -> Tensor:
    """Return factor_e gradient_e for a tensor (E, ...), exactly zero where the factor is."""
    product = gradient * factors_E.view(-1, *[1] * (gradient.dim() - 1))
    return clean_(product)


class Term(Protocol):
    """The per-example gradients (E, P) of one parameter, in whatever form is cheapest to hold."""

    def norm_squared(self) -> Tensor:
        """Return |g_e|^2 for every example, a little more where its terms cancel: (E,)."""
        ...

    def uncancelled(self) -> Tensor:
        """Return a bound on |g_e| that holds whatever the signs of its terms: (E,)."""
        ...

    def explicit(self, rows: slice) -> Tensor:
        """Return the gradients of some examples in full: (rows, P)."""
        ...

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        """Return sum_e factor_e g_e: (P,)."""
        ...


def slices(length: int, floats_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut an axis into runs that need at most `limit` floats of scratch memory (but at least one element each)."""
    step = max(1, (limit or SCRATCH_FLOATS) // max(1, floats_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def squared_norms(rows: Tensor) -> Tensor:
    """Return |row|^2 along the last axis, accurate for rows of any length.

    A vector norm in float32 adds up with a few accumulators and comes out too small for long rows (by 4e-4 for eleven
    million coordinates), so that clipping would let too much through; a sum adds pairwise.
    """
    length = rows.shape[-1]
    if length <= _SHORT_ROW:
        return torch.linalg.vector_norm(rows, dim=-1).square()
    flat = rows.reshape(-1, length)
    runs = slices(len(flat), length, CACHED_FLOATS)
    return torch.cat([flat[run].square().sum(dim=1) for run in runs]).view(rows.shape[:-1])


def worth_keeping(num_coordinates: int, activations_per_example: int) -> bool:
    """Tell whether per-example gradients take little memory beside the activations that the pass stores anyway."""
    return num_coordinates <= _KEEP_RATIO * activations_per_example


@final
@dataclass(frozen=True)
class ExplicitTerm:
    """Per-example gradients held in full: biases, normalisation scales, small kernels."""

    gradient_EP: Tensor

    def norm_squared(self) -> Tensor:
        return squared_norms(self.gradient_EP)

    def uncancelled(self) -> Tensor:
        return self.norm_squared().sqrt()

    def explicit(self, rows: slice) -> Tensor:
        return self.gradient_EP[rows]

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        return factors_E @ finite(self.gradient_EP)


@final
@dataclass(frozen=True)
class OuterTerm:
    """The weight of a linear layer: g_e = sum_t delta_et a_et', held as inputs and output gradients.

    |g_e|^2 = sum_st (a_es . a_et) (delta_es . delta_et), by two Gram matrices or in full, whichever is cheaper.
    """

    inputs_ETI: Tensor
    delta_ETO: Tensor

    def norm_squared(self) -> Tensor:
        num_examples, length, width = self.inputs_ETI.shape
        if length == 1:
            return squared_norms(self.inputs_ETI.flatten(1)) * squared_norms(self.delta_ETO.flatten(1))
        height = self.delta_ETO.shape[2]
        if prefers_gram(length, width, height):
            squares = torch.cat([self._gram(rows) for rows in slices(num_examples, 4 * length**2)])
        else:
            parts = (self.explicit(rows) for rows in slices(num_examples, width * height))
            squares = torch.cat([squared_norms(part) for part in parts])
        return at_most(squares, self.uncancelled())

    def uncancelled(self) -> Tensor:
        return (squared_norms(self.inputs_ETI.flatten(1)) * squared_norms(self.delta_ETO.flatten(1))).sqrt()

    def _gram(self, rows: slice) -> Tensor:
        # In double precision: terms that cancel would leave nothing but rounding errors, and no norm to clip by.
        inputs, delta = self.inputs_ETI[rows].double(), self.delta_ETO[rows].double()
        return (inputs @ inputs.mT).mul_(delta @ delta.mT).sum(dim=(1, 2)).to(self.inputs_ETI.dtype)

    def explicit(self, rows: slice) -> Tensor:
        return (self.delta_ETO[rows].mT @ self.inputs_ETI[rows]).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        delta, inputs = scaled(self.delta_ETO, factors_E), finite(self.inputs_ETI)
        return (delta.flatten(0, 1).mT @ inputs.flatten(0, 1)).flatten()


def prefers_gram(length: int, width: int, height: int) -> bool:
    """Tell whether two T x T Gram matrices cost less than writing the O x I gradient of every example."""
    return length**2 * (width + height + PASS_COST) <= (length + WRITE_COST) * width * height


def outer_term(inputs_ETI: Tensor, delta_ETO: Tensor) -> Term:
    """Return the weight term of a linear layer; long sequences through a small layer are contracted at once."""
    length, width, height = *inputs_ETI.shape[1:], delta_ETO.shape[2]
    term = OuterTerm(inputs_ETI, delta_ETO)
    if worth_keeping(width * height, length * (width + height)) and not prefers_gram(length, width, height):
        return ExplicitTerm(term.explicit(slice(None)))
    return term


@final
@dataclass(frozen=True)
class LookupTerm:
    """The weight of an embedding: row v of g_e is the sum of delta_et over the positions t that look up v."""

    indices_ET: Tensor
    delta_ETO: Tensor
    num_rows: int

    def norm_squared(self) -> Tensor:
        # Sorting brings equal indices together; numbering the runs gives a table of T rows instead of `num_rows`.
        ordered, order = self.indices_ET.sort(dim=1)
        run = torch.zeros_like(ordered)
        run[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
        place = torch.empty_like(run).scatter_(1, order, run)
        table = torch.zeros_like(self.delta_ETO)
        table.scatter_add_(1, place[:, :, None].expand_as(self.delta_ETO), self.delta_ETO)
        return at_most(squared_norms(table.flatten(1)), self.uncancelled())

    def uncancelled(self) -> Tensor:
        return (squared_norms(self.delta_ETO.flatten(1)) * self.delta_ETO.shape[1]).sqrt()

    def explicit(self, rows: slice) -> Tensor:
        indices, delta = self.indices_ET[rows], self.delta_ETO[rows]
        table = delta.new_zeros(len(indices), self.num_rows, delta.shape[2])
        return table.scatter_add_(1, indices[:, :, None].expand_as(delta), delta).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        delta = scaled(self.delta_ETO, factors_E).flatten(0, 1)
        table = delta.new_zeros(self.num_rows, delta.shape[1])
        return table.index_add_(0, self.indices_ET.flatten(), delta).flatten()


@final
@dataclass(frozen=True)
class SumTerm:
    """A parameter used in several places: its per-example gradient is the sum over the uses, formed a few at a time."""

    terms: tuple[Term, ...]
    num_examples: int
    num_coordinates: int

    def norm_squared(self) -> Tensor:
        parts = (self.explicit(rows) for rows in slices(self.num_examples, 2 * self.num_coordinates))
        return at_most(torch.cat([squared_norms(part) for part in parts]), self.uncancelled())

    def uncancelled(self) -> Tensor:
        return torch.stack([term.uncancelled() for term in self.terms]).sum(dim=0)

    def explicit(self, rows: slice) -> Tensor:
        return torch.stack([term.explicit(rows) for term in self.terms]).sum(dim=0)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        return torch.stack([term.weighted_sum(factors_E) for term in self.terms]).sum(dim=0)


def merge(terms: Sequence[Term], num_examples: int, num_coordinates: int) -> Term:
    """Return one term for all uses of a parameter: norms are of the summed gradient, never of the parts."""
    if len(terms) == 1:
        return terms[0]
    outer = [term for term in terms if isinstance(term, OuterTerm)]
    if len(outer) == len(terms):  # uses of one linear layer are just more positions
        inputs = torch.cat([term.inputs_ETI for term in outer], dim=1)
        return OuterTerm(inputs, torch.cat([term.delta_ETO for term in outer], dim=1))
    return SumTerm(tuple(terms), num_examples, num_coordinates)
