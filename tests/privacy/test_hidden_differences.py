"""The check before the first release finds what the loss or the public rows would hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import CheckedEngine, clipping_engine
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows

Loss = Callable[[Tensor, Tensor], Tensor]


def _checked(
    module: nn.Module, loss: Loss, inputs: Tensor, nodes: int, batch: int
) -> tuple[CheckedEngine, bool]:
    mechanism = GaussianMechanism(1.0, (1.0,) * nodes, (batch,) * nodes, (1000,) * nodes)

    def by_shape(fixed: bool) -> dict[PassShape, int]:
        groups = replace(mechanism, fixed_places=fixed).rows_of_same_shape()
        return {shape: len(rows) for shape, rows in groups.items()}

    model_D = ParameterLayout.of(module).flatten(module)
    return engine_with_equal_rows(
        clipping_engine(module, loss), model_D, (inputs, torch.randn(64)), by_shape
    )


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


def test_a_loss_of_constant_slope_hides_no_difference() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Linear(8, 1)), torch.randn(64, 8)
    answers = [_checked(module, loss, inputs, 2, 300)[1] for loss in (_squared, _absolute)]
    assert answers[0] == answers[1]


def test_one_missing_value_in_the_test_data_hides_no_difference() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, rows: Tensor) -> Tensor:
            outputs = self.linear(rows)
            return outputs - 0.5 * outputs.mean(0)

    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    inputs[17, 3] = float("nan")
    engine = _checked(Mixing(), _squared, inputs, 1, 32)[0]
    assert engine.slower() is None  # one row at a time


def test_many_parameters_without_closed_form_can_be_checked() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.ConvTranspose1d(64, 512, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(512, 1)
    )
    _checked(module, _squared, torch.randn(64, 64, 5), 1, 32)


def test_a_branch_on_the_brightest_byte_is_found() -> None:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.linear(rows / 255 if int(rows.max()) > 1 else rows.float())

    torch.manual_seed(0)
    bright = torch.randint(0, 256, (64, 8), dtype=torch.uint8)
    engine = _checked(Bytes(), _squared, bright, 1, 32)[0]
    assert engine.slower() is None  # one row at a time


def test_a_branch_at_a_middling_size_is_found() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, rows: Tensor) -> Tensor:
            largest = rows.abs().max()
            return self.linear(rows / largest if 5 < float(largest) < 1e6 else rows)

    torch.manual_seed(0)
    engine = _checked(Scaled(), _squared, torch.randn(64, 8), 1, 32)[0]
    assert engine.slower() is None


def test_a_parity_of_the_companions_is_found() -> None:
    """One set of other companions leaves a parity as it was half of the time.

    Several hardly ever do.
    """

    class Parity(nn.Module):
        def __init__(self, column: int) -> None:
            super().__init__()
            self.linear, self.column = nn.Linear(8, 2), column

        def forward(self, rows: Tensor) -> Tensor:
            value = rows[:, self.column % 8].abs()
            odd = (
                (value > 0.5 + 0.02 * self.column) & (value < 0.7 + 0.02 * self.column)
            ).sum() % 2
            return self.linear(rows) * (1 + 2.0**-20 * odd)

    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    for column in range(24):
        # one row at a time
        assert _checked(Parity(column), _squared, inputs, 1, 64)[0].slower() is None
