"""No example is likelier to be drawn than the event states, down to a single 32-bit word.

An example of a Poisson batch is drawn when its 32-bit word is small enough, so its probability is
the number of words that draw it, over 2^32. That number has to be `floor(rate * 2^32)`: rounding up
or to `<=` would draw more often than stated.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dpcsgp.privacy import GaussianMechanism
from dpcsgp.randomness import PrivateRandomness


class ChosenWords(PrivateRandomness):
    """A stream whose words are chosen, to ask which of them draw an example."""

    def __init__(self, words: np.ndarray) -> None:
        super().__init__([0], [bytes(32)], reproducible=True)
        self.words = words

    def row_bytes(self, purpose: str, step: int, row: int, num_bytes: int) -> np.ndarray:
        """Return the chosen words first, then the stream as it is."""
        stream = super().row_bytes(purpose, step, row, num_bytes)
        if purpose == "sampling":
            stream[: 4 * len(self.words)] = self.words.astype(np.uint32).view(np.uint8)
        return stream


def mechanism(batch: int, total: int) -> GaussianMechanism:
    return GaussianMechanism(1.0, (1.0,), (batch,), (total,), "poisson")


def drawn(batch: int, total: int, step: int, random: PrivateRandomness) -> set[int]:
    """Return the numbers of the drawn examples, through the public method."""
    indices_NE, present_NE = mechanism(batch, total).draw(step, random, [True])
    found = torch.masked_select(indices_NE, present_NE).tolist()
    assert len(found) == len(set(found))
    return set(found)


def words_that_draw(batch: int, total: int) -> int:
    """Return how many of the 2^32 words draw an example, by bisection; small words draw."""
    low, high = 0, 2**32  # words below `low` draw, words from `high` on do not
    while high > low:
        middle = (low + high) // 2
        words = np.full(total, 2**32 - 1, dtype=np.uint64)
        words[-1] = middle
        low, high = (
            (middle + 1, high)
            if total - 1 in drawn(batch, total, 0, ChosenWords(words))
            else (low, middle)
        )
    return low


@pytest.mark.parametrize(
    ("batch", "total"),
    [(1, 3), (2, 3), (1, 2), (3, 7), (1, 1000), (999, 1000), (17, 6000), (64, 128), (4999, 5000)],
)
def test_as_many_words_draw_an_example_as_its_rate_allows(batch: int, total: int) -> None:
    assert words_that_draw(batch, total) == math.floor(Fraction(batch, total) * 2**32)
    stated = mechanism(batch, total).event(0).sampling_rate
    assert words_that_draw(batch, total) / 2**32 <= stated


@pytest.mark.parametrize(("batch", "total"), [(1, 3), (5, 7), (1, 4), (333, 1000)])
def test_words_draw_up_to_the_rate_and_no_further(batch: int, total: int) -> None:
    allowed = math.floor(Fraction(batch, total) * 2**32)
    words = np.array(
        [0, 1, allowed // 2, allowed - 1, allowed, allowed + 1, 2**32 - 1], dtype=np.uint64
    )
    around = np.resize(words, total) if total >= len(words) else words[:total]
    expected = {place for place, word in enumerate(around.tolist()) if word < allowed}
    assert drawn(batch, total, 0, ChosenWords(around)) == expected


def test_everybody_is_drawn_at_rate_one() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint64)
    assert drawn(4, 4, 0, ChosenWords(words)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("batch", "total", "steps"), [(300_000, 10**6, 4), (20_000, 10**6, 20), (900_000, 10**6, 2)]
)
def test_a_rate_off_by_one_percent_is_seen(batch: int, total: int, steps: int) -> None:
    random = PrivateRandomness.seeded(20, [0])
    count = sum(len(drawn(batch, total, step, random)) for step in range(steps))
    rate = batch / total
    deviation = math.sqrt(steps * total * rate * (1 - rate))
    assert abs(count - steps * batch) < 4 * deviation
    assert 0.01 * steps * batch > 6 * deviation  # one percent would lie well outside


def test_every_example_has_the_same_rate() -> None:
    total, batch, steps = 1000, 100, 2000
    random, counts = PrivateRandomness.seeded(21, [0]), np.zeros(total)
    for step in range(steps):
        counts[list(drawn(batch, total, step, random))] += 1
    rate = batch / total
    chi_square = float(np.sum((counts - steps * rate) ** 2) / (steps * rate * (1 - rate)))
    assert abs(chi_square - total) < 4 * math.sqrt(2 * total)
