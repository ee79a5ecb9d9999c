"""Rounded normal numbers have the law of round(scale z), word by word and in the mass."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpcsgp.errors import ConfigError
from dpcsgp.kernels.rounded_normal import look_up, rounded_normals, table_of
from dpcsgp.randomness import PublicRandomness

SCALES = [0.3, 1.0, 13.7, 150.0, 2000.0]


def stream(step: int = 0) -> Callable[[str, int], np.ndarray]:
    random = PublicRandomness(5, [0])
    return lambda purpose, num_bytes: random.row_bytes(purpose, step, 0, num_bytes)


def drawn(scale: float, dim: int, step: int = 0) -> np.ndarray:
    out_D = np.empty(dim, dtype=np.int32)
    rounded_normals(scale, dim, stream(step), out_D)
    return out_D


def slow_value(v: int, scale: float) -> int:
    """Count thresholds 2^63 P(|round(scale z)| >= k) above v, one after the other."""
    k = 1
    while v < min(int(math.erfc((k - 0.5) / (scale * math.sqrt(2))) * 2.0**63), 2**63 - 1):
        k += 1
    return k - 1


@pytest.mark.parametrize("scale", SCALES)
def test_every_word_gives_the_value_of_its_63_bits(scale: float) -> None:
    table = table_of(scale)
    rng = np.random.default_rng(0)
    # Undecided words are rare: all of them, beside random ones; and the rarest words of all.
    undecided = np.flatnonzero(table.values < 0)[:400]
    words_D = np.concatenate([undecided, rng.integers(0, 2**16, 300), [0, 1, 2**15, 2**16 - 1]])
    further_R = rng.integers(0, 2**64, 900, dtype=np.uint64)
    further_R[:2] = 0, 2**64 - 1
    out_D, used = np.empty(len(words_D), dtype=np.int32), np.zeros(1, dtype=np.int64)
    look_up(words_D.astype(np.uint16), further_R, table.values, table.thresholds_K, out_D, used)
    taken = 0
    for word, found in zip(words_D.tolist(), out_D.tolist(), strict=True):
        index = word & 0x7FFF
        low = 0
        if table.values[index] < 0:
            low, taken = int(further_R[taken]) & (2**48 - 1), taken + 1
        sign = -1 if word >> 15 else 1
        assert found == sign * slow_value((index << 48) | low, scale)
    assert int(used[0]) == taken > 0


@pytest.mark.parametrize("scale", SCALES)
def test_the_mass_of_every_value_is_that_of_a_rounded_normal(scale: float) -> None:
    thresholds = table_of(scale).thresholds_K
    for k in (1, 2, math.ceil(scale), math.ceil(3 * scale), math.ceil(6 * scale)):
        mass = int(thresholds[k - 1]) / 2**63
        assert mass == pytest.approx(math.erfc((k - 0.5) / (scale * math.sqrt(2))), rel=1e-12)
    # the last value that any 63-bit number reaches lies near nine standard deviations
    assert len(thresholds) > 8.9 * scale or scale < 1


@pytest.mark.parametrize("scale", [0.8, 13.7, 150.0])
def test_moments_and_independence(scale: float) -> None:
    values = drawn(scale, 400_000).astype(np.float64)
    variance = scale**2 + 1 / 12 if scale > 1 else values.var()
    assert abs(values.mean()) < 5 * math.sqrt(variance / 400_000)
    assert values.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / 400_000))
    assert (values**4).mean() == pytest.approx(3 * values.var() ** 2, rel=0.1)
    other = drawn(scale, 400_000, step=1)
    for left, right in ((values[1:], values[:-1]), (values, other), (values**2, other**2)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(400_000)


def test_the_sign_is_independent_of_the_size() -> None:
    values = drawn(20.0, 200_000)
    positive, negative = np.abs(values[values > 0]), np.abs(values[values < 0])
    assert abs(len(positive) - len(negative)) < 5 * math.sqrt(200_000)
    error = math.sqrt(2 * 400 / len(positive))
    assert positive.mean() == pytest.approx(negative.mean(), abs=5 * error)


def test_too_few_further_words_are_fetched_again_from_the_same_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = drawn(150.0, 5000)
    table = table_of(150.0)
    monkeypatch.setattr(
        "dpcsgp.kernels.rounded_normal.table_of", lambda scale: table._replace(undecided=0.0)
    )
    assert np.array_equal(drawn(150.0, 5000), expected)


def test_a_scale_beyond_the_table_is_refused() -> None:
    for scale in (0.0, -1.0, 2001.0, math.nan):
        with pytest.raises(ConfigError, match="scale"):
            table_of(scale)
