"""A row that model or loss refuse, or beyond float32, leaves no trace but its absence."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attacks import CLAIM, DELTA, Rows, lower_bound, trained_gradient
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

import dpcsgp
from dpcsgp.errors import ModelError, RefusedDataError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism, clipping_engine
from dpcsgp.privacy.passes import SUM_SLACK
from dpcsgp.randomness import PrivateRandomness

STEPS = 3
HOSTILE = [float("inf"), float("-inf"), float("nan"), 3e38]


def refusing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy: raises where a probability or a target is not in [0, 1]."""
    return binary_cross_entropy(torch.sigmoid(outputs[:, 0]), targets, reduction="none")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def plain_rows(count: int) -> Rows:
    random = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=random), torch.rand(count, generator=random)


class Trace(NamedTuple):
    """What a run leaves besides its numbers."""

    text: str
    warned: list[str]
    logged: int
    sizes: dict[str, int | None]
    ledger: int
    stopped: str


def trace(
    out: Path,
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    rows: Rows,
    capfd: pytest.CaptureFixture[str],
) -> Trace:
    """Train with fresh noise and the whole batch.

    Return all that can be seen of it. Text files differ in digits of times.
    """
    settings = {
        "algorithm.name": "dp-sgd",
        "algorithm.steps": STEPS,
        "privacy.expected_batch_size": len(rows[0]),
        "run.checkpoint_every": 1,
    }
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = dpcsgp.train(
                module,
                [rows],
                loss=loss,
                epsilon=CLAIM,
                delta=DELTA,
                settings=settings,
                out=out,
                test_data=plain_rows(9),
            )
    finally:
        logging.getLogger().removeHandler(handler)
    captured = capfd.readouterr()
    files = [path for path in out.rglob("*") if path.is_file()]
    sizes = {
        str(path.relative_to(out)): None
        if path.suffix in (".json", ".jsonl", ".csv", ".toml")
        else path.stat().st_size
        for path in files
    }
    lines = len((out / "ledger" / "node-0000.jsonl").read_text().splitlines())
    # the owner is told that these examples were trained on before (by the other run of the test),
    # and of marks for missing values, on the machine that has them
    own = ("trained on before", "looks like a mark")
    messages = [str(it.message) for it in caught]
    told = [text for text in messages if not any(words in text for words in own)]
    return Trace(
        captured.out + captured.err,
        told,
        len(records),
        sizes,
        lines,
        result.summary["stopped_because"],
    )


def with_input(value: float) -> Rows:
    inputs, targets = plain_rows(50)
    inputs[7] = value
    return inputs, targets


def with_target(value: float) -> Rows:
    inputs, targets = plain_rows(50)
    targets[7] = value
    return inputs, targets


POISONED = [(with_input, 3e38), (with_target, 7.0), (with_target, -1.0)]
NOT_FINITE = [(with_input, value) for value in HOSTILE[:3]] + [(with_target, math.nan)]


@pytest.mark.parametrize(("poisoned", "value"), NOT_FINITE)
def test_a_row_that_is_not_finite_is_refused_before_anything_is_spent(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    poisoned: Callable[[float], Rows],
    value: float,
) -> None:
    with pytest.raises(RefusedDataError, match="not finite"):
        trace(tmp_path / "with", model(), refusing, poisoned(value), capfd)
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(("poisoned", "value"), POISONED)
def test_a_row_that_the_loss_refuses_leaves_no_trace(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    poisoned: Callable[[float], Rows],
    value: float,
) -> None:
    """Output, warnings, logs, files, their sizes and the end of the run are as without the row."""
    found = trace(tmp_path / "with", model(), refusing, poisoned(value), capfd)
    assert found == trace(tmp_path / "without", model(), refusing, plain_rows(50), capfd)
    assert found.stopped == "completed" and found.ledger == 1 + STEPS


@pytest.mark.parametrize("place", [0, 7, 49])
@pytest.mark.parametrize("value", HOSTILE[:3])
def test_the_other_rows_contribute_the_same_bits(value: float, place: int) -> None:
    module = model()
    engine, flat_1D = (
        clipping_engine(module, refusing),
        ParameterLayout.of(module).flatten(module)[None],
    )
    inputs, targets = plain_rows(50)
    inputs[place] = value
    others = [other for other in range(50) if other != place]

    def total(members: list[int]) -> Tensor:
        present = torch.zeros(1, 50, dtype=torch.bool)
        present[0, members] = True
        return engine.clipped_sum(
            flat_1D, inputs[None].clone(), targets[None].clone(), present, 0.1
        )[0].double()

    for other in others[::7]:
        assert torch.equal(total([other, place]), total([other]))
    assert float((total([*others, place]) - total(others)).norm()) <= 0.1 * SUM_SLACK


def unlucky(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with an assertion of its own."""
    if bool((targets == 0.125).any()):
        raise ValueError("0.125 is unlucky")
    return (outputs[:, 0] - targets).square()


class Picky(nn.Module):
    """Takes blank rows, and rows of a public range."""

    def __init__(self, least: float, blank: bool = True) -> None:
        super().__init__()
        self.linear, self.least, self.blank = nn.Linear(6, 1), least, blank

    def forward(self, inputs: Tensor) -> Tensor:
        norms = inputs.abs().sum(dim=1)
        wrong = (norms < self.least) & (norms > 0) if self.blank else norms == 0
        if bool(wrong.any()):
            raise ValueError("a row outside of the range")
        return self.linear(inputs)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


@pytest.mark.slow
def test_a_loss_that_raises_on_one_value_leaves_no_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = trace(tmp_path / "with", model(), unlucky, with_target(0.125), capfd)
    assert found == trace(tmp_path / "without", model(), unlucky, plain_rows(50), capfd)


@pytest.mark.slow
def test_a_model_that_raises_on_every_row_but_not_on_blank_ones_completes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows far below those of the test data: the release is noise alone."""
    inputs, targets = plain_rows(50)
    found = trace(tmp_path / "with", Picky(0.1), squared, (1e-4 * inputs, targets), capfd)
    assert found == trace(tmp_path / "without", Picky(0.1), squared, (inputs, targets), capfd)
    assert found.stopped == "completed"


@pytest.mark.parametrize("count", [50, 64])
def test_a_model_that_raises_on_blank_rows_is_refused_before_anything_is_spent(
    tmp_path: Path, count: int
) -> None:
    """Also where the batch fills a pass: no blank row is needed until a row raises."""
    with pytest.raises(ModelError, match="model and loss fail on"):
        trained_gradient(tmp_path / "run", Picky(0.1, blank=False), squared, plain_rows(count))
    assert not list(tmp_path.rglob("*.jsonl"))


# Squares beyond the range of float32: gradients that pass for short.


def faint(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradients square to zero in float32 where outputs are huge."""
    return torch.where(outputs.abs() > 1e9, 2.6e-23 * outputs, outputs).sum(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.stress)])
def test_a_huge_row_with_a_faint_gradient_is_not_found_in_a_trained_model(
    tmp_path: Path, runs: int
) -> None:
    torch.manual_seed(0)
    module, clip = nn.Sequential(nn.Linear(1, 1000, bias=False)), 1e-4
    nn.init.uniform_(module[0].weight, 0.1, 1.0)  # type: ignore[arg-type]
    # three standard deviations of the noise, along the row's gradient
    threshold = 22 * clip * math.sqrt(1000)

    def guesses(value: float) -> int:
        rows = torch.tensor([[0.0], [value]]), torch.zeros(2)
        return sum(
            float(trained_gradient(tmp_path / f"{value}-{run}", module, faint, rows, clip).sum())
            > threshold
            for run in range(runs)
        )

    assert lower_bound(guesses(1.8e19), guesses(0.0), runs) <= CLAIM


# The numbers that a release can be: a set that must not depend on the data.


def noisy(batch: int, total: int) -> GaussianMechanism:
    """Return a mechanism with noise of more than 24 bits, as for small eps or many steps."""
    return GaussianMechanism(1.0, (60.0,), (batch,), (total,))


def released_numbers(rows: Rows, mechanism: GaussianMechanism, random: PrivateRandomness) -> Tensor:
    """Return one release (D,) as it enters the method."""
    module = nn.Sequential(nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 1))
    engine, flat_1D = (
        clipping_engine(module, refusing),
        ParameterLayout.of(module).flatten(module)[None],
    )

    def clipped_sum(indices_1E: Tensor, present_1E: Tensor) -> Tensor:
        inputs, targets = (part[indices_1E] for part in rows)
        return engine.clipped_sum(flat_1D, inputs, targets, present_1E, 1.0, mechanism.shapes[0])

    return mechanism.release(clipped_sum, 0, random, [True]).to(torch.float32)[0]


def neighbours(values_D: Tensor, reach: int = 2) -> Iterator[Tensor]:
    """Yield the float32 numbers next to these, up and down."""
    for direction in (-math.inf, math.inf):
        moved_D = values_D
        for _ in range(reach + 1):
            yield moved_D
            moved_D = torch.nextafter(moved_D, torch.tensor(direction))


def not_a_float32_quotient(released_D: Tensor, divisor: int) -> int:
    """Count the numbers that no float32 number divided by the public constant rounds to."""
    possible_D = torch.zeros_like(released_D, dtype=torch.bool)
    for candidate_D in neighbours((released_D.double() * divisor).float()):
        possible_D |= candidate_D / divisor == released_D
    return int((~possible_D).sum())


def wide_rows(count: int) -> Rows:
    random = torch.Generator().manual_seed(3)
    return torch.randn(count, 300, generator=random), torch.rand(count, generator=random)


def test_the_numbers_of_a_release_do_not_tell_that_a_row_raised() -> None:
    """Noise of more than 24 bits: rounding it before or after the division leaves other numbers."""
    inputs, targets = wide_rows(50)
    poisoned = inputs.clone()
    poisoned[7] = math.nan
    releases = [
        released_numbers((rows, targets), noisy(50, 50), PrivateRandomness.fresh([0]))
        for rows in (poisoned, inputs)
    ]
    assert len({not_a_float32_quotient(released_D, 50) > 0 for released_D in releases}) == 1


def test_the_numbers_of_a_release_do_not_tell_how_many_rows_were_drawn() -> None:
    """17 rows, 16 places: a second pass is made only if all rows are drawn, in 0.3 % of the steps.

    Without one, never.
    """
    mechanism = noisy(12, 17)
    assert mechanism.shapes[0].places == 16
    keys = [PrivateRandomness.seeded(seed, [0]) for seed in range(3000)]
    drawn = [int(mechanism.draw(0, key, [True])[1].sum()) for key in keys]
    releases = [
        released_numbers(wide_rows(17), mechanism, keys[drawn.index(count)]) for count in (17, 16)
    ]
    assert len({not_a_float32_quotient(released_D, 12) > 0 for released_D in releases}) == 1
