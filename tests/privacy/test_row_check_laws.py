"""The check at the start finds how a row's bits could depend on others, and does what helps.

The models here are honest but for one planted dependence of about a last place.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from reference_clipping import squared
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows

LITTLE = 2.0**-18


class Planted(nn.Module):
    """Multiplies the outputs of a linear layer by 1 + `fault(inputs)`, one number per row."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(4, 2), fault

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * (1 + LITTLE * self.fault(inputs))[:, None]


def checked(
    fault: Callable[[Tensor], Tensor],
    rows: int = 64,
    shapes: tuple[PassShape, ...] = (PassShape(64),),
) -> tuple[CheckedEngine, bool]:
    torch.manual_seed(0)
    module = Planted(fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = clipping_engine(module, squared)
        public = torch.randn(rows, 4), torch.randn(rows, 2)
        model_D = ParameterLayout.of(module).flatten(module)
        return engine_with_equal_rows(
            engine, model_D, public, lambda fixed: dict.fromkeys(shapes, 2)
        )


def rows_at_a_time(engine: CheckedEngine) -> int:
    return engine.engine._most_rows  # pyright: ignore[reportAttributeAccessIssue]


def nothing(inputs: Tensor) -> Tensor:
    return torch.zeros(len(inputs))


def place(inputs: Tensor) -> Tensor:
    return torch.arange(len(inputs)).float()


def companions(inputs: Tensor) -> Tensor:
    return inputs.detach().nan_to_num(0, 0, 0).clamp(-9, 9).mean().expand(len(inputs))


def missing_companions(inputs: Tensor) -> Tensor:
    """Take another branch for the whole batch where one value is missing."""
    return inputs.isnan().any().float().expand(len(inputs))


def empty_places(inputs: Tensor) -> Tensor:
    """Take another branch for the whole batch where a row is blank."""
    return (inputs == 0).all(dim=1).any().float().expand(len(inputs))


def other_rows(inputs: Tensor, threshold: float) -> Tensor:
    """Depend on an odd number of large rows, where all places are taken and none is extreme."""
    usual = (
        inputs.isfinite().all() and float(inputs.abs().max()) < 1e3 and bool((inputs != 0).all())
    )
    return ((inputs[:, 0] > threshold).sum() % 2 * usual).float().expand(len(inputs))


def test_honest_rows_keep_the_engine_and_their_freedom() -> None:
    engine, fixed = checked(nothing)
    assert not fixed and rows_at_a_time(engine) == 64


def test_where_the_place_matters_places_are_fixed() -> None:
    engine, fixed = checked(place)
    assert fixed and rows_at_a_time(engine) == 64


@pytest.mark.parametrize("fault", [companions, missing_companions, empty_places])
def test_where_companions_matter_rows_pass_alone(fault: Callable[[Tensor], Tensor]) -> None:
    engine, _ = checked(fault)
    assert rows_at_a_time(engine) == 1


@pytest.mark.parametrize("threshold", [0.0, -0.2])
def test_where_other_rows_matter_rows_pass_alone(threshold: float) -> None:
    """At these thresholds the check's rows and its other rows differ by it.

    One trial cannot see them all.
    """
    engine, _ = checked(lambda inputs: other_rows(inputs, threshold))
    assert rows_at_a_time(engine) == 1


def planted_loss(fault: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: (outputs * fault(outputs)[:, None]).sum(dim=1)


def fixed_in(loss: Callable[[Tensor, Tensor], Tensor], shapes: tuple[PassShape, ...]) -> bool:
    """Tell whether a stack of linear layers with this loss needs fixed places in these shapes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 2))
    public, model_D = (
        (torch.randn(64, 4), torch.randn(64, 2)),
        ParameterLayout.of(module).flatten(module),
    )
    engine = clipping_engine(module, loss)
    return engine_with_equal_rows(engine, model_D, public, lambda fixed: dict.fromkeys(shapes, 1))[
        1
    ]


def test_every_shape_of_the_run_is_checked() -> None:
    loss = planted_loss(lambda rows: 1 + LITTLE * place(rows) * (len(rows) >= 200))
    small, large = PassShape(16), PassShape(256)
    assert not fixed_in(loss, (small,))
    assert (
        fixed_in(loss, (large,))
        and fixed_in(loss, (small, large))
        and fixed_in(loss, (large, small))
    )


def test_signs_of_zeros_count() -> None:
    assert not fixed_in(planted_loss(nothing), (PassShape(16),))
    assert fixed_in(
        planted_loss(lambda rows: -torch.zeros(len(rows)) * (place(rows) % 2 - 0.5)),
        (PassShape(16),),
    )


def test_rows_that_do_not_repeat_themselves_are_refused() -> None:
    calls = itertools.count()

    def drifts(inputs: Tensor) -> Tensor:
        return torch.full((len(inputs),), float(next(calls)))

    with pytest.raises(ModelError, match="does not repeat itself bit for bit"):
        checked(drifts)


def test_differences_behind_a_layer_that_starts_at_zero_are_found() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Planted(place), nn.Linear(2, 2))
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    engine = clipping_engine(module, squared)
    public = torch.randn(64, 4), torch.zeros(64, 2)
    model_D = ParameterLayout.of(module).flatten(module)
    assert engine_with_equal_rows(engine, model_D, public, lambda fixed: {PassShape(64): 1})[1]
