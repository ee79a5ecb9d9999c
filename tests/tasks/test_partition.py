"""A partition deals every example to exactly one node, the same way every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcsgp.errors import ConfigError
from dpcsgp.tasks.partition import partition

LABELS = np.random.default_rng(0).integers(0, 10, 1003)
SPECS = ["iid", "dirichlet:0.5", "dirichlet:0.001", "dirichlet:100", "shards:1", "shards:2"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_nodes", [1, 7, 10])
def test_every_example_goes_to_exactly_one_node(spec: str, num_nodes: int) -> None:
    parts = partition(LABELS, num_nodes, spec, seed=3)
    assert len(parts) == num_nodes
    assert all(len(part) >= 1 and part.dtype == np.int64 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    num_nodes=st.integers(1, 12),
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_small_data_is_dealt_out_or_refused(
    labels: list[int], num_nodes: int, spec: str, seed: int
) -> None:
    pieces = num_nodes * (2 if spec == "shards:2" else 1)
    if len(labels) < pieces:
        with pytest.raises(ConfigError, match="use at most"):
            partition(np.array(labels), num_nodes, spec, seed)
    else:
        parts = partition(np.array(labels), num_nodes, spec, seed)
        assert min(map(len, parts)) >= 1
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("spec", SPECS)
def test_same_seed_same_deal(spec: str) -> None:
    first, again, other = (partition(LABELS, 5, spec, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all(len(a) == len(b) and (a == b).all() for a, b in zip(first, other, strict=True))


def test_even_sizes_differ_by_at_most_one_and_labels_are_mixed() -> None:
    parts = partition(LABELS, 10, "iid", seed=0)
    assert {len(part) for part in parts} == {100, 101}
    assert all(len(np.unique(LABELS[part])) >= 8 for part in parts)


def test_shards_show_each_node_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    for part in partition(labels, 10, "shards:2", seed=0):
        assert len(part) == 100
        assert len(np.unique(labels[part])) <= 2


def test_small_concentration_is_more_skewed() -> None:
    def largest_share(spec: str) -> float:
        parts = partition(LABELS, 10, spec, seed=0)
        return float(np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts]))

    assert (
        largest_share("dirichlet:0.1")
        > largest_share("dirichlet:1")
        > largest_share("dirichlet:100")
    )
    assert largest_share("dirichlet:100") < 0.25


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("even", "choose from 'iid'"),
        ("dirichlett:0.5", "did you mean 'dirichlet'"),
        ("dirichlet:0", "try 'dirichlet:0.5'"),
        ("dirichlet:-1", "above 0"),
        ("dirichlet:inf", "above 0"),
        ("dirichlet", "above 0"),
        ("shards:1.5", "try 'shards:2'"),
        ("shards:0", "whole number"),
        ("shards:nan", "whole number"),
        ("iid:3", "choose from"),
    ],
)
def test_wrong_specs_name_value_and_remedy(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"task.partition = '{spec}'") as caught:
        partition(np.zeros(9, np.int64), 2, spec, seed=0)
    assert words in str(caught.value)


def test_more_nodes_than_examples_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="3 examples cannot be cut into 4 parts; use at most 3 nodes"
    ):
        partition(np.zeros(3, np.int64), 4, "iid", seed=0)
    with pytest.raises(ConfigError, match="at least one node"):
        partition(np.zeros(3, np.int64), 0, "iid", seed=0)
