"""Random subsets are uniform, differ by sender and round, and are exact in size; top-k."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dpcsgp.compression import RandK, TopK
from dpcsgp.compression.sparsify import random_mask
from dpcsgp.errors import WireError
from dpcsgp.randomness import PublicRandomness


@pytest.mark.parametrize(("dim", "num_kept"), [(6, 3), (6, 1), (6, 5), (7, 2)])
def test_every_subset_is_equally_likely(dim: int, num_kept: int) -> None:
    random = PublicRandomness(11, [0])
    num_draws = 3000
    counts = dict.fromkeys(combinations(range(dim), num_kept), 0)
    for round_ in range(num_draws):
        counts[tuple(np.flatnonzero(random_mask(random, round_, 0, dim, num_kept)).tolist())] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("fraction", [0.0001, 0.003, 0.5, 0.77, 0.999])
def test_long_masks_are_exact_and_even(fraction: float) -> None:
    dim, num_draws = 40_000, 40
    num_kept = int(fraction * dim)
    masks = [
        random_mask(PublicRandomness(2, [1]), round_, 0, dim, num_kept)
        for round_ in range(num_draws)
    ]
    assert all(int(mask.sum()) == num_kept for mask in masks)
    # Every eighth of the vector receives its share, also of the coordinates that were moved to mend
    # the count.
    shares = np.sum(masks, axis=0).reshape(8, -1).sum(axis=1)
    assert chisquare(shares).pvalue > 1e-4
    pair_overlap = np.mean([(a & b).sum() for a, b in combinations(masks, 2)])
    assert pair_overlap == pytest.approx(num_kept**2 / dim, rel=0.02, abs=0.1)


def test_masks_differ_between_nodes_steps_and_seeds() -> None:
    masks = [
        random_mask(PublicRandomness(seed, [4, 7]), round_, row, 400, 200)
        for seed in (0, 1)
        for round_ in (0, 1)
        for row in (0, 1)
    ]
    for first, second in combinations(masks, 2):
        assert 60 < (first & second).sum() < 140  # 100 expected for independent halves


def test_receiver_rebuilds_the_mask_from_the_sender_alone() -> None:
    compressor, x = RandK(0.3), torch.randn(3, 101)
    wire = compressor.encode(x, PublicRandomness(9, [5, 6, 7]), round_=8)
    decoded = compressor.decode(wire[1:2], 101, PublicRandomness(9, [6]), round_=8)[0]
    kept = decoded != 0
    assert int(kept.sum()) == 30
    assert torch.equal(decoded[kept], x[1][kept])  # values are sent as they are, without rescaling


def test_kept_count_is_the_floor_of_the_written_decimal() -> None:
    assert RandK(0.29).num_kept(100) == 29  # 0.29 * 100 is 28.999... in floating point
    assert RandK(0.5).num_kept(101) == 50
    assert RandK(0.5).num_kept(1) == 0
    assert RandK(0.5).num_bytes(1) == 0
    assert RandK(0.75).paper_bits(1001) == 32 * 750
    assert TopK(0.5).num_kept(1) == 1


def test_top_keeps_the_largest_and_breaks_ties_by_position() -> None:
    x = torch.tensor([[1.0, -5.0, 2.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    random = PublicRandomness(1, [0])
    compressor = TopK(0.3)
    decoded = compressor.decode(compressor.encode(x, random, 0), 10, random, 0)
    assert decoded.tolist() == [[0.0, -5.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_top_agrees_with_sorting(fraction: float) -> None:
    x = torch.randn(2, 5003)
    random, compressor = PublicRandomness(1, [0, 1]), TopK(fraction)
    decoded = compressor.decode(compressor.encode(x, random, 0), 5003, random, 0)
    kept = torch.topk(x.abs(), compressor.num_kept(5003), dim=1).indices
    assert torch.equal(decoded, torch.zeros_like(x).scatter(1, kept, x.gather(1, kept)))


def test_top_refuses_impossible_positions() -> None:
    random, compressor = PublicRandomness(1, [6]), TopK(0.01)
    wire = compressor.encode(torch.randn(1, 1000), random, 0)
    wire[0, 40:] = 0
    with pytest.raises(WireError, match="sender 6 in round 4"):
        compressor.decode(wire, 1000, random, 4)
