"""The compiled loops of an LSTM: their exponential, their gates, and what torch computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from composed_layers import COMPOSED, Mixed, Recurrent
from test_products import check_float32
from torch import Tensor, nn

from dpcsgp.kernels.lstm_gates import gates_back, open_gates
from dpcsgp.privacy.clipping import recurrent
from dpcsgp.privacy.clipping.projections import Projection
from dpcsgp.privacy.clipping.recurrent import recurrent_forward

UNIT = 2.0**-24


def opened(gates: np.ndarray, cell: float = 0.0) -> dict[str, np.ndarray]:
    """Do one step on rows of one unit whose four gates hold these numbers; return what it wrote."""
    rows = len(gates)
    given = np.repeat(gates.astype(np.float32)[:, None, None], 4, axis=2).copy()
    nothing, bias = np.zeros((rows, 4), np.float32), np.zeros(4, np.float32)
    found = np.empty((1, rows, 4), np.float32)
    cells = np.full((2, rows, 1), cell, np.float32)
    bounded, outs = (np.empty((1, rows, 1), np.float32) for _ in range(2))
    open_gates(0, given, nothing, bias, found, cells, bounded, outs)
    return {
        "sigmoid": found[0, :, 0],
        "tanh": found[0, :, 2],
        "cell": cells[1, :, 0],
        "out": outs[0, :, 0],
        "bounded": bounded[0, :, 0],
    }


def test_gates_are_within_a_few_roundings_of_the_functions() -> None:
    spread = np.random.default_rng(0).standard_normal(300_000) * np.logspace(-6, 2, 300_000)
    x = np.concatenate([np.linspace(-30, 30, 200_001), spread]).astype(np.float32)
    exact = x.astype(np.float64)
    found = opened(x)
    for name, expected in (("sigmoid", 1 / (1 + np.exp(-exact))), ("tanh", np.tanh(exact))):
        normal = np.abs(expected) > 2.0**-120
        error = np.abs(found[name] - expected)[normal] / np.abs(expected)[normal]
        assert error.max() < 8 * UNIT, (name, error.max() / UNIT)
    assert np.abs(found["tanh"]).max() <= 1 and found["sigmoid"].max() <= 1
    kept = found["sigmoid"].astype(np.float64) * found["tanh"]
    np.testing.assert_allclose(found["bounded"], np.tanh(kept), rtol=16 * UNIT, atol=1e-40)
    np.testing.assert_allclose(found["out"], found["sigmoid"] * found["bounded"], rtol=4 * UNIT)


def test_the_largest_numbers_saturate_and_no_number_stays_none() -> None:
    largest = float(np.finfo(np.float32).max)
    x = np.array([88.0, 1e4, largest, np.inf, -88.0, -1e4, -largest, -np.inf, np.nan, 0.0])
    found = opened(x)
    torch.testing.assert_close(
        torch.from_numpy(found["tanh"]),
        torch.tensor([1.0] * 4 + [-1.0] * 4 + [float("nan"), 0.0]),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    assert np.all(found["sigmoid"][:4] == 1) and np.all(found["sigmoid"][4:8] < 1e-37)
    assert np.isnan(found["sigmoid"][8]) and found["sigmoid"][9] == 0.5


def _unrecorded(
    layer: nn.Module, activations: Tensor, output: Tensor, projection: Projection | None = None
) -> None:
    """Stand where layers record what they multiply."""


def both_ways(layer: nn.LSTM, inputs: Tensor, weights: Tensor, own: bool) -> list[Tensor]:
    """Return outputs, last states and the gradient at the inputs."""
    leaf = inputs.clone().requires_grad_()
    if own:
        outs, (hidden, cell) = recurrent_forward(layer, _unrecorded, leaf)
    else:
        outs, (hidden, cell) = layer(leaf)
    total = (outs * weights).sum() + hidden.sin().sum() + cell.cos().sum()
    return [outs, hidden, cell, *torch.autograd.grad(total, leaf)]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (5, 7, 3, 9), (33, 12, 16, 40)])
def test_compiled_steps_are_those_of_torch(
    size: tuple[int, int, int, int], bidirectional: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    rows, length, width, hidden = size
    layer = nn.LSTM(width, hidden, 2, batch_first=batch_first, bidirectional=bidirectional)
    shape = (rows, length) if batch_first else (length, rows)
    inputs = 3 * torch.randn(*shape, width)
    weights = torch.randn(*shape, hidden * (1 + bidirectional))
    exact = both_ways(layer.double(), inputs.double(), weights.double(), own=False)
    for found, expected in zip(
        both_ways(layer.float(), inputs, weights, own=True), exact, strict=True
    ):
        assert found.dtype == torch.float32 and found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in COMPOSED if "lstm" in name])
def test_clipped_sums_are_right(name: str) -> None:
    build, shape = COMPOSED[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check_float32(build(), shape)


def test_clipped_sums_are_right_beside_parameters_without_closed_form() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="gain"):
        check_float32(Mixed(Recurrent(nn.LSTM(3, 4, batch_first=True))), (3, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_outputs_are_as_contiguous_as_those_of_torch(
    kind: Callable[..., nn.RNNBase], bidirectional: bool
) -> None:
    layer = kind(3, 4, bidirectional=bidirectional)
    inputs = torch.randn(5, 2, 3)
    assert layer(inputs)[0].is_contiguous()
    outs = recurrent_forward(layer, _unrecorded, inputs)[0]
    assert outs.is_contiguous()


@pytest.mark.parametrize("names", [("bias_ih_l0",), ("bias_hh_l0",), ("bias_ih_l0", "bias_hh_l0")])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_biases_may_be_trained_alone(
    kind: Callable[..., nn.RNNBase], names: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind(3, 4, batch_first=True))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in names)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check_float32(module, (5, 3))


@pytest.mark.parametrize("extreme", [1e30, 1e-40, float("inf"), float("nan")])
def test_a_row_keeps_its_bits_beside_any_others(extreme: float) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.LSTM(6, 10, batch_first=True), torch.randn(40, 8, 6)
    weights = torch.randn(40, 8, 10)
    usual = both_ways(layer, inputs, weights, own=True)
    kept = torch.arange(40) % 3 == 0
    others = inputs.where(kept[:, None, None], torch.tensor(extreme))
    for found, expected in zip(both_ways(layer, others, weights, own=True), usual, strict=True):
        axis = 1 if found.dim() == 3 and found.shape[1] == 40 else 0
        rows = kept.nonzero().flatten()
        assert torch.equal(found.index_select(axis, rows), expected.index_select(axis, rows))


def test_other_numbers_than_float32_take_the_steps_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object) -> None:
        raise AssertionError("compiled for float32")

    torch.manual_seed(0)
    layer, inputs = nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
    weights = torch.randn(2, 5, 4)
    exact = both_ways(layer.double(), inputs.double(), weights.double(), own=False)
    monkeypatch.setattr(recurrent, "open_gates", none)
    monkeypatch.setattr(recurrent, "gates_back", none)
    found = both_ways(layer, inputs.double(), weights.double(), own=True)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_way_back_writes_every_gate() -> None:
    """Its memory comes unwritten: what is left out would be what was there before."""
    random = np.random.default_rng(0)
    rows, length, width = 3, 2, 5
    gates = random.random((length, rows, 4 * width), dtype=np.float32)
    cells = random.random((length + 1, rows, width), dtype=np.float32)
    bounded = random.random((length, rows, width), dtype=np.float32)
    d_outs = random.random((rows, length, width), dtype=np.float32)
    d_gates = np.full((rows, length, 4 * width), np.nan, np.float32)
    d_hidden, d_cell = (np.ones((rows, width), np.float32) for _ in range(2))
    for step in (1, 0):
        gates_back(step, gates, cells, bounded, d_outs, d_hidden, d_cell, d_gates)
    assert np.isfinite(d_gates).all()
