"""The law of noise that cancels agrees with a direct likelihood ratio, for the worst colluders."""

from __future__ import annotations

import itertools
import math

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
