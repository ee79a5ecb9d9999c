"""An example's values, bit for bit, among other companions, in other places and sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.privacy.model_probes import (
    RowDependence,
    check_examples_independent,
    check_gradients_reach,
)
from dpcsgp.privacy.row_probes import RowProbe
from dpcsgp.privacy.sum_probes import check_reference, check_sums

EXAMPLE = torch.zeros(4), torch.tensor(0)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


class Layer(nn.Module):
    """Any function of a batch, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def within(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Layer(function)), nn.Linear(4, 3)
    )


def above(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x - x.mean(0) if len(x) > rows else x


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "5e-4 of the mean": lambda x: x + 5e-4 * x.mean(0),
    "1e-6 of the mean": lambda x: x + 1e-6 * x.mean(0),
    "bounded, 1e-6 of the output": lambda x: x * (1 + 1e-6 * torch.tanh(x.sum())),
    "only of huge companions": lambda x: x + (x.abs().max() >= 1) * 1e-3,
    "only of missing companions": lambda x: x * 2 if bool(x.isnan().any()) else x,
    "above 16 rows": above(16),
    "above 32 rows": above(32),
    "above 200 rows": above(200),
    "of huge companions above 200 rows": lambda x: x + (len(x) > 200) * (x.abs().max() >= 1) * 1e-3,
    "at 3 rows": lambda x: x - x.mean(0) if len(x) == 3 else x,
    "rows before": lambda x: x + 1e-5 * x.cumsum(0),
    "its place": lambda x: x * (1 + 1e-3 * torch.arange(len(x))[:, None]),
    "the number of rows": lambda x: x / len(x),
}


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_are_mixed_are_found_and_the_layer_named(name: str) -> None:
    with pytest.raises(ModelError, match=r"'1\.1' \(Layer\).*depends on the other"):
        check_examples_independent(within(MIXING[name]), torch.zeros(4))


def test_the_batch_size_of_the_run_is_probed() -> None:
    module = within(lambda x: x - x.mean(0) if len(x) == 300 else x)
    check_examples_independent(module, torch.zeros(4))
    with pytest.raises(ModelError, match=r"'1\.1' \(Layer\)"):
        check_examples_independent(module, torch.zeros(4), batch_sizes=[300])


class Backwards(torch.autograd.Function):
    """Leaves rows alone on the way forward and mixes their gradients a little."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, delta: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return delta + 1e-5 * delta.mean(0)


def test_gradients_that_are_mixed_are_found() -> None:
    module = within(Backwards.apply)
    check_examples_independent(module, torch.zeros(4))
    with pytest.raises(ModelError, match=r"'1\.0' \(Tanh\): the loss gradient"):
        check_gradients_reach(module, entropy, EXAMPLE)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "1e-6 of the mean": lambda losses, outputs: losses * (1 + 1e-6 * losses.detach().tanh().mean()),
    "above 100 rows": lambda losses, outputs: (
        losses / losses.detach().mean() if len(losses) > 100 else losses
    ),
    "gradient alone": lambda losses, outputs: (
        losses + 1e-5 * (outputs.sum() - outputs.detach().sum())
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_mixes_a_little_is_refused(name: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return LOSSES[name](entropy(outputs, targets), outputs)

    with pytest.raises(ModelError, match="depends on the other examples"):
        check_gradients_reach(nn.Linear(4, 3), loss, EXAMPLE)


def test_last_places_are_returned_and_not_refused() -> None:
    """A rounding that follows huge companions, as in a kernel with a slow path."""

    def last_place(x: Tensor) -> Tensor:
        return torch.where(x.abs().max() == 1, x * (1 + 2**-22), x)

    found = check_examples_independent(within(last_place), torch.zeros(4))
    assert RowDependence("1.1", "output", "companions", 11) in found
    assert {dependence.layer for dependence in found} == {"1.1"}


class Last(nn.Module):
    """The last position of a recurrent layer's or a transformer's output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.last = body, nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.body(inputs)
        return self.last((outputs[0] if isinstance(outputs, tuple) else outputs)[:, -1])


class TimeFirst(nn.Module):
    """Turns the axes for a layer that wants the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs.transpose(0, 1))[0].transpose(0, 1)


def convolutions() -> nn.Module:
    layers = (
        nn.Conv1d(5, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Flatten(),
        nn.LayerNorm(32),
    )
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(32, 3))


HONEST: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Last(nn.LSTM(4, 4, batch_first=True)),
    "LSTM, time first inside": lambda: Last(TimeFirst()),
    "attention": lambda: Last(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
    "convolutions": convolutions,
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_pass(name: str) -> None:
    example = torch.zeros(5, 4), torch.tensor(0)
    torch.manual_seed(0)
    module = HONEST[name]()
    check_examples_independent(module, example[0], batch_sizes=[50])
    check_gradients_reach(module, entropy, example, batch_sizes=[50])


@pytest.mark.parametrize("rows", [8, 16])
def test_a_number_of_rows_is_probed_for_the_engine(rows: int) -> None:
    """Elementwise arithmetic is the same in every place.

    A rounding that follows the place is told.
    """

    def batch(length: int, purpose: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(len(purpose))
        return torch.randn(length, 4, generator=generator), torch.zeros(length, 4)

    exact = nn.Sequential(Layer(lambda x: x + 1), Layer(lambda x: x * scale))
    scale = nn.Parameter(torch.full((4,), 2.0))
    probe = RowProbe(exact, square, batch, exact)
    probe.compare(rows)
    assert probe.found == ()
    exact.append(Layer(lambda x: x * (1 + 2**-22 * (torch.arange(len(x)) == 1)[:, None])))
    probe = RowProbe(exact, square, batch, exact)
    probe.compare(rows)
    assert probe.found[0] == RowDependence("2", "output", "place", rows)


def test_models_that_cannot_bear_extreme_values_pass() -> None:
    def strict(x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("not finite")
        return x

    check_examples_independent(within(strict), torch.zeros(4))
    check_gradients_reach(within(strict), entropy, EXAMPLE)


def clipped(batch: tuple[Tensor, Tensor], clip: float) -> Tensor:
    lengths = batch[0].norm(dim=1, keepdim=True)
    return (batch[0] * (clip / lengths).clamp(max=1)).sum(0)


SUMS: dict[str, Callable[[tuple[Tensor, Tensor], float], Tensor]] = {
    "divided by the number": lambda batch, clip: clipped(batch, clip) / len(batch[0]),
    "not clipped": lambda batch, clip: batch[0].sum(0),
    "clipped together": lambda batch, clip: clipped(
        (batch[0].sum(0, keepdim=True), batch[1]), clip
    ),
    "mixed in larger batches": lambda batch, clip: (
        clipped(batch, clip) * (1 + 0.1 * (len(batch[0]) > 16))
    ),
}


def test_a_parameter_that_the_fast_way_forgets_is_named() -> None:
    """The start-up check holds the engine against torch's own gradient."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    batch = torch.randn(11, 4), torch.arange(11) % 2
    losses = entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()))
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    check_reference(model, entropy, lambda batch, clip: flat, batch)
    forgetful = flat.clone()
    forgetful[-2:] = 0  # the last bias
    with pytest.raises(ModelError, match=r"'2.bias': the fast gradient differs"):
        check_reference(model, entropy, lambda batch, clip: forgetful, batch)
    with pytest.raises(ModelError, match="differs"):
        check_reference(model, entropy, lambda batch, clip: 1.01 * flat, batch)


@pytest.mark.parametrize("together", [1, 9])
def test_sums_are_those_of_their_parts(together: int) -> None:
    batch = torch.randn(17, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(17)
    check_sums(clipped, batch, together)
    for name in SUMS:
        if together == 1 or name != "not clipped":  # two halves do not tell
            with pytest.raises(ModelError, match="not the sum of the gradients"):
                check_sums(SUMS[name], batch, together)
