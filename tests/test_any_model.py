"""Models that people bring: recurrent, pretrained in part, compiled, with adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpcsgp
from dpcsgp.errors import ModelError
from dpcsgp.modes import evaluation_mode, training_copy, uncompiled
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.model_checks import check_model

FAST = {
    "algorithm.steps": 4,
    "algorithm.learning_rate": 0.5,
    "algorithm.polish_rounds": 1,
    "run.evaluate_every": 1,
    "privacy.expected_batch_size": 12,
}


def fit(module: nn.Module, shape: tuple[int, ...], out: Path) -> dpcsgp.Result:
    """Train on two small nodes, with evaluations between the steps."""
    random = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(size, *shape, generator=random), torch.arange(size) % 2)
        for size in (40, 30, 20)
    ]
    return dpcsgp.train(
        module, parts[:2], test_data=parts[2], epsilon=8.0, delta=1e-3, settings=FAST, out=out
    )


class LastStep(nn.Module):
    """A recurrent layer and a readout of its last step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(layer.hidden_size, 2)

    def forward(self, series: Tensor) -> Tensor:
        return self.out(self.layer(input=series)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_models_train(kind: Callable[..., nn.RNNBase], tmp_path: Path) -> None:
    module = LastStep(kind(3, 4, batch_first=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        result = fit(module, (5, 3), tmp_path / "run")
    moved = [
        not torch.equal(one, other)
        for one, other in zip(module.parameters(), result.model.parameters(), strict=True)
    ]
    assert all(moved)


class Packed(nn.Module):
    """Packs its sequences by their lengths, which are private."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 2, batch_first=True)

    def forward(self, series: Tensor) -> Tensor:
        lengths = torch.full((len(series),), series.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(series, lengths, batch_first=True)
        return self.layer(packed)[1][0]


def test_packed_sequences_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="padded sequences of one public length"):
        fit(Packed(), (5, 3), tmp_path / "run")


def pretrained() -> Any:
    """Return a backbone with frozen batch normalisation, and a head to be trained."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU())
    backbone(torch.randn(50, 3))  # public data: statistics
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(6, 2))


def test_frozen_batch_normalisation_in_eval_mode_is_kept_as_it_is(tmp_path: Path) -> None:
    module = pretrained()
    module[0].eval()
    before = copy.deepcopy(module.state_dict())
    result = fit(module, (3,), tmp_path / "run")
    after = result.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("0.")


@pytest.mark.parametrize("state", ["training", "trainable", "without statistics"])
def test_batch_normalisation_in_any_other_state_is_refused(state: str) -> None:
    module = pretrained()
    layer = module[0][1]
    if state != "training":
        module[0].eval()
    if state == "trainable":
        layer.requires_grad_(True)
    if state == "without statistics":
        layer.running_mean = layer.running_var = None
    with pytest.raises(ModelError, match=r"requires_grad_\(False\)\.eval\(\)"):
        check_model(module)


def test_batch_normalisation_that_is_put_into_training_mode_later_stops_the_engine() -> None:
    module = pretrained()
    module[0].eval()
    engine = clipping_engine(module, lambda out, targets: out.square().sum(1))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    arguments = (
        flat_1D, torch.randn(1, 4, 3), torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0,
    )  # fmt: skip
    engine.clipped_sum(*arguments)
    module.train()
    with pytest.raises(ModelError, match=r"train\(\) mode"):
        engine.clipped_sum(*arguments)


def test_modes_are_kept_layer_by_layer() -> None:
    module = pretrained()
    module[0].eval()
    modes = [layer.training for layer in module.modules()]
    with evaluation_mode(module):
        assert not any(layer.training for layer in module.modules())
    assert [layer.training for layer in module.modules()] == modes
    copied = training_copy(module)
    assert copied.training and copied[0][2].training and not copied[0][1].training  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "part", "in place"])
def test_compiled_models_are_trained_without_compiling(way: str, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module: Any = copy.deepcopy(plain)
    if way == "whole":
        module = torch.compile(module)
    elif way == "part":
        module[0] = torch.compile(module[0])
    else:
        module.compile()
    with pytest.warns(UserWarning, match=r"torch\.compile") as caught:
        result = fit(module, (3,), tmp_path / "run")
    assert sum("torch.compile" in str(each.message) for each in caught) == 1
    assert list(result.model.state_dict()) == list(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dpcsgp.load_model(tmp_path / "run", module)
        assert type(uncompiled(module)) is nn.Sequential
    assert torch.equal(loaded.state_dict()["0.weight"], result.model.state_dict()["0.weight"])


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of small rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(inputs) + self.up(self.down(inputs))))


def test_messages_hold_adapters_only_and_frozen_weights_get_no_gradient(tmp_path: Path) -> None:
    module = Adapted()
    trained = ["down.weight", "up.weight", "head.weight", "head.bias"]
    assert list(ParameterLayout.of(module).names) == trained
    result = fit(module, (3,), tmp_path / "run")
    assert load_file(tmp_path / "run" / "model.safetensors")["node_models"].shape == (2, 32)
    everything = copy.deepcopy(module)
    everything.frozen.requires_grad_(True)
    whole = fit(everything, (3,), tmp_path / "whole")
    assert whole.summary["bytes_per_edge"] > result.summary["bytes_per_edge"]
    assert torch.equal(result.model.state_dict()["frozen.weight"], module.frozen.weight)


def test_no_gradient_is_computed_below_a_trained_head() -> None:
    """The backward pass ends at the head: it does not enter the frozen part."""
    module = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), Untouched(), nn.Linear(4, 2))
    engine = clipping_engine(module, lambda out, targets: out.square().sum(1))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    present = torch.ones(1, 4, dtype=torch.bool)
    total = engine.clipped_sum(flat_1D, torch.randn(1, 4, 3), torch.zeros(1, 4), present, 1.0)
    assert total.shape == (1, 10)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a gradient was computed where nothing is trained")


class Untouched(nn.Module):
    """Passes rows on, and fails if a gradient comes back."""

    def forward(self, rows: Tensor) -> Tensor:
        return _NoWayBack.apply(rows)  # pyright: ignore[reportReturnType]
