"""One row moves a clipped sum by at most the clip norm and the stated slack, in any company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from worst_case import CASES, LOSSES, trials

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.ghost_norms import GHOST_SLACK
from dpcsgp.privacy.passes import SUM_SLACK, PassShape, pass_shape, pass_slack


def largest_change(case: str, loss: str, count: int, seed: int = 0) -> float:
    found = list(trials(case, loss, seed, count))
    worst, where = max(found, key=lambda trial: trial[0] if math.isfinite(trial[0]) else math.inf)
    assert worst <= 1 + SUM_SLACK, where
    return worst


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_no_hostile_row_moves_a_sum_further_than_stated(case: str, loss: str) -> None:
    largest_change(case, loss, 12 if CASES[case].slow else 60)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_no_hostile_row_in_many_trials(case: str, loss: str, seed: int) -> None:
    """In all, 270 x 110 trials: more than 20,000."""
    print(f"{case}, {loss}, seed {seed}: {largest_change(case, loss, 110, seed):.6f} clip norms")


def l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


@pytest.mark.parametrize("count", [50, 5, 3, 2])
def test_a_batch_of_equal_rows_at_a_kink_moves_by_one_clip_norm(count: int) -> None:
    """A row more or less changes no kernel; once, 50 equal rows turned around together."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 1)
    module, weight, bias = nn.Sequential(linear), linear.weight.detach()[0], linear.bias.detach()[0]
    row = torch.randn(8, generator=torch.Generator().manual_seed(1085))
    inputs, targets = row.expand(count, -1).clone(), (row @ weight + bias).expand(count).clone()
    engine, flat_D = clipping_engine(module, l1), ParameterLayout.of(module).flatten(module)

    def total(size: int) -> Tensor:
        present = torch.ones(1, size, dtype=torch.bool)
        return engine.clipped_sum(
            flat_D[None], inputs[None, :size].clone(), targets[None, :size].clone(), present, 1.0
        )[0]

    assert float((total(count) - total(count - 1)).norm()) <= 1 + SUM_SLACK


def test_what_a_node_contributes_does_not_depend_on_its_neighbours() -> None:
    """Two nodes in one process: one draws 49 or 50 rows, the other's 40 at a kink stay."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 1))
    engine, flat_D = clipping_engine(module, l1), ParameterLayout.of(module).flatten(module)
    rows = torch.randn(2, 50, 8)
    with torch.no_grad():
        targets = torch.stack([module(row[None])[0, 0] for row in rows.flatten(0, 1)]).view(2, 50)
    sums = []
    for drawn in (49, 50, 1, 0):
        present = torch.zeros(2, 50, dtype=torch.bool)
        present[0, :40], present[1, :drawn] = True, True
        sums.append(
            engine.clipped_sum(flat_D.expand(2, -1), rows.clone(), targets.clone(), present, 1.0)[0]
        )
    assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("clip", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("layers", [1, 2])
def test_tiny_gradients_of_huge_inputs_are_clipped(clip: float, layers: int, flushed: bool) -> None:
    """Squares of such loss gradients are zero in float32, and the gradients passed for short."""
    module = nn.Sequential(nn.Linear(1, 1000), *[nn.Identity()] * (layers - 1))
    if layers == 2:
        module = nn.Sequential(module, nn.Unflatten(1, (1000,)))  # the other engine
    engine, flat_D = (
        clipping_engine(module, lambda out, t: 2.6e-23 * out.sum(1)),
        ParameterLayout.of(module).flatten(module),
    )
    present = torch.ones(1, 1, dtype=torch.bool)
    torch.set_flush_denormal(flushed)
    try:
        total = engine.clipped_sum(
            flat_D[None], torch.full((1, 1, 1), 1.8e19), torch.zeros(1, 1), present, clip
        )[0]
        assert (float(torch.tensor(2.0**-140) * 1.0) == 0.0) == flushed  # as the caller had it
    finally:
        torch.set_flush_denormal(False)
    assert float(total.double().norm()) <= clip * (1 + SUM_SLACK)


def test_the_slack_covers_every_shape_that_is_used() -> None:
    for batch in (*range(1, 300), 500, 1000, 2048, 5000, 50_000, 10**6):
        for total in (batch, 2 * batch, 100 * batch):
            for sampling in ("poisson", "uniform"):
                shape = pass_shape(batch, total, sampling)
                assert pass_slack(shape.rows, shape.chunks) <= SUM_SLACK
                assert shape.places * shape.passes >= batch
    assert SUM_SLACK + 2.0**-11 < 0.025
    assert GHOST_SLACK + max(pass_slack(64, 4), pass_slack(96, 2)) <= SUM_SLACK


def test_float32_sums_stay_within_the_bound_where_rounding_is_worst() -> None:
    """Rows of equal direction just below a power of two: every addition rounds alike."""
    shape = PassShape(256, 9)
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    engine, flat_1D = clipping_engine(module, lambda out, t: out.sum(1)), torch.zeros(1, 1)
    inputs = torch.full((1, shape.places, 1), 1.0 - 2.0**-24)
    present = torch.ones(1, shape.places, dtype=torch.bool)
    total = engine.clipped_sum(
        flat_1D, inputs.clone(), torch.zeros(1, shape.places), present, 1.0, shape
    )
    exact = shape.places * (1.0 - 2.0**-24)
    assert (
        abs(float(total.double()) - exact)
        <= pass_slack(shape.rows, shape.chunks) * shape.places / 4
    )
