"""One example adds at most clip_norm, also where its factor or product is below 2^-126."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import clipping_engine
from dpcsgp.privacy.passes import SUM_SLACK, PassShape


def _length(module: nn.Module, row: Tensor, clip: float) -> float:
    """Return the length of what one row adds under the squared error, in clip norms."""
    inputs, present = torch.zeros(1, 16, *row.shape), torch.zeros(1, 16, dtype=torch.bool)
    inputs[0, 0], present[0, 0] = row, True
    engine = clipping_engine(module, lambda outputs, targets: (outputs[:, 0] - targets).square())
    model_1D = ParameterLayout.of(module).flatten(module)[None]
    total_1D = engine.clipped_sum(
        model_1D, inputs, torch.zeros(1, 16), present, clip, PassShape(16)
    )
    return float(total_1D.double().norm()) / clip


@pytest.mark.parametrize("clip", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_rows_of_any_size_are_clipped(kind: str, clip: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 1)] if kind == "linear" else [nn.Conv1d(1, 1, 4), nn.Flatten()]
    row = torch.ones(4) if kind == "linear" else torch.ones(1, 4)
    sizes = torch.logspace(18, 30, 500, dtype=torch.float64).tolist()
    assert max(_length(nn.Sequential(*layers), row * size, clip) for size in sizes) <= 1 + SUM_SLACK
