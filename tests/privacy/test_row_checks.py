"""The check before the first release finds bits that follow a row's companions or place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.layerwise import LayerwiseEngine
from dpcsgp.privacy.clipping.linear_stack import LinearStackEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows

LAST_BITS = 1e-7


class Spoiled(nn.Module):
    """A linear layer whose outputs are spoiled in the last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * (1 + LAST_BITS * self.error(inputs))

    def error(self, inputs: Tensor) -> Tensor:
        return torch.zeros(())


class ByPlace(Spoiled):
    def error(self, inputs: Tensor) -> Tensor:
        return torch.arange(len(inputs))[:, None] % 7


class ByEndOfBatch(Spoiled):
    def error(self, inputs: Tensor) -> Tensor:
        return 3.0 * (torch.arange(len(inputs))[:, None] == len(inputs) - 1)


class ByCompanions(Spoiled):
    def error(self, inputs: Tensor) -> Tensor:
        return inputs.sum(dim=0).mean().sign() * 3


class ByExtremes(Spoiled):
    """Another branch for everybody as soon as one value is extreme."""

    def error(self, inputs: Tensor) -> Tensor:
        return 3.0 * (inputs.abs().max() > 1e6)


class ByTheMoon(Spoiled):
    def __init__(self) -> None:
        super().__init__()
        self.nights = itertools.count()

    def error(self, inputs: Tensor) -> Tensor:
        return torch.tensor(3.0 * (next(self.nights) % 5))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, None]).square().sum(dim=1)


def checked(
    module: nn.Module, shape: PassShape = PassShape(32, 2), num_nodes: int = 3
) -> tuple[object, bool]:
    torch.manual_seed(0)
    engine, fixed = engine_with_equal_rows(
        clipping_engine(module, loss),
        ParameterLayout.of(module).flatten(module),
        (torch.randn(20, 5), torch.randn(20)),
        lambda fixed: {replace(shape, fixed=fixed): num_nodes},
    )
    return engine.engine, fixed


def test_honest_rows_keep_the_fast_engine() -> None:
    engine, _ = checked(Spoiled())
    assert isinstance(engine, LayerwiseEngine) and engine._most_rows == 64
    engine, _ = checked(nn.Sequential(nn.Linear(5, 3)))
    assert isinstance(engine, LinearStackEngine)


@pytest.mark.parametrize("module", [ByPlace, ByEndOfBatch])
def test_rows_that_follow_their_place_get_fixed_places(module: type[nn.Module]) -> None:
    engine, fixed = checked(module())
    assert isinstance(engine, LayerwiseEngine) and engine._most_rows == 64 and fixed


@pytest.mark.parametrize("module", [ByCompanions, ByExtremes])
def test_rows_that_follow_their_companions_pass_one_at_a_time(module: type[nn.Module]) -> None:
    engine, fixed = checked(module())
    assert isinstance(engine, LayerwiseEngine) and engine._most_rows == 1 and not fixed


def test_rows_that_do_not_repeat_themselves_are_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match="the output of the model does not repeat itself bit for bit"
    ):
        checked(ByTheMoon())


def test_masks_of_dropout_are_no_difference() -> None:
    with pytest.warns(UserWarning, match="Dropout"):
        engine, _ = checked(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    assert isinstance(engine, LinearStackEngine)
    assert engine._module.training
