"""Squared lengths never fall below the true ones, from the smallest to the largest numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from dpcsgp.privacy.clipping.squares import blank_infinite_rows_, squared_norms


@pytest.mark.parametrize("size", [1e-45, 1e-38, 2.6e-23, 1.0, 1e19, 3e38])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1001])
def test_float32_squares_are_exact_to_double_precision(size: float, length: int) -> None:
    rows = (
        (size * (0.5 + torch.rand(3, length, generator=torch.Generator().manual_seed(0))))
        .float()
        .clamp_max(3.4e38)
    )
    rows[0, -1] = size  # the last number counts like the others
    exact = [float(sum(Fraction(value) ** 2 for value in row)) for row in rows.tolist()]
    assert squared_norms(rows).tolist() == pytest.approx(exact, rel=1e-12, abs=0.0)
    alone = torch.zeros(1, length)
    alone[0, -1] = size
    assert float(squared_norms(alone)) == float(alone[0, -1].double() ** 2) > 0


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-160, 1.0, 1e150])
def test_double_precision_rows_never_pass_for_shorter_than_they_are(size: float) -> None:
    rows = torch.full((2, 5), size, dtype=torch.float64)
    for square in squared_norms(rows).tolist():
        assert math.sqrt(square) >= math.sqrt(5) * size * (1 - 1e-15)


def test_rows_that_are_not_finite_have_no_finite_square() -> None:
    rows = torch.tensor([[1.0, float("inf")], [float("nan"), 0.0], [1.0, 2.0]])
    assert squared_norms(rows).isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_rows_that_are_not_finite_are_blanked(dtype: torch.dtype) -> None:
    rows = torch.tensor(
        [[1.0, float("inf")], [3.4e38, -3.4e38], [float("nan"), 0.0], [1e-45, 2.0]], dtype=dtype
    )
    kept = rows.clone()
    blank_infinite_rows_(rows, squared_norms(rows))
    assert torch.equal(rows[[0, 2]], torch.zeros(2, 2, dtype=dtype))
    assert torch.equal(rows[[1, 3]], kept[[1, 3]])
