"""Laws of clipped sums: exactness, padding, non-finite examples, sensitivity, views."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_clipping import clip_and_sum, layerwise, linear_stack, per_example_gradients
from torch import Tensor, nn
from torch.nn.utils import prune

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import ClippingEngine, clipping_engine
from dpcsgp.privacy.clipping.linear_stack import is_linear_stack


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, 8),
        nn.GELU(),
        nn.Sequential(nn.Linear(8, 5, bias=False), nn.Tanh()),
        nn.Linear(5, 4),
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 2, stride=2),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Explicit(nn.Module):
    """Has a bare parameter, so that part of the gradient is formed explicitly."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(12))
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.gain * x.flatten(1))


MODELS = {"stack": stack, "network": network, "explicit": Explicit}


class Batch:
    """Random parameters, inputs and targets of N nodes.

    About a quarter of the places are padding.
    """

    def __init__(
        self, module: nn.Module, num_nodes: int, num_examples: int, views: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        dim, shape = (
            ParameterLayout.of(module).dim,
            (num_nodes, num_examples, *([views] if views > 1 else []), 1, 3, 4),
        )
        self.parameters_ND = (
            torch.randn(num_nodes, dim, generator=generator, dtype=torch.float64) * 0.4
        )
        self.inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(0, 4, (num_nodes, num_examples), generator=generator)
        self.present_NE = torch.rand(num_nodes, num_examples, generator=generator) < 0.75

    def sum(self, engine: ClippingEngine, clip_norm: float, **changes: Any) -> Tensor:
        fields = {**vars(self), **changes}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no closed form")
            return engine.clipped_sum(
                fields["parameters_ND"],
                fields["inputs"],
                fields["targets"],
                fields["present_NE"],
                clip_norm,
            )


@pytest.fixture(params=MODELS)
def module(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_sums_equal_explicitly_clipped_gradients_of_present_examples(
    module: nn.Module, num_nodes: int, views: int
) -> None:
    batch = Batch(module, num_nodes, 6, views)
    ours = batch.sum(clipping_engine(module, entropy, views), 0.5)
    for node in range(num_nodes):
        here = batch.present_NE[node]
        inputs = batch.inputs[node][here] if views > 1 else batch.inputs[node][here][:, None]
        rows = per_example_gradients(
            module, entropy, batch.parameters_ND[node], inputs, batch.targets[node][here]
        )
        torch.testing.assert_close(ours[node], clip_and_sum(rows, 0.5), rtol=1e-9, atol=1e-11)


def test_float32_is_exact_to_rounding(module: nn.Module) -> None:
    batch = Batch(module, 2, 6)
    expected = batch.sum(clipping_engine(module, entropy), 0.5)
    single = {"parameters_ND": batch.parameters_ND.float(), "inputs": batch.inputs.float()}
    ours = batch.sum(clipping_engine(module.float(), entropy), 0.5, **single)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.norm())
    )


def test_the_linear_stack_engine_equals_the_layerwise_engine() -> None:
    module = stack().double()
    batch = Batch(module, 3, 6)
    one, other = linear_stack(module, entropy), layerwise(module, entropy)
    torch.testing.assert_close(batch.sum(one, 0.5), batch.sum(other, 0.5), rtol=1e-10, atol=1e-12)


def test_a_huge_clip_norm_gives_the_plain_gradient_sum(module: nn.Module) -> None:
    batch = Batch(module, 2, 6)
    ours = batch.sum(clipping_engine(module, entropy), 1e12)
    layout = ParameterLayout.of(module)
    for node in range(2):
        layout.load(module, batch.parameters_ND[node])
        here = batch.present_NE[node]
        total = entropy(module(batch.inputs[node][here]), batch.targets[node][here]).sum()
        plain = torch.cat(
            [part.flatten() for part in torch.autograd.grad(total, list(module.parameters()))]
        )
        torch.testing.assert_close(ours[node], plain, rtol=1e-9, atol=1e-11)


def test_empty_batches_give_zero(module: nn.Module) -> None:
    batch = Batch(module, 2, 4)
    engine = clipping_engine(module, entropy)
    none = {
        "inputs": batch.inputs[:, :0],
        "targets": batch.targets[:, :0],
        "present_NE": batch.present_NE[:, :0],
    }
    for changes in (none, {"present_NE": torch.zeros(2, 4, dtype=torch.bool)}):
        assert torch.equal(batch.sum(engine, 1.0, **changes), torch.zeros_like(batch.parameters_ND))


def test_padding_may_hold_anything(module: nn.Module) -> None:
    batch = Batch(module, 2, 6)
    engine = clipping_engine(module, entropy)
    inputs, targets = batch.inputs.clone(), batch.targets.clone()
    inputs[~batch.present_NE] = torch.nan
    targets[~batch.present_NE] = -7
    assert torch.equal(
        batch.sum(engine, 0.5, inputs=inputs, targets=targets), batch.sum(engine, 0.5)
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200])
def test_an_example_without_finite_gradient_counts_as_zero_and_touches_no_other(
    module: nn.Module, value: float
) -> None:
    batch = Batch(module, 2, 6)
    engine = clipping_engine(module, entropy)
    inputs, without = batch.inputs.clone(), batch.present_NE.clone()
    place = int(batch.present_NE[1].nonzero()[0])
    inputs[1, place, 0, 1, 2] = value
    without[1, place] = False
    broken = batch.sum(engine, 0.5, inputs=inputs)
    assert broken.isfinite().all()
    if value != 1e200:  # a huge value may have a finite gradient behind a normalisation
        torch.testing.assert_close(
            broken, batch.sum(engine, 0.5, present_NE=without), rtol=1e-12, atol=1e-14
        )


def test_a_target_that_is_not_finite_counts_as_zero() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double()
    batch = Batch(module, 1, 4)
    targets = torch.randn(1, 4, 1, dtype=torch.float64)
    everyone, without = (
        torch.ones(1, 4, dtype=torch.bool),
        torch.tensor([[True, False, True, True]]),
    )
    for build in (linear_stack, layerwise):
        engine = build(module, lambda outputs, targets: (outputs - targets).square().sum(dim=1))
        expected = batch.sum(engine, 0.5, targets=targets, present_NE=without)
        targets_with_nan = targets.clone()
        targets_with_nan[0, 1] = torch.nan
        ours = batch.sum(engine, 0.5, targets=targets_with_nan, present_NE=everyone)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_an_overflow_inside_the_model_counts_as_zero() -> None:
    module = nn.Sequential(nn.Conv1d(1, 8, 3), nn.Flatten(), nn.Linear(16, 2, bias=False))
    parameters_ND = torch.randn(1, ParameterLayout.of(module).dim)
    inputs, targets = torch.randn(1, 3, 1, 4), torch.zeros(1, 3, dtype=torch.long)
    inputs[0, 2] = 3e38
    engine = clipping_engine(module, entropy)
    present, without = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, True, False]])
    ours = engine.clipped_sum(parameters_ND, inputs, targets, present, 1.0)
    expected = engine.clipped_sum(parameters_ND, inputs, targets, without, 1.0)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(
    module: nn.Module, dtype: torch.dtype, views: int
) -> None:
    module = module.to(dtype)
    batch = Batch(module, 2, 6, views)
    engine = clipping_engine(module, entropy, views)
    cast = {"parameters_ND": batch.parameters_ND.to(dtype), "inputs": batch.inputs.to(dtype) * 30}
    whole = batch.sum(engine, 0.25, **cast)
    largest = 0.0
    for place in range(6):
        without = batch.present_NE.clone()
        without[:, place] = False
        moved = (whole - batch.sum(engine, 0.25, **cast, present_NE=without)).norm(dim=1)
        assert (moved <= 0.25 * (1 + 1e-5)).all()
        largest = max(largest, float(moved.max()))
    assert largest > 0.249  # the bound is reached, so it is the clipping that holds it


def test_batches_of_other_sizes_use_the_same_engine(module: nn.Module) -> None:
    engine = clipping_engine(module, entropy)
    batch = Batch(module, 1, 7)
    everyone = torch.ones(1, 7, dtype=torch.bool)
    parts = torch.zeros_like(batch.parameters_ND)
    for run in (slice(0, 1), slice(1, 4), slice(4, 7)):
        parts += batch.sum(engine, 0.5, inputs=batch.inputs[:, run], targets=batch.targets[:, run],
                           present_NE=everyone[:, run])  # fmt: skip
    torch.testing.assert_close(
        parts, batch.sum(engine, 0.5, present_NE=everyone), rtol=1e-10, atol=1e-12
    )


def test_identical_views_change_nothing(module: nn.Module) -> None:
    batch = Batch(module, 2, 5)
    doubled = batch.inputs[:, :, None].repeat(1, 1, 2, 1, 1, 1)
    ours = batch.sum(clipping_engine(module, entropy, views=2), 0.5, inputs=doubled)
    torch.testing.assert_close(
        ours, batch.sum(clipping_engine(module, entropy), 0.5), rtol=1e-10, atol=1e-12
    )


def test_the_module_and_the_arguments_are_left_alone(module: nn.Module) -> None:
    batch = Batch(module, 2, 5)
    before = [part.clone() for part in (*module.parameters(), *vars(batch).values())]
    batch.sum(clipping_engine(module, entropy), 0.5)
    after = [*module.parameters(), *vars(batch).values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not any(layer._forward_hooks for layer in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not batch.parameters_ND.requires_grad


def test_callers_may_have_switched_gradients_off(module: nn.Module) -> None:
    batch, engine = Batch(module, 2, 5), clipping_engine(module, entropy)
    with torch.no_grad():
        ours = batch.sum(engine, 0.5)
    assert torch.equal(ours, batch.sum(engine, 0.5))


def test_linear_stacks_are_recognised() -> None:
    tied = nn.Linear(4, 4)
    assert is_linear_stack(stack())
    assert is_linear_stack(nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(dim=1)))
    assert not is_linear_stack(nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(dim=0)))
    assert not is_linear_stack(nn.Sequential(tied, nn.ReLU(), tied))
    assert not is_linear_stack(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    assert not is_linear_stack(nn.Linear(4, 4))


def test_linear_stacks_with_frozen_in_place_or_sequence_parts_are_exact() -> None:
    frozen = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Linear(5, 4)
    )
    frozen[1].requires_grad_(False)
    frozen[3].bias.requires_grad_(False)
    sequences = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for module, loss in (
        (frozen, entropy),
        (sequences, lambda outputs, targets: outputs.square().flatten(1).sum(1)),
    ):
        module = module.double()
        batch = Batch(module, 2, 5)
        one, other = linear_stack(module, loss), layerwise(module, loss)
        torch.testing.assert_close(
            batch.sum(one, 0.5), batch.sum(other, 0.5), rtol=1e-10, atol=1e-12
        )


def test_the_warning_comes_once_per_engine() -> None:
    module = Explicit().double()
    batch, engine = Batch(module, 2, 3), clipping_engine(module, entropy)
    arguments = (batch.parameters_ND, batch.inputs, batch.targets, batch.present_NE, 1.0)
    with pytest.warns(UserWarning, match="gain in the model itself") as caught:
        engine.clipped_sum(*arguments)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.clipped_sum(*arguments)


def test_dropout_follows_the_mode_of_the_module() -> None:
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)
    ).double()
    batch = Batch(module, 1, 6)
    with pytest.warns(UserWarning, match="Dropout"):
        engine = clipping_engine(module, entropy)
    assert not torch.equal(batch.sum(engine, 0.5), batch.sum(engine, 0.5))
    module.eval()
    assert torch.equal(batch.sum(engine, 0.5), batch.sum(engine, 0.5))


def test_wrong_arguments_are_refused() -> None:
    module = stack().double()
    batch, engine = Batch(module, 2, 4), clipping_engine(module, entropy)
    with pytest.raises(ConfigError, match=r"clip_norm = 0"):
        batch.sum(engine, 0)
    with pytest.raises(ModelError, match="parameters: expected shape"):
        batch.sum(engine, 1.0, parameters_ND=batch.parameters_ND[:, 1:])
    with pytest.raises(ModelError, match="leading axes"):
        batch.sum(engine, 1.0, targets=batch.targets[:, 1:])
    with pytest.raises(ModelError, match="reduction='none'"):
        batch.sum(clipping_engine(module, F.cross_entropy), 1.0)
    with pytest.raises(ConfigError, match="augmentation_multiplicity = 0"):
        clipping_engine(module, entropy, views=0)
    with pytest.raises(ModelError, match="BatchNorm"):
        clipping_engine(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), entropy)


def test_layers_that_torch_func_cannot_batch_are_named() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            four = x.flatten(1)[:, :4]
            return Rounded.apply(four * self.gain)  # pyright: ignore[reportReturnType]

    module = Odd().double()
    batch = Batch(module, 1, 3)
    with pytest.raises(ModelError, match="'gain'"):
        batch.sum(clipping_engine(module, entropy), 1.0)


def pruned(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "weight", 0.5)


def hooked(module: nn.Sequential) -> None:
    def double(layer: nn.Module, args: Any, output: Any) -> Any:
        return 2 * output

    module[0].register_forward_hook(double)


def patched(module: nn.Sequential) -> None:
    layer, usual = module[0], module[0].forward
    layer.forward = lambda inputs: usual(inputs) + 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("change", [pruned, hooked, patched])
def test_layers_that_are_not_what_their_type_says_are_not_taken_for_a_stack(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    change(module)
    assert not is_linear_stack(module)
    inputs, targets = torch.randn(1, 5, 6), torch.randint(4, (1, 5))
    models_1D = ParameterLayout.of(module).flatten(module)[None]
    present = torch.ones(1, 5, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total_D = clipping_engine(module, entropy).clipped_sum(
            models_1D, inputs, targets, present, 1e9
        )[0]
    entropy(module(inputs[0]), targets[0]).sum().backward()
    expected = [
        parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None
    ]
    torch.testing.assert_close(total_D, torch.cat(expected))
