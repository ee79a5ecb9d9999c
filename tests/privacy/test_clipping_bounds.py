"""No example contributes more than the clip norm, whatever rounding does to its gradient."""

from __future__ import annotations

import pytest
import torch
from reference_clipping import layerwise
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine

SLACK = 2.0**-20  # one example alone has no companions to share rounding with


class Difference(nn.Module):
    """Compares two positions of a sequence: their common part cancels in the gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.linear(inputs)
        return hidden[:, 0] - hidden[:, 1]


class Tied(nn.Module):
    """Looks a row up and multiplies by the same weight: both gradients nearly cancel."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)
        self.linear.weight = self.table.weight
        self.register_buffer("direction", offset * (1 + torch.rand(64)))
        self.register_buffer("rest", torch.randn(64))

    def forward(self, inputs: Tensor) -> Tensor:
        direction, rest = self.get_buffer("direction"), self.get_buffer("rest")
        products = self.linear(direction.expand(len(inputs), -1)).gather(1, inputs)
        return (self.table(inputs[:, 0]) * (direction + rest)).sum(1, keepdim=True) - products


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def longest(
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    clip: float,
    views: int = 1,
    most_rows: int | None = None,
) -> float:
    """Return the largest norm of one example's clipped gradient, as a multiple of the clip norm."""
    engine, layout = clipping_engine(module, squared_error, views), ParameterLayout.of(module)
    if most_rows is not None:
        engine = layerwise(module, squared_error, views, most_rows)
    models_ND = layout.flatten(module)[None]
    present = torch.ones(1, 1, dtype=torch.bool)
    sums = [
        engine.clipped_sum(models_ND, example[None, None], target[None, None], present, clip)
        for example, target in zip(inputs, targets, strict=True)
    ]
    return max(float(total.double().norm()) for total in sums) / clip


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("clip", [1.0, 0.01])
@pytest.mark.parametrize("most_rows", [64, 1])
def test_terms_that_cancel_do_not_slip_through(offset: float, clip: float, most_rows: int) -> None:
    torch.manual_seed(0)
    inputs = offset * torch.randn(30, 1, 64).sign() + torch.randn(30, 2, 64)
    assert (
        longest(Difference(64), inputs, torch.zeros(30, 8), clip, most_rows=most_rows) <= 1 + SLACK
    )


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
def test_uses_of_a_shared_weight_that_cancel_do_not_slip_through(offset: float) -> None:
    torch.manual_seed(0)
    inputs = torch.randint(8, (30, 1))
    assert longest(Tied(offset), inputs, 1e3 * torch.randn(30, 1), 1e-2) <= 1 + SLACK


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_views_that_cancel_do_not_slip_through(offset: float) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 1))
    base = offset + torch.randn(30, 16)
    inputs = torch.stack([base, base + 1e-3 * torch.randn(30, 16)], dim=1)
    with torch.no_grad():
        targets = module(inputs).mean(dim=1)
    assert longest(module, inputs, targets, 1e-3, views=2) <= 1 + SLACK


def test_half_precision_of_the_caller_does_not_reach_the_gradients() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Linear(64, 8)), 10 * torch.randn(20, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert longest(module, inputs, torch.zeros(20, 8), 1.0) <= 1 + SLACK
