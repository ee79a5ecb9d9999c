"""The law of noise that cancels agrees with a direct likelihood ratio, for the worst colluders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from dpcsgp.errors import ConfigError
from dpcsgp.privacy import effective_noise_multipliers
from dpcsgp.privacy.cancelling import LARGEST_GROUP, noise_groups


def direct(
    own: np.ndarray, shared: float, sensitivities: np.ndarray, colluders: int, node: int
) -> float:
    """Return the smallest 1 / sqrt(v' S^-1 v) over all sets of colluders, S from the streams.

    S = B B' where a column of B is one stream: a node's own, or a pair's with opposite signs.
    """
    active = [other for other in range(len(own)) if sensitivities[other] > 0]
    others = [other for other in active if other != node]
    found = []
    for out in itertools.combinations(others, min(colluders, len(others))):
        honest = [other for other in active if other not in out]
        columns = [own[i] * np.eye(len(own))[i] for i in honest]
        for i, j in itertools.combinations(honest, 2):
            columns.append(shared * (np.eye(len(own))[i] - np.eye(len(own))[j]))
        streams = np.stack(columns, axis=1)[honest]
        covariance = streams @ streams.T
        moved = sensitivities[node] * (np.array(honest) == node)
        found.append(1 / math.sqrt(moved @ np.linalg.solve(covariance, moved)))
    return min(found)


@pytest.mark.parametrize("seed", range(200))
def test_the_law_is_the_likelihood_ratio_for_the_worst_colluders(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 8))
    own = random.uniform(0.2, 3.0, size)
    sensitivities = random.uniform(0.1, 2.0, size) * (random.random(size) > 0.15)
    shared = float(random.choice([0.0, 0.1, 1.0, 8.0]))
    colluders = int(random.integers(0, size + 1))
    multipliers = effective_noise_multipliers(
        own.tolist(), shared, sensitivities.tolist(), colluders
    )
    for node in range(size):
        if sensitivities[node] == 0:
            assert multipliers[node] == math.inf
        else:
            wanted = direct(own, shared, sensitivities, colluders, node)
            assert multipliers[node] == pytest.approx(wanted, rel=1e-9)


def test_without_shared_noise_or_honest_partners_only_the_own_noise_counts() -> None:
    own, sensitivities = [1.0, 2.0, 0.5], [0.5, 0.25, 1.0]
    alone = [2.0, 8.0, 0.5]
    assert effective_noise_multipliers(own, 0.0, sensitivities, 0) == pytest.approx(alone)
    assert effective_noise_multipliers(own, 9.0, sensitivities, 2) == pytest.approx(alone)
    assert effective_noise_multipliers(own, 9.0, sensitivities, "all") == pytest.approx(alone)


def test_more_honest_partners_hide_better() -> None:
    found = [effective_noise_multipliers([1.0] * 10, 3.0, [1.0] * 10, k)[0] for k in range(10)]
    assert all(fewer > more for fewer, more in itertools.pairwise(found))
    # Ten honest nodes: the sum has the noise of one place, 1 / sqrt(10) of each node's multiplier.
    assert found[0] == pytest.approx(1 / math.sqrt(0.1 + 0.9 / 91))


def test_a_huge_shared_noise_loses_no_digits() -> None:
    found = effective_noise_multipliers([1.0] * 64, 1e9, [1.0] * 64, 0)
    assert found == pytest.approx([8.0] * 64, rel=1e-12)


def test_large_runs_are_cut_into_groups_that_all_colluders_may_sit_in() -> None:
    groups = noise_groups(1000)
    assert max(map(len, groups)) <= LARGEST_GROUP
    assert [node for group in groups for node in group] == list(range(1000))
    several = effective_noise_multipliers([1.0] * 1000, 5.0, [1.0] * 1000, 3)
    sizes = [len(group) for group in groups for _ in group]
    for size in set(sizes):
        alike = effective_noise_multipliers([1.0] * size, 5.0, [1.0] * size, 3)[0]
        found = {m for m, s in zip(several, sizes, strict=True) if s == size}
        assert found == {alike}


def test_no_noise_of_anybodys_own_is_no_privacy() -> None:
    assert effective_noise_multipliers([0.0, 0.0], 5.0, [1.0, 1.0], 0) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("own", "shared", "sensitivities", "colluders", "words"),
    [
        ([1.0], 0.0, [1.0, 1.0], 0, "one per node"),
        ([-1.0], 0.0, [1.0], 0, "own = -1.0"),
        ([1.0], math.inf, [1.0], 0, "shared = inf"),
        ([1.0], 0.0, [1.0], -1, "max_colluders = -1"),
    ],
)
def test_bad_values_are_refused(
    own: list[float], shared: float, sensitivities: list[float], colluders: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        effective_noise_multipliers(own, shared, sensitivities, colluders)


def hidden(covariance: np.ndarray, node: int) -> float:
    """Return the variance of a node's noise given all other releases."""
    return float(1 / np.linalg.inv(covariance)[node, node])


def covariance_of(
    own: np.ndarray, shared: float, broken: Sequence[tuple[int, int]], left_out: bool = False
) -> np.ndarray:
    """Return S from its streams; a broken pair has two, or one if an end leaves its noise out."""
    unit, columns = np.eye(len(own)), [own[i] * np.eye(len(own))[i] for i in range(len(own))]
    for i, j in itertools.combinations(range(len(own)), 2):
        if (i, j) not in broken:
            columns.append(shared * (unit[i] - unit[j]))
            continue
        columns.append(shared * unit[i])
        if not left_out:
            columns.append(shared * unit[j])
    streams = np.stack(columns, axis=1)
    return streams @ streams.T


# One node with hardly any noise, one with all of it, equal ones, and what is between.
WORST_OWN = [
    [1e-3, 1.0, 1.0, 1.0],
    [1e3, 1e-2, 1e-2, 1e-2],
    [1.0, 1.0, 1.0, 1.0],
    [1e-2, 1e-1, 1.0, 10.0],
]


@pytest.mark.parametrize("own", WORST_OWN)
@pytest.mark.parametrize("shared", [1e-2, 1.0, 100.0])
def test_pairs_that_fail_to_cancel_hide_everybody_no_less(own: list[float], shared: float) -> None:
    """All 64 sets of pairs among four nodes, and every set of nodes that are silent."""
    noise, pairs = np.array(own), list(itertools.combinations(range(4), 2))
    promised = effective_noise_multipliers(own, shared, [1.0] * 4, 0)
    for count in range(len(pairs) + 1):
        for broken in itertools.combinations(pairs, count):
            found = covariance_of(noise, shared, broken)
            for silent in itertools.chain.from_iterable(
                itertools.combinations(range(4), size) for size in range(4)
            ):
                heard = [node for node in range(4) if node not in silent]
                seen = found[np.ix_(heard, heard)]
                for place, node in enumerate(heard):
                    assert math.sqrt(hidden(seen, place)) >= promised[node] * (1 - 1e-6)


def test_noise_that_one_end_leaves_out_would_hide_it_less() -> None:
    """Why whoever cannot agree draws all the same: the theorem is not about any change."""
    own = np.array([10.0, 1e-2, 1e-2])
    promised = effective_noise_multipliers(own.tolist(), 1.0, [1.0] * 3, 0)
    found = covariance_of(own, 1.0, [(0, 1), (0, 2)], left_out=True)
    assert math.sqrt(hidden(found, 1)) < 0.1 * promised[1]


def test_pairs_that_fail_at_most_double_what_the_lattice_reckons_with() -> None:
    for size in (2, 3, 5, 8):
        pairs = list(itertools.combinations(range(size), 2))
        half = range(size // 2)
        cuts = [[], pairs, [pair for pair in pairs if (pair[0] in half) == (pair[1] in half)]]
        for broken in cuts:
            gram = covariance_of(np.zeros(size), 1.0, broken)
            assert np.linalg.eigvalsh(gram)[-1] <= max(size, 2 * (size - 1)) + 1e-9
