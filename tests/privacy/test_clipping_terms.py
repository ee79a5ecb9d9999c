"""The factor that scales an example's gradient."""

from __future__ import annotations

import torch

from dpcsgp.privacy.terms import clip_factors


def test_an_example_without_a_finite_norm_gets_the_factor_zero() -> None:
    squares = torch.tensor([float("nan"), float("inf"), 0.0, 4.0, 0.25], dtype=torch.float64)
    assert clip_factors(squares, 1.0).tolist() == [0.0, 0.0, 1.0, 0.5, 1.0]
