"""Models have the promised sizes, mix no examples, and wrong names are answered well."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpcsgp.errors import ConfigError
from dpcsgp.tasks.models import build_model, check_model

SIZES = [
    ("logistic", (1, 28, 28), 7_850),
    ("mlp:128", (1, 28, 28), 101_770),
    ("mlp:48", (1, 8, 8), 64 * 48 + 48 + 480 + 10),
    ("mlp:128,64", (1, 28, 28), 109_386),
    ("cnn", (1, 28, 28), 26_010),
    ("cnn", (3, 32, 32), 37_274),
    ("resnet18", (3, 32, 32), 11_173_962),
]


@pytest.mark.parametrize(("spec", "shape", "size"), SIZES)
def test_number_of_parameters_and_output_shape(
    spec: str, shape: tuple[int, ...], size: int
) -> None:
    model = build_model(spec, shape, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == size
    with torch.inference_mode():
        assert model(torch.rand(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 17, 31), (3, 40, 24)])
def test_cnn_fits_other_image_sizes(shape: tuple[int, ...]) -> None:
    assert build_model("cnn", shape, 7)(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(
    ("spec", "shape"), [("mlp:16", (1, 8, 8)), ("cnn", (1, 28, 28)), ("resnet18", (3, 16, 16))]
)
def test_outputs_of_an_example_do_not_depend_on_the_others(
    spec: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, inputs = build_model(spec, shape, 10), torch.rand(3, *shape)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs)[:1], model(inputs[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["logistic", "mlp:16", "mlp:16,8"])
def test_linear_stacks_can_be_recognised(spec: str) -> None:
    model = build_model(spec, (1, 8, 8), 10)
    assert type(model) is nn.Sequential
    assert {type(layer) for layer in model} <= {nn.Flatten, nn.Linear, nn.ReLU}
    assert type(model[-1]) is nn.Linear


def test_nothing_works_in_place_or_mixes_examples() -> None:
    for layer in build_model("resnet18", (3, 32, 32), 10).modules():
        assert not getattr(layer, "inplace", False)
        assert not isinstance(layer, nn.modules.batchnorm._BatchNorm)


def test_resnet18_reaches_every_parameter() -> None:
    model = build_model("resnet18", (3, 8, 8), 10)
    images = torch.rand(2, 3, 8, 8)
    model(images).square().sum().backward()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # blocks start as their shortcuts, and a first step wakes them
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    model(images).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in model.parameters()
    )


def test_logistic_starts_at_zero_and_networks_do_not() -> None:
    assert all(
        (parameter == 0).all() for parameter in build_model("logistic", (1, 8, 8), 10).parameters()
    )
    assert all(
        (parameter != 0).any() for parameter in build_model("mlp:8", (1, 8, 8), 10).parameters()
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet", "did you mean 'resnet18'"),
        ("transformer", "choose from 'mlp:128'"),
        ("mlp", "try 'mlp:128'"),
        ("mlp:0", "widths above 0"),
        ("mlp:128,", "widths above 0"),
        ("mlp:-3", "widths above 0"),
        ("logistic:3", "takes no widths"),
    ],
)
def test_wrong_specs_name_value_and_remedy(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"task.model = '{spec}'") as caught:
        check_model(spec)
    assert words in str(caught.value)


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="too small"):
        build_model("cnn", (1, 8, 8), 10)
    with pytest.raises(ConfigError, match=r"expected inputs \(C, H, W\)"):
        build_model("resnet18", (64,), 10)
    with pytest.raises(ConfigError, match="at least 1"):
        build_model("logistic", (64,), 0)
    assert build_model("logistic", (64,), 1)(torch.rand(3, 64)).shape == (3, 1)  # regression
