"""Ghost norms: one parameter's per-example gradients, their norms and weighted sums, mostly without
storing them.

A layer that computes y = W a at several positions has the per-example gradient g_e = sum_t delta_et
a_et', where a are the layer's inputs (activations) and delta the loss gradient at its outputs
(backprops). Its norm and any weighted sum over examples follow from a and delta alone; a term picks
the cheapest way by counting multiplications and memory.

What bounds an example's influence is the length of what is *summed*, after rounding. Two ways give
that:

* the float32 gradient of every example is formed, measured in double precision, and summed over the
  examples;
* examples and positions are summed in one product (the ghost form). What an example adds then
  differs from its gradient by at most a tiny share of U_e = |a_e| |delta_e|, which is larger than
  |g_e| where positions cancel. Clipping by
  |g_e| + MARGIN U_e bounds both; see `passes.ghost_slack` for when the share is tiny enough.

Legend: E examples of a chunk, T positions an example passes through a layer (sequence, image,
augmented views), I inputs and O outputs of a layer, P coordinates of one parameter. Reference:
Goodfellow, "Efficient per-example gradient computations" (2015); Li et al., "Large language models
can be strong differentially private learners" (2022), for the Gram form of the norm ("ghost
clipping")."""

from __future__ import annotations

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
_KEEP_RATIO: Final = 4


def clip_factors(
    norm_squared: Tensor, clip_norm: float, loose_squared: Tensor | float = 0.0
) -> Tensor:
    """Return min(1, clip_norm / (|g| + MARGIN U)), zero where it is tiny or not finite (no branch
    on the data).

    `norm_squared` is |g|^2 and `loose_squared` is (MARGIN U)^2 of the ghost terms, both in double
    precision. Near the smallest float32 numbers a factor could be rounded up to twice itself."""
    loose = torch.as_tensor(loose_squared, dtype=norm_squared.dtype, device=norm_squared.device)
    lengths = norm_squared.clamp_min(0.0).sqrt() + loose.sqrt()
    factors = (clip_norm / lengths).clamp_max(1.0)
    return torch.where(lengths.isfinite() & (factors >= _TINY), factors, 0.0)


def finite_(values: Tensor) -> Tensor:
    """Set NaN and infinity to zero in place.

    An example with a finite norm holds only finite values, so this touches nothing but examples
    whose factor is zero; the factor alone would not remove them, since 0 x NaN is NaN."""
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def scaled(gradient: Tensor, factors_E: Tensor) -> Tensor:
    """Return factor_e gradient_e for a tensor (E, ...), exactly zero where the factor or the
    product is tiny.

    A tiny product could be rounded up to twice itself and meet an activation that is huge; zero is
    never longer."""
    products = gradient * factors_E.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
    return finite_(F.hardshrink(products, _TINY))


def margin(gradient: Tensor) -> float:
    """Return the share of U by which ghost norms of such gradients are raised."""
    return _DOUBLE_MARGIN if gradient.dtype is torch.float64 else MARGIN


def may_sum_positions(num_examples: int, positions: int) -> bool:
    """Tell whether rounding allows to sum examples and positions in one product."""
    return positions == 1 or ghost_slack(num_examples, positions, MARGIN) <= GHOST_SLACK


class Term(Protocol):
    """The per-example gradients (E, P) of one parameter, in whatever form is cheapest to hold."""

    def norm_squared(self) -> Tensor:
        """Return |g_e|^2 for every example, in double precision: (E,)."""
        ...

    def loose_squared(self) -> Tensor | float:
        """Return (MARGIN U_e)^2 where the sum is not of the very gradients that were measured, else
        0."""
        ...

    def explicit(self, rows: slice) -> Tensor:
        """Return the gradients of some examples in full: (rows, P)."""
        ...

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        """Return sum_e factor_e g_e: (P,)."""
        ...

    def settled(self) -> Term:
        """Return the form in which norms and sums are taken, once all uses of the parameter are
        known."""
        ...


def slices(length: int, floats_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut an axis into runs that need at most `limit` floats of scratch memory (but at least one
    element each)."""
    step = max(1, (limit or SCRATCH_FLOATS) // max(1, floats_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def worth_keeping(num_coordinates: int, activations_per_example: int) -> bool:
    """Tell whether per-example gradients take little memory beside the activations that the pass
    stores anyway."""
    return num_coordinates <= _KEEP_RATIO * activations_per_example


@final
@dataclass(frozen=True)
class ExplicitTerm:
    """Per-example gradients held in full: biases, normalisation scales, kernels that are formed."""

    gradient_EP: Tensor

    def norm_squared(self) -> Tensor:
        return squared_norms(self.gradient_EP)

    def loose_squared(self) -> float:
        return 0.0

    def explicit(self, rows: slice) -> Tensor:
        return self.gradient_EP[rows]

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        # Only rows without a finite norm hold values that are not finite, and their factor is zero.
        self.gradient_EP.index_fill_(0, (factors_E == 0).nonzero().flatten(), 0.0)
        return factors_E.to(self.gradient_EP.dtype) @ self.gradient_EP

    def settled(self) -> Term:
        return self


@final
@dataclass(frozen=True)
class OuterTerm:
    """The weight of a linear layer: g_e = sum_t delta_et a_et', held as inputs and output
    gradients.

    |g_e|^2 = sum_st (a_es . a_et) (delta_es . delta_et), by two Gram matrices or in full, whichever is cheaper.
    """

    inputs_ETI: Tensor
    delta_ETO: Tensor

    def norm_squared(self) -> Tensor:
        num_examples, length, width = self.inputs_ETI.shape
        if length == 1:  # a product of two vectors: its length is the product of theirs
            return self._sizes_squared()
        height = self.delta_ETO.shape[2]
        if prefers_gram(length, width, height):
            return torch.cat([self._gram(rows) for rows in slices(num_examples, 4 * length**2)])
        parts = (self.explicit(rows) for rows in slices(num_examples, width * height))
        return torch.cat([squared_norms(part) for part in parts])

    def loose_squared(self) -> Tensor | float:
        return (
            0.0
            if self.inputs_ETI.shape[1] == 1
            else margin(self.delta_ETO) ** 2 * self._sizes_squared()
        )

    def _sizes_squared(self) -> Tensor:
        return squared_norms(self.inputs_ETI.flatten(1)) * squared_norms(self.delta_ETO.flatten(1))

    def _gram(self, rows: slice) -> Tensor:
        # In double precision: terms that cancel would leave nothing but rounding errors, and no
        # norm to clip by.
        inputs, delta = self.inputs_ETI[rows].double(), self.delta_ETO[rows].double()
        return (inputs @ inputs.mT).mul_(delta @ delta.mT).sum(dim=(1, 2))

    def explicit(self, rows: slice) -> Tensor:
        return (self.delta_ETO[rows].mT @ self.inputs_ETI[rows]).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        delta, inputs = scaled(self.delta_ETO, factors_E), finite_(self.inputs_ETI)
        return (delta.flatten(0, 1).mT @ inputs.flatten(0, 1)).flatten()

    def settled(self) -> Term:
        num_examples, length, width = self.inputs_ETI.shape
        if length == 1:
            return self
        height = self.delta_ETO.shape[2]
        cheap = worth_keeping(width * height, length * (width + height)) and not prefers_gram(
            length, width, height
        )
        if cheap or not may_sum_positions(num_examples, length):
            return ExplicitTerm(self.explicit(slice(None)))
        return self


def prefers_gram(length: int, width: int, height: int) -> bool:
    """Tell whether two T x T Gram matrices cost less than writing the O x I gradient of every
    example."""
    return length**2 * (width + height + PASS_COST) <= (length + WRITE_COST) * width * height


@final
@dataclass(frozen=True)
class LookupTerm:
    """The weight of an embedding: row v of g_e is the sum of delta_et over the positions t that
    look up v.

    The positions of an example that look up one word are added first: `table_ETO` holds the sums
    (rows that are not needed are zero), `words_ET` whose rows they are. So the sum over examples
    adds each example once to a coordinate."""

    table_ETO: Tensor
    words_ET: Tensor
    num_rows: int

    @classmethod
    def of(cls, indices_ET: Tensor, delta_ETO: Tensor, num_rows: int) -> LookupTerm:
        """Add up what an example's positions say of the same word."""
        # Sorting brings equal indices together; numbering the runs gives a table of T rows instead
        # of `num_rows`.
        ordered, order = indices_ET.sort(dim=1)
        run = torch.zeros_like(ordered)
        run[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
        place = torch.empty_like(run).scatter_(1, order, run)
        table = torch.zeros_like(delta_ETO)
        table.scatter_add_(1, place[:, :, None].expand_as(delta_ETO), delta_ETO)
        words = torch.zeros_like(indices_ET).scatter_(1, place, indices_ET)
        return cls(table, words, num_rows)

    def norm_squared(self) -> Tensor:
        return squared_norms(self.table_ETO.flatten(1))

    def loose_squared(self) -> float:
        return 0.0

    def explicit(self, rows: slice) -> Tensor:
        words, part = self.words_ET[rows], self.table_ETO[rows]
        table = part.new_zeros(len(words), self.num_rows, part.shape[2])
        return table.scatter_add_(1, words[:, :, None].expand_as(part), part).flatten(1)

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        rows = scaled(self.table_ETO, factors_E).flatten(0, 1)
        table = rows.new_zeros(self.num_rows, rows.shape[1])
        return table.index_add_(0, self.words_ET.flatten(), rows).flatten()

    def settled(self) -> Term:
        return self


@final
@dataclass(frozen=True)
class SumTerm:
    """A parameter used in several places: its per-example gradient is the sum over the uses, formed
    a few at a time."""

    terms: tuple[Term, ...]
    num_examples: int
    num_coordinates: int

    def norm_squared(self) -> Tensor:
        return torch.cat([squared_norms(self.explicit(rows)) for rows in self._runs()])

    def loose_squared(self) -> float:
        return 0.0

    def explicit(self, rows: slice) -> Tensor:
        total = self.terms[0].explicit(rows).clone()
        for term in self.terms[1:]:
            total += term.explicit(rows)
        return total

    def weighted_sum(self, factors_E: Tensor) -> Tensor:
        parts = (
            ExplicitTerm(self.explicit(rows)).weighted_sum(factors_E[rows]) for rows in self._runs()
        )
        return torch.stack(list(parts)).sum(dim=0)

    def settled(self) -> Term:
        return self

    def _runs(self) -> Iterator[slice]:
        return slices(self.num_examples, 2 * self.num_coordinates)


def merge(terms: Sequence[Term], num_examples: int, num_coordinates: int) -> Term:
    """Return one term for all uses of a parameter: norms are of the summed gradient, never of the
    parts."""
    if len(terms) == 1:
        return terms[0].settled()
    outer = [term for term in terms if isinstance(term, OuterTerm)]
    if len(outer) == len(terms):  # uses of one linear layer are just more positions
        inputs = torch.cat([term.inputs_ETI for term in outer], dim=1)
        return OuterTerm(inputs, torch.cat([term.delta_ETO for term in outer], dim=1)).settled()
    return SumTerm(tuple(terms), num_examples, num_coordinates)
