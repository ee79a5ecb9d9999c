"""Models with layers that are made of linear maps: recurrent layers, attention, Conv1D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


class Recurrent(nn.Module):
    """Uses all steps and the last state of a recurrent layer, from a state of its own or zeros."""

    def __init__(self, layer: nn.RNNBase, given_state: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.begin = nn.Linear(layer.input_size, layer.hidden_size) if given_state else None

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.begin is not None:
            count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            hidden = torch.tanh(self.begin(x[:, 0])).expand(count, -1, -1)
            state = (hidden, 2 * hidden) if isinstance(self.layer, nn.LSTM) else hidden
        inputs = x if self.layer.batch_first else x.transpose(0, 1)
        outs, last = self.layer(inputs, state)
        outs = outs if self.layer.batch_first else outs.transpose(0, 1)
        parts = last if isinstance(last, tuple) else (last,)
        # weighted, so that no two steps or units are alike
        rows = torch.arange(1.0, outs[0].numel() + 1).to(x).view(outs.shape[1:]).cos()
        ends = sum((2 * part.sin().mean(dim=(0, 2)) for part in parts), torch.zeros(()).to(x))
        return (outs * rows).flatten(1).sum(dim=1, keepdim=True) + ends[:, None]


class Mixed(nn.Module):
    """A bare parameter, which has no closed form, before another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.gain, self.module = nn.Parameter(torch.ones(3)), module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.gain * x)


class SelfAttention(nn.Module):
    """Attends to its own tokens, with masks or without; weights may be part of the output."""

    def __init__(
        self, masked: str = "", need_weights: bool = False, average: bool = True, **settings: Any
    ) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, **settings)
        self.masked, self.need_weights, self.average = masked, need_weights, average

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.attend.batch_first else x.transpose(0, 1)
        out, weights = self.attend(
            tokens, tokens, tokens, need_weights=self.need_weights,
            average_attn_weights=self.average, **masks(self.masked, x),
        )  # fmt: skip
        out = out if self.attend.batch_first else out.transpose(0, 1)
        out = out.flatten(1)
        return out if weights is None else torch.cat([out, weights.flatten(1).sin()], dim=1)


def masks(kind: str, x: Tensor) -> dict[str, Any]:
    """Return masks of a kind for two heads of tokens (E, T, ...)."""
    rows, length = x.shape[:2]
    causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    if kind == "causal":
        return {"attn_mask": causal, "is_causal": True}
    if kind == "by head":
        numbers = torch.arange(2 * length * length).to(x).view(2, length, length).sin()
        return {"attn_mask": numbers.repeat(rows, 1, 1)}
    if kind == "padding":
        padding = torch.zeros(rows, length, dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        return {"key_padding_mask": padding, "attn_mask": causal}
    return {}


class CrossAttention(nn.Module):
    """Keys and values come from elsewhere: from one place, or from two."""

    def __init__(self, places: int, bias: bool = True) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, bias=bias, batch_first=True)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        memory = x[:, :2].cos()
        values = memory if self.places == 1 else memory.square()
        out, _ = self.attend(x, memory, values, need_weights=False)
        return out.flatten(1)


class Conv1D(nn.Module):
    """A stand-in for the layer of this name of transformers: its weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Decoder(nn.Module):
    """A decoder layer over two memories."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x[:, :2].tanh()).flatten(1)


def _recurrent(kind: Callable[..., nn.RNNBase], given_state: bool = False, **settings: Any) -> Case:
    return (lambda: Recurrent(kind(3, 4, **settings), given_state)), (5, 3)


COMPOSED: dict[str, Case] = {
    "lstm": _recurrent(nn.LSTM, batch_first=True),
    "lstm, time first, no bias": _recurrent(nn.LSTM, bias=False),
    "lstm, two layers, both ways": _recurrent(
        nn.LSTM, batch_first=True, num_layers=2, bidirectional=True
    ),
    "lstm, given state": _recurrent(nn.LSTM, True, num_layers=2, bidirectional=True),
    "gru": _recurrent(nn.GRU, batch_first=True),
    "gru, time first, no bias": _recurrent(nn.GRU, bias=False),
    "gru, two layers, both ways": _recurrent(
        nn.GRU, batch_first=True, num_layers=2, bidirectional=True
    ),
    "gru, given state": _recurrent(nn.GRU, True, num_layers=2, bidirectional=True),
    "rnn": _recurrent(nn.RNN, batch_first=True),
    "rnn, relu, two layers, both ways": _recurrent(
        nn.RNN, nonlinearity="relu", num_layers=2, bidirectional=True
    ),
    "rnn, given state": _recurrent(nn.RNN, True, batch_first=True),
    "attention": (lambda: SelfAttention(batch_first=True), (3, 4)),
    "attention, tokens first, no bias": (lambda: SelfAttention(bias=False), (3, 4)),
    "attention with weights": (lambda: SelfAttention(need_weights=True), (3, 4)),
    "attention, causal": (lambda: SelfAttention("causal", batch_first=True), (3, 4)),
    "attention, masks by head": (
        lambda: SelfAttention("by head", True, average=False, batch_first=True),
        (3, 4),
    ),
    "attention, padding": (lambda: SelfAttention("padding", batch_first=True), (3, 4)),
    "attention elsewhere": (lambda: CrossAttention(1), (3, 4)),
    "attention elsewhere, two places": (lambda: CrossAttention(2, bias=False), (3, 4)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        (3, 4),
    ),
    "encoder, norm first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                4, 2, 6, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
            ),
            2,
            enable_nested_tensor=False,
        ),
        (3, 4),
    ),
    "decoder layer": (Decoder, (3, 4)),
    "conv1d of transformers": (
        lambda: nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(2, 5)),
        (3, 4),
    ),
}
