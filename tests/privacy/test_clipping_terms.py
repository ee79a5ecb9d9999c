"""Grad samples: factors, norms and weighted sums, and when rounding allows ghost sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.privacy.clipping.convolution import kernel_grad_sample
from dpcsgp.privacy.clipping.ghost_norms import (
    MARGIN,
    EmbeddingGradSample,
    GradSample,
    LinearGradSample,
    MaterializedGradSample,
    TiedGradSample,
    Workspace,
    clip_factors,
    may_sum_positions,
    merge,
    pool,
)
from dpcsgp.privacy.passes import SUM_SLACK, UNIT, pass_slack


def test_an_example_without_a_finite_norm_gets_the_factor_zero() -> None:
    squares = torch.tensor([float("nan"), float("inf"), 0.0, 4.0, 0.25], dtype=torch.float64)
    assert clip_factors(squares, 1.0).tolist() == [0.0, 0.0, 1.0, 0.5, 1.0]


def test_the_margin_is_part_of_the_length() -> None:
    squares = torch.tensor([9.0, 0.0, 0.25, 1.0], dtype=torch.float64)
    loose = torch.tensor([1.0, 16.0, 0.0, float("inf")], dtype=torch.float64)
    assert clip_factors(squares, 1.0, loose).tolist() == [0.25, 0.25, 1.0, 0.0]
    assert clip_factors(squares, 2.0, loose).tolist() == [0.5, 0.5, 1.0, 0.0]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def convolution(
    examples: int, channels: int, side: int, groups: int = 1, dtype: torch.dtype = torch.float64
) -> GradSample:
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, dtype=dtype)
    inputs, delta = (
        normal(examples, channels, side, side, dtype=dtype, seed=seed) for seed in (1, 2)
    )
    return kernel_grad_sample(layer, inputs, delta, examples)


def lookup() -> GradSample:
    words = torch.tensor([[1, 4, 1, 1], [0, 0, 0, 0], [3, 2, 1, 0], [2, 2, 3, 3], [4, 4, 4, 1]])
    return EmbeddingGradSample.of(words, normal(5, 4, 3), 6)


TERMS: dict[str, GradSample] = {
    "outer, one position": LinearGradSample(normal(5, 1, 4), normal(5, 1, 3)),
    "outer, Gram": LinearGradSample(normal(5, 3, 40), normal(5, 3, 30)),
    "outer, explicit": LinearGradSample(normal(5, 60, 4), normal(5, 60, 3)),
    "lookup": lookup(),
    "lookup and outer": merge(
        [lookup(), LinearGradSample(normal(5, 2, 3, seed=5), normal(5, 2, 6, seed=6))],
        5,
        18,
        Workspace(),
    ),
    "two uses": merge(
        [LinearGradSample(normal(5, 2, 8, seed=n), normal(5, 2, 9, seed=7 + n)) for n in range(2)],
        5,
        72,
        Workspace(),
    ),
    "convolution": convolution(5, 4, 5),
    "convolution, groups": convolution(5, 4, 3, groups=2),
    "convolution, many channels": convolution(5, 64, 3),
    "convolution, large": convolution(5, 3, 14),
}


@pytest.mark.parametrize("name", TERMS)
def test_norms_and_sums_are_those_of_the_gradients(name: str) -> None:
    term = TERMS[name]
    whole = term.materialize(slice(None)).clone()
    factors = torch.tensor([1.0, 0.5, 0.0, 0.25, 2.0], dtype=torch.float64)
    for form in (term, term.in_best_form(Workspace())):
        torch.testing.assert_close(
            form.norm_squared(), whole.square().sum(dim=1), rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(form.materialize(slice(1, 3)), whole[1:3])
        torch.testing.assert_close(form.weighted_sum(factors), factors @ whole)


def test_small_gradients_are_put_side_by_side_and_large_ones_stay() -> None:
    small = {name: MaterializedGradSample(normal(4, size)) for name, size in (("a", 3), ("b", 2))}
    large: dict[str, GradSample] = {
        "formed": MaterializedGradSample(normal(4, 5000)),
        "ghost": LinearGradSample(normal(4, 2, 3), normal(4, 2, 5)),
    }
    samples: dict[str, GradSample] = {**small, **large}
    sizes, pooled = pool(samples)
    assert samples == large and sizes == {"a": 3, "b": 2} and pooled is not None
    parts = [small[name].gradient_EP for name in sizes]
    torch.testing.assert_close(pooled.gradient_EP, torch.cat(parts, dim=1))
    alone: dict[str, GradSample] = {"a": small["a"]}
    assert pool(alone) == ({}, None) and alone == {"a": small["a"]}


def test_a_workspace_hands_out_memory_once_until_it_is_reset() -> None:
    memory, like = Workspace(), torch.empty(0, dtype=torch.float64)
    for _ in range(3):
        memory.reset()
        parts = [memory.take((2, size), like) for size in (3, 5, 100)]
        for value, part in enumerate(parts):
            part.fill_(value)
        assert all(bool((part == value).all()) for value, part in enumerate(parts))
    assert memory.take((4,), torch.empty(0)).dtype is torch.float32


def test_uses_of_one_parameter_are_measured_together() -> None:
    parts = [MaterializedGradSample(normal(4, 6)), MaterializedGradSample(-normal(4, 6))]
    assert float(TiedGradSample(tuple(parts), 4, 6).norm_squared().max()) < 1e-300


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_norms_of_positions_that_cancel_are_accurate(offset: float) -> None:
    """Two positions with nearly equal activations and opposite backprops: the rest is measured."""
    base = offset * normal(5, 1, 64, dtype=torch.float32).sign()
    inputs = base + normal(5, 2, 64, dtype=torch.float32, seed=1)
    delta = normal(5, 1, 32, dtype=torch.float32, seed=2) * torch.tensor([1.0, -1.0])[:, None]
    exact = (delta.double().mT @ inputs.double()).flatten(1).square().sum(dim=1)
    torch.testing.assert_close(
        LinearGradSample(inputs, delta).norm_squared(), exact, rtol=1e-5, atol=0.0
    )
    # the positions side by side, as a convolution of width 1
    images = inputs.view(5, 2, 64, 1).transpose(1, 2).contiguous()
    layer = nn.Conv2d(64, 32, 1)
    term = kernel_grad_sample(
        layer, images, delta.view(5, 2, 32, 1).transpose(1, 2).contiguous(), 5
    )
    torch.testing.assert_close(term.norm_squared(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("positions", [1, 2, 4, 9, 100, 10_000])
@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_ghost_sums_round_within_the_stated_slack(rows: int, positions: int) -> None:
    """A ghost sum is off by 2^-24 per product, of sizes up to clip_norm / MARGIN an example."""
    if may_sum_positions(rows, positions) and min(rows, positions) > 1:
        assert 4 * UNIT * (rows * positions) * rows / MARGIN <= SUM_SLACK - pass_slack(64, 4)


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_gradients_are_formed_where_rounding_forbids_ghost_sums(rows: int) -> None:
    for positions in (2, 9, 36):
        terms: list[GradSample] = [
            LinearGradSample(normal(rows, positions, 90), normal(rows, positions, 80))
        ]
        if positions > 2:
            terms.append(convolution(rows, 32, round(positions**0.5)))
        for term in terms:
            assert may_sum_positions(rows, positions) or isinstance(
                term.in_best_form(Workspace()), MaterializedGradSample
            )


def test_ghost_terms_state_the_sizes_of_all_that_they_sum() -> None:
    """The margin is a share of |activations| |backprops|, of all patches a pixel is in."""
    inputs, delta = (
        normal(3, 5, 7, dtype=torch.float32),
        normal(3, 5, 6, dtype=torch.float32, seed=1),
    )
    sizes = inputs.double().flatten(1).norm(dim=1) * delta.double().flatten(1).norm(dim=1)
    loose = torch.as_tensor(LinearGradSample(inputs, delta).margin_squared())
    assert bool((loose.sqrt() >= (1 - 1e-12) * MARGIN * sizes).all())
    layer = nn.Conv2d(2, 4, 3)
    images, outputs = (
        normal(3, 2, 6, 6, dtype=torch.float32),
        normal(3, 4, 4, 4, dtype=torch.float32, seed=1),
    )
    patches = F.unfold(images.double(), 3).flatten(1).norm(dim=1) * outputs.double().flatten(
        1
    ).norm(dim=1)
    loose = torch.as_tensor(kernel_grad_sample(layer, images, outputs, 3).margin_squared())
    assert bool((loose.sqrt() >= (1 - 1e-12) * MARGIN * patches).all())
