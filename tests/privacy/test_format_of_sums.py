"""The format of a released sum is public: neither a row that raises nor a batch that needs one pass more may change it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping import clipping_engine
from dpcsgp.privacy.passes import PassShape


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.isnan().any():
        raise ValueError("a target is missing")
    return (outputs[:, 0] - targets).square()


def _sum(targets_1P: Tensor, drawn: int) -> Tensor:
    torch.manual_seed(0)
    module, shape = nn.Sequential(nn.Linear(3, 1)), PassShape(16)
    width = shape.width(drawn)
    present = (torch.arange(width) < drawn)[None]
    model_1D = ParameterLayout.of(module).flatten(module)[None]
    engine = clipping_engine(module, _loss)
    return engine.clipped_sum(model_1D, torch.randn(1, width, 3), targets_1P[:, :width].clone(), present, 1.0, shape)


def test_a_row_that_raises_does_not_change_the_format() -> None:
    broken = torch.zeros(1, 32)
    broken[0, 3] = float("nan")
    assert _sum(broken, 16).dtype is _sum(torch.zeros(1, 32), 16).dtype


def test_a_pass_more_does_not_change_the_format() -> None:
    assert _sum(torch.zeros(1, 32), 17).dtype is _sum(torch.zeros(1, 32), 16).dtype
