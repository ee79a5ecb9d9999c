"""Rows that are read when they are drawn: every place has a secret seed of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpcsgp.privacy.fetching import DrawnBatch
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness

SHAPE = PassShape(rows=2, passes=2)


class Source:
    """Notes what it is asked for; places with an odd number can never be read."""

    def __init__(self) -> None:
        self.seeds: list[Tensor] = []
        self.widths: list[list[int]] = []

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("rows are read, not looked up")

    def read_examples(
        self,
        indices_NE: Tensor,
        seeds_NE: Tensor,
        widths_N: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert rows == (0, 1)
        self.seeds.append(seeds_NE)
        self.widths.append(list(widths_N))
        readable_NE = torch.ones_like(indices_NE, dtype=torch.bool)
        readable_NE[:, 1::2] = False
        return indices_NE.float(), indices_NE, readable_NE


def read(random: PrivateRandomness, step: int, present_NE: Tensor) -> tuple[Source, Tensor]:
    """Fetch pass by pass; return the source, and which places were there."""
    source = Source()
    indices_NE = torch.zeros_like(present_NE, dtype=torch.int64)
    batch = DrawnBatch(source, (0, 1), indices_NE, present_NE, SHAPE, random, step)
    starts = range(0, present_NE.shape[1], SHAPE.places)
    found = [batch(slice(start, start + SHAPE.places)).present_NE for start in starts]
    return source, torch.cat(found, dim=1)


def seeds(random: PrivateRandomness, step: int, present_NE: Tensor) -> Tensor:
    return torch.cat(read(random, step, present_NE)[0].seeds, dim=1)


def test_seeds_follow_the_secret_key_the_node_the_step_and_the_place_and_nothing_drawn() -> None:
    everybody = torch.ones(2, 8, dtype=torch.bool)
    one, other = (PrivateRandomness.seeded(seed, (0, 1)) for seed in (1, 2))
    first = seeds(one, 0, everybody)
    assert torch.equal(first, seeds(one, 0, ~everybody))  # who else was drawn does not matter
    elsewhere = [seeds(one, 1, everybody), seeds(other, 0, everybody)]
    everything = torch.cat([first, *elsewhere]).flatten()
    assert len(everything.unique()) == len(everything) and int(everything.min()) >= 0


def test_the_number_of_rows_that_are_read_is_public_unless_a_batch_exceeds_its_places() -> None:
    random = PrivateRandomness.seeded(1, (0, 1))
    present_NE = torch.zeros(2, 8, dtype=torch.bool)
    for drawn in range(5):  # up to the planned two passes of two places
        present_NE[0, :drawn] = True
        assert read(random, 0, present_NE)[0].widths == [[2, 2], [2, 2], [0, 0], [0, 0]]
    present_NE[0, 4] = True
    assert read(random, 0, present_NE)[0].widths == [[2, 2], [2, 2], [2, 0], [0, 0]]


def test_a_row_that_cannot_be_read_is_a_blank() -> None:
    present_NE = torch.ones(2, 8, dtype=torch.bool)
    present_NE[0, 0] = False
    found_NE = read(PrivateRandomness.seeded(1, (0, 1)), 0, present_NE)[1]
    assert found_NE.sum(1).tolist() == [3, 4] and not found_NE[:, 1::2].any()
