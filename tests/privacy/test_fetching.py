"""Rows that are read when they are drawn: every place has a secret seed of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpcsgp.privacy.fetching import fetch_examples
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness

SHAPES = (PassShape(rows=2, passes=2), PassShape(rows=4, passes=2))


class Source:
    """Notes what it is asked for; its last place can never be read."""

    def __init__(self) -> None:
        self.seeds_NE = torch.zeros(0)
        self.widths_N: list[int] = []

    def examples(self, indices_NE: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("rows are read, not looked up")

    def read_examples(
        self, indices_NE: Tensor, seeds_NE: Tensor, widths_N: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.seeds_NE, self.widths_N = seeds_NE, list(widths_N)
        readable_NE = torch.ones_like(indices_NE, dtype=torch.bool)
        readable_NE[:, -1] = False
        return indices_NE.float(), indices_NE, readable_NE


def seeds(random: PrivateRandomness, step: int, present_NE: Tensor) -> tuple[Source, Tensor]:
    source = Source()
    indices_NE = torch.zeros_like(present_NE, dtype=torch.int64)
    *_, found_NE = fetch_examples(source, indices_NE, present_NE, SHAPES, random, step)
    return source, found_NE


def test_seeds_follow_the_secret_key_the_node_the_step_and_the_place_and_nothing_drawn() -> None:
    everybody = torch.ones(2, 8, dtype=torch.bool)
    one, other = (PrivateRandomness.seeded(seed, (0, 1)) for seed in (1, 2))
    first = seeds(one, 0, everybody)[0].seeds_NE
    again = seeds(one, 0, torch.zeros(2, 8, dtype=torch.bool))[0].seeds_NE
    assert torch.equal(first, again)  # who else was drawn does not matter
    elsewhere = [seeds(one, 1, everybody)[0].seeds_NE, seeds(other, 0, everybody)[0].seeds_NE]
    everything = torch.cat([first, *elsewhere]).flatten()
    assert len(everything.unique()) == len(everything) and int(everything.min()) >= 0


def test_the_number_of_rows_that_are_read_is_public_unless_a_batch_exceeds_its_places() -> None:
    random = PrivateRandomness.seeded(1, (0, 1))
    present_NE = torch.zeros(2, 8, dtype=torch.bool)
    for drawn in range(5):  # up to the planned two passes of two places
        present_NE[0, :drawn] = True
        assert seeds(random, 0, present_NE)[0].widths_N == [4, 8]
    present_NE[0, 4] = True
    assert seeds(random, 0, present_NE)[0].widths_N == [6, 8]


def test_a_row_that_cannot_be_read_is_a_blank() -> None:
    present_NE = torch.ones(2, 8, dtype=torch.bool)
    present_NE[0, 0] = False
    found_NE = seeds(PrivateRandomness.seeded(1, (0, 1)), 0, present_NE)[1]
    assert found_NE.sum(1).tolist() == [6, 7] and not found_NE[:, -1].any()
