"""Numbers on the page: never more exact, never kinder than they are."""

from __future__ import annotations

import math

import pytest

from dpcsgp.report.formatting import (
    DASH,
    as_number,
    duration,
    epsilon,
    megabytes,
    plain_text,
    score,
    significant,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.41001, "0.41"),
        (40.71, "40.7"),
        (163.646, "164"),
        (1234.5, "1,234"),
        (1e-4, "1e-4"),
        (3.14e-5, "3.14e-5"),
    ],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_what_is_missing_is_a_dash_and_infinity_a_sign() -> None:
    assert [
        significant(math.nan),
        megabytes(math.nan),
        duration(math.nan),
        score("accuracy", math.nan),
    ] == [DASH] * 4
    assert [significant(math.inf), epsilon(math.inf)] == ["∞", "∞"]
    assert plain_text(None) == DASH


@pytest.mark.parametrize("value", [0.49871, 0.5, 0.500001, 1.515, 345.2, 0.0123456, 99.99, 20.3])
def test_eps_is_never_rounded_down(value: float) -> None:
    shown = float(epsilon(value).replace(",", ""))
    assert value * (1 - 1e-8) <= shown <= value * 1.011


def test_eps_that_needs_no_rounding_stays() -> None:
    assert [epsilon(value) for value in (0.5, 0.3, 0.29, 8.0, 345.0)] == [
        "0.5",
        "0.3",
        "0.29",
        "8",
        "345",
    ]


def test_json_values_are_read_as_numbers() -> None:
    assert as_number("inf") == math.inf
    assert as_number(3) == 3.0
    for value in (None, True, "word", [1], {}, "nan"):
        assert math.isnan(as_number(value))


def test_units() -> None:
    assert megabytes(410_010) == "0.41\xa0MB"
    assert megabytes(0) == "0\xa0MB"
    assert score("accuracy", 0.8914) == "89.1\xa0%"
    assert score("loss", 0.12345) == "0.1235"
    assert [duration(seconds) for seconds in (4.21, 42, 192, 3900)] == [
        "4.2\xa0s",
        "42\xa0s",
        "3 min 12 s",
        "1 h 5 min",
    ]


def test_lists_of_equal_settings_shrink() -> None:
    assert plain_text([0.5, 0.5]) == "0.5 at every node"
    assert plain_text([0.5, 1.0]) == "0.5, 1"
