"""The public shapes in which private examples are computed, and what rounding may do to their sum.

Kernels are chosen by shape: a matrix product of 3 rows rounds otherwise than one of 4, and at a
kink of the loss the last bit decides an example's whole gradient. So every pass runs on a number of
rows that follows from public constants alone, drawn examples fill some of its places, blank rows
(zeros that count for nothing) the others, and what one example contributes does not depend on how
many others were drawn.

Which places the drawn examples take is random. There are two ways, and a check at the start decides
(`row_checks`):

* Where a row's bits do not depend on its place, examples lie side by side in random order. A data
  set with one example less then differs, in law, by one hole that the last example fills.
* Where they do, examples take random places among a fixed number that is hardly ever exceeded, and
  one example less is one hole more: all others stay where they are.

A sum of K float32 products in any order is off by at most K 2^-24 of the sum of their sizes. At
most two chunks and two passes change between neighbouring data sets, on two sides: that is where
the factors of four below come from; `docs/privacy-proof.md` has the proof.

Legend: P places of a node in a pass, C chunks of R rows that make up a pass (P = C R), T positions
an example passes through a layer.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final, final

UNIT: Final = 2.0**-24  # unit of rounding of float32
# what rounding may add to the difference of two neighbouring sums, as a share of the clip norm
SUM_SLACK: Final = 0.0222
# probability that a Poisson batch exceeds fixed places; every such release adds it to delta
OVERFLOW: Final = 1e-18
MOST_PLACES: Final = 2560  # of a pass
# for terms such as (K 2^-24)^2, and for factors that were rounded themselves
_SECOND_ORDER: Final = 1.01
_QUANTUM: Final = 16  # rows of a chunk are a multiple of it: no vector register is filled by half
_DEVIATIONS: Final = 2.0


@final
@dataclass(frozen=True)
class PassShape:
    """How many places a node has: `passes` passes of `chunks` chunks of `rows` rows, all public.

    Chunks of a pass are summed in float32, passes in double precision. With `fixed`, drawn examples
    take random places and keep them; otherwise they lie side by side.
    """

    rows: int = 64
    chunks: int = 1
    passes: int = 1
    fixed: bool = False

    def __post_init__(self) -> None:
        assert min(self.rows, self.chunks, self.passes) >= 1
        assert pass_slack(self.rows, self.chunks) <= SUM_SLACK, (
            "rounding may do more to the sum than the noise allows for"
        )

    @property
    def places(self) -> int:
        """Number of places of a pass."""
        return self.rows * self.chunks

    def width(self, drawn: int) -> int:
        """Return how many places a drawn batch takes: more than usual only in whole passes."""
        return self.places * max(self.passes, math.ceil(drawn / self.places))


def pass_shape(
    expected_batch: int,
    num_examples: int,
    sampling: str,
    fixed: bool = False,
    most_places: int = MOST_PLACES,
) -> PassShape:
    """Return the shape of a node's passes.

    Poisson batches get two standard deviations of room, and a larger one needs a further pass of
    its node alone; fixed places are so many that a batch exceeds them with probability `OVERFLOW`
    at most. A pass has as few chunks as rounding allows: summing over chunks costs time.

    Args:
        expected_batch: examples per step on average.
        num_examples: declared number of examples.
        sampling: "poisson" or "uniform".
        fixed: whether drawn examples keep fixed places.
        most_places: of a pass; what fits into memory, say. All of these are public.

    >>> pass_shape(256, 2048, "poisson")
    PassShape(rows=288, chunks=1, passes=1, fixed=False)
    >>> pass_shape(2048, 6000, "poisson")
    PassShape(rows=272, chunks=8, passes=1, fixed=False)
    >>> pass_shape(2048, 6000, "poisson", fixed=True).places
    2400
    >>> pass_shape(2048, 6000, "poisson", most_places=100)
    PassShape(rows=96, chunks=1, passes=23, fixed=False)
    """
    total = max(num_examples, expected_batch)
    if sampling != "poisson" or expected_batch == total:
        wanted = expected_batch
    elif fixed:
        wanted = _exceeded_hardly_ever(expected_batch, total)
    else:
        spread = math.sqrt(expected_batch * (1 - expected_batch / total))
        wanted = min(math.ceil(expected_batch + _DEVIATIONS * spread), total)
    most = min(most_places, MOST_PLACES)
    for passes in itertools.count(math.ceil(wanted / most)):
        rows, chunks = _chunks_of(math.ceil(wanted / passes), min(_QUANTUM, most))
        # Rounding up to whole chunks may need more places than there may be.
        if rows * chunks <= most:
            return PassShape(rows, chunks, passes, fixed)
    raise AssertionError("a pass of one row always fits")


def _chunks_of(places: int, quantum: int) -> tuple[int, int]:
    """Return rows and number of the chunks of a pass: as few chunks as rounding allows."""
    rows_of_chunks = (
        (math.ceil(places / chunks / quantum) * quantum, chunks) for chunks in itertools.count(1)
    )
    return next(pair for pair in rows_of_chunks if pass_slack(*pair) <= SUM_SLACK)


def _exceeded_hardly_ever(expected_batch: int, total: int) -> int:
    """Return the smallest a with P(more than a are drawn) <= OVERFLOW, by Chernoff's bound.

    The bound is exp(-J KL(a / J, q)) for J examples at rate q.
    """
    rate = expected_batch / total
    low, high = expected_batch, total
    while low < high:
        middle = (low + high) // 2
        share = middle / total
        rest = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
        if total * (share * math.log(share / rate) + rest) >= -math.log(OVERFLOW):
            high = middle
        else:
            low = middle + 1
    return low


def pass_slack(rows: int, chunks: int) -> float:
    """Bound the rounding, as a share of the clip norm, of a pass that is summed in float32.

    Products run over the rows of a chunk, then a sum over the chunks.
    """
    across = chunks * chunks * rows if chunks > 1 else 0
    return 4 * UNIT * _SECOND_ORDER * (rows * (rows + 2) + across)


def ghost_slack(rows: int, positions: int, margin: float) -> float:
    """Bound the rounding of ghost sums: examples and positions in one product, R T at a time.

    Positions of one example may cancel, so the error is a share of U = |activations| |backprops|,
    not of the gradient; clipping by |g| + margin U makes U at most clip_norm / margin. A single row
    has no companions to share rounding with.
    """
    if rows == 1:
        return 0.0
    return 4 * UNIT * _SECOND_ORDER * rows * (rows * positions + 2) / margin
