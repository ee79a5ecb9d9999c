"""Shapes of passes are public, hold every likely batch, and their rounding is paid for."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from dpcsgp.privacy.passes import (
    MOST_PLACES,
    OVERFLOW,
    SUM_SLACK,
    UNIT,
    PassShape,
    ghost_slack,
    pass_shape,
    pass_slack,
)

SIZES = [(1, 100), (20, 100), (64, 6000), (600, 6000), (2048, 6000), (3000, 6000), (5000, 10**6)]


@pytest.mark.parametrize(("batch", "total"), SIZES)
def test_fixed_places_are_hardly_ever_exceeded(batch: int, total: int) -> None:
    shape = pass_shape(batch, total, "poisson", fixed=True)
    assert shape.fixed
    assert stats.binom.sf(shape.places * shape.passes, total, batch / total) <= OVERFLOW


@pytest.mark.parametrize(("batch", "total"), SIZES)
@pytest.mark.parametrize("fixed", [False, True])
def test_the_number_of_places_follows_from_public_constants(
    batch: int, total: int, fixed: bool
) -> None:
    shape = pass_shape(batch, total, "poisson", fixed)
    usual = shape.places * shape.passes
    assert {shape.width(drawn) for drawn in range(usual + 1)} == {usual}
    for drawn in (usual + 1, usual + shape.places, usual + shape.places + 1, 10 * usual):
        assert shape.width(drawn) >= drawn
        assert shape.width(drawn) % shape.places == 0 and shape.width(drawn) - drawn < shape.places
    assert shape.rows % 16 == 0  # whole vector registers, whatever their width


@pytest.mark.parametrize(
    ("rows", "chunks"), [(1, 1), (16, 2), (64, 10), (240, 9), (256, 10), (288, 5), (288, 1)]
)
def test_the_slack_of_a_pass_is_that_of_its_sums(rows: int, chunks: int) -> None:
    """A float32 sum of K terms of size s is off by up to K 2^-24 K s.

    Two chunks and two passes change, on two sides.
    """
    in_chunk = rows * UNIT * rows
    over_chunks = chunks * UNIT * chunks * rows if chunks > 1 else 0.0
    assert 4 * (in_chunk + over_chunks) <= pass_slack(rows, chunks) <= SUM_SLACK


@pytest.mark.parametrize("positions", [1, 2, 100])
def test_the_slack_of_ghost_sums_is_that_of_terms_that_cancel(positions: int) -> None:
    """An example adds up to clip_norm / margin in size; rows and positions are one sum."""
    for rows in (2, 16, 64):
        for margin in (2.0**-6, 0.5):
            assert (
                ghost_slack(rows, positions, margin) >= 4 * rows * positions * UNIT * rows / margin
            )
    assert ghost_slack(1, positions, 2.0**-6) == 0


def test_shapes_that_would_round_more_than_stated_do_not_exist() -> None:
    for rows, chunks in ((304, 1), (288, 6), (256, 11), (0, 1), (1, 0)):
        with pytest.raises(AssertionError):
            PassShape(rows, chunks)


def test_every_batch_has_a_shape_that_rounds_little_enough() -> None:
    for batch in range(1, 2 * MOST_PLACES + 2):
        shape = pass_shape(batch, batch, "uniform")
        assert shape.places <= MOST_PLACES and shape.places * shape.passes >= batch
        assert pass_slack(shape.rows, shape.chunks) <= SUM_SLACK


def test_passes_are_as_small_as_memory_asks_and_round_no_more() -> None:
    for most in (1, 2, 3, 15, 16, 17, 31, 100, 288, 300, 1000, 2559, MOST_PLACES):
        for batch in (1, 2, 16, 17, 100, 257, 1000, 5000):
            for total in (batch, 3 * batch):
                shape = pass_shape(batch, total, "poisson", most_places=most)
                usual = pass_shape(batch, total, "poisson")
                assert shape.places <= most and shape.places * shape.passes >= batch
                assert pass_slack(shape.rows, shape.chunks) <= SUM_SLACK
                room = math.ceil(batch + 2 * math.sqrt(batch * (1 - batch / total)))
                assert shape.places * shape.passes >= min(room, total)
                assert shape == usual or usual.places > most  # as usual where that fits
