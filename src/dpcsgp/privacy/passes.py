"""The public shapes in which private examples are computed, and how much rounding may do to their sum.

Kernels are chosen by shape: a matrix product of 3 rows rounds otherwise than one of 4, and at a kink of the loss the last
bit decides an example's whole gradient. So every pass runs on a number of rows that follows from public constants alone,
drawn examples fill some of its places, blank rows (zeros that count for nothing) the others, and what one example
contributes does not depend on how many others were drawn.

A sum of K float32 products in any order is off by at most K 2^-24 of the sum of their sizes. Drawn examples lie in random
order, so a data set with one example less differs, in law, by one hole that the last example fills: at most two chunks
and two passes change, on two sides. That is where the factors of four below come from; `docs/privacy-proof.md` has the
proof.

Legend: P places of a node in a pass, C chunks of R rows that make up a pass (P = C R), T positions an example passes
through a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

UNIT: Final = 2.0**-24  # unit of rounding of float32
SUM_SLACK: Final = 0.021  # what rounding may add to a neighbouring pair of sums, as a share of the clip norm
MOST_ROWS: Final = 256  # of a chunk
MOST_CHUNKS: Final = 9  # of a pass
_SECOND_ORDER: Final = 1.01  # for terms such as (K 2^-24)^2, and for factors that were rounded themselves
_STEPS_PER_OCTAVE: Final = 8
_DEVIATIONS: Final = 3.0


@final
@dataclass(frozen=True)
class PassShape:
    """How many places a node has: `passes` passes of `chunks` chunks of `rows` rows, all public.

    Chunks of a pass are summed in float32, passes in double precision.
    """

    rows: int = 64
    chunks: int = 1
    passes: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= MOST_ROWS and 1 <= self.chunks <= MOST_CHUNKS and self.passes >= 1

    @property
    def places(self) -> int:
        """Number of places of a pass."""
        return self.rows * self.chunks

    def width(self, drawn: int) -> int:
        """Return how many places a drawn batch takes: more than usual only in whole passes."""
        return self.places * max(self.passes, math.ceil(drawn / self.places))


def pass_shape(expected_batch: int, num_examples: int, sampling: str) -> PassShape:
    """Return the shape of a node's passes: nearly always they hold the drawn batch.

    Poisson batches get three standard deviations of room; a larger one needs a further pass of the same shape. Sizes are
    rounded up to eight per factor of two, so that nodes of like size share passes.

    >>> pass_shape(2048, 6000, "poisson")
    PassShape(rows=256, chunks=9, passes=1)
    >>> pass_shape(256, 2048, "poisson")
    PassShape(rows=160, chunks=2, passes=1)
    """
    rate = expected_batch / max(num_examples, 1)
    spread = math.sqrt(expected_batch * max(1 - rate, 0.0)) if sampling == "poisson" else 0.0
    wanted = min(math.ceil(expected_batch + _DEVIATIONS * spread), max(num_examples, 1))
    passes = math.ceil(wanted / (MOST_ROWS * MOST_CHUNKS))
    per_pass = math.ceil(wanted / passes)
    step = max(16, 2 ** (per_pass.bit_length() - 1) // _STEPS_PER_OCTAVE)
    places = math.ceil(per_pass / step) * step
    return PassShape(*_cut(places), passes)


def _cut(places: int) -> tuple[int, int]:
    """Return rows and chunks that make up so many places: the fewest chunks that divide them evenly."""
    sixteens = places // 16
    fitting = (count for count in range(1, sixteens + 1) if sixteens % count == 0)
    chunks = next(count for count in fitting if places <= count * MOST_ROWS)
    return places // chunks, chunks


def pass_slack(rows: int, chunks: int) -> float:
    """Bound the rounding where products over the rows of a chunk and a sum over the chunks of a pass are in float32."""
    across = chunks * chunks * rows if chunks > 1 else 0
    return 4 * UNIT * _SECOND_ORDER * (rows * (rows + 2) + across)


def ghost_slack(rows: int, positions: int, margin: float) -> float:
    """Bound the rounding where examples and positions are summed in one product of `rows * positions` terms.

    Terms of one example may cancel, so the error is a share of U = |inputs| |output gradients|, not of the gradient;
    clipping by |g| + margin U makes U at most clip_norm / margin. A single row has no companions to share rounding with.
    """
    if rows == 1:
        return 0.0
    return 4 * UNIT * _SECOND_ORDER * rows * (rows * positions + 2) / margin
