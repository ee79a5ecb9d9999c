"""Hostile data for the clipping engines: kinks, extremes and thresholds.

A trial compares the clipped sums of two neighbouring batches: one row taken out, the last one put
in its place. Each row lies at a kink of the public model (the last bit of an activation decides its
whole gradient), at the end of a range (squares that underflow, sums that overflow), or just where a
kernel might be chosen by the batch's size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows

SIZES = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    11,
    12,
    15,
    16,
    17,
    31,
    32,
    33,
    49,
    50,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    160,
    161,
)
SHAPES = (
    PassShape(16, 1),
    PassShape(64, 1),
    PassShape(48, 3),
    PassShape(160, 2),
    PassShape(256, 1),
)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """L1: its gradient is the sign of the last bit where outputs meet targets."""
    return (outputs.flatten(1) - targets).abs().sum(dim=1)


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Zero on one side of the target, steep on the other."""
    return (1e3 * (outputs.flatten(1) - targets)).clamp_min(0.0).sum(dim=1)


def steep(outputs: Tensor, targets: Tensor) -> Tensor:
    """Rounds: a staircase whose straight-through gradient jumps."""
    return ((outputs.flatten(1) - targets) * 1e8).sin().sum(dim=1)


class Tokens(nn.Module):
    """Looks words up, attends to them, and adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.table(words.abs().nan_to_num().clamp_max(4).long())
        return self.out((torch.softmax(self.mix(rows), dim=1) * rows).sum(dim=1))


class Recurrent(nn.Module):
    """A recurrent layer and a readout."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **settings)
        self.out = nn.Linear(8 if self.layer.bidirectional else 4, 1)

    def forward(self, series: Tensor) -> Tensor:
        return self.out(self.layer(series)[0][:, -1])


class Explicit(nn.Module):
    """An LSTM behind a bare parameter: explicit per-example gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.rest = nn.Parameter(torch.ones(3)), Recurrent(nn.LSTM)

    def forward(self, series: Tensor) -> Tensor:
        return self.rest(self.gain * series)


class Attention(nn.Module):
    """Attends, normalises, adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layer(tokens).sum(dim=1))


class Bag(nn.Module):
    """Looks up bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(5, 6), nn.Linear(6, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words.abs().nan_to_num().clamp_max(4).long()))


class Case(NamedTuple):
    """A model and the shape of its inputs; slow ones make few passes in a second."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    slow: bool = False


CASES: dict[str, Case] = {
    "linear 8-1": Case(lambda: nn.Sequential(nn.Linear(8, 1)), (8,)),
    "linear 30-1": Case(lambda: nn.Sequential(nn.Linear(30, 1)), (30,)),
    "linear 128-1": Case(lambda: nn.Sequential(nn.Linear(128, 1)), (128,)),
    "relu 30-16-2": Case(
        lambda: nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2)), (30,)
    ),
    "softplus 7-5-1": Case(
        lambda: nn.Sequential(nn.Linear(7, 5), nn.Softplus(), nn.Linear(5, 1)), (7,)
    ),
    "mish 9-3-1": Case(lambda: nn.Sequential(nn.Linear(9, 3), nn.Mish(), nn.Linear(3, 1)), (9,)),
    "sequence": Case(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), (6, 4)),
    "convolution": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(100, 1)
        ),
        (2, 5, 5),
    ),
    "max pool": Case(
        lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(18, 1)),
        (2, 8),
    ),
    "group norm": Case(
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 1)
        ),
        (2, 8),
    ),
    "layer norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)), (6,)
    ),
    "tokens": Case(Tokens, (7,)),
    "bag": Case(Bag, (7,)),
    "lstm": Case(lambda: Recurrent(nn.LSTM), (5, 3)),
    "lstm, explicit": Case(Explicit, (3, 3), slow=True),
    "gru, both ways": Case(lambda: Recurrent(nn.GRU, bidirectional=True), (5, 3)),
    "rnn, relu": Case(lambda: Recurrent(nn.RNN, nonlinearity="relu"), (5, 3)),
    "attention": Case(Attention, (5, 4), slow=True),
}
LOSSES = {"absolute": absolute, "hinge": hinge, "steep": steep}


class Bench:
    """One model and loss, with hostile rows of many kinds."""

    def __init__(self, case: str, loss: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.module, self.shape = CASES[case].build(), CASES[case].shape
        self.loss = LOSSES[loss]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine: CheckedEngine = clipping_engine(self.module, self.loss)
        self.model_1D = ParameterLayout.of(self.module).flatten(self.module)[None]
        self.checked: dict[PassShape, tuple[CheckedEngine, bool]] = {}

    def rows(self, count: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return so many hostile rows of one kind, with targets."""
        inputs = torch.randn(count, *self.shape)
        if kind in ("kink, equal", "extreme, equal"):
            inputs = inputs[:1].expand(count, *self.shape).clone()
        if kind.startswith("extreme"):
            inputs = inputs * 10.0 ** torch.randint(-30, 31, (count, *[1] * len(self.shape)))
        with torch.no_grad():  # at the kink, as computed in one of several shapes
            pieces = [
                self.module(piece).flatten(1)
                for piece in inputs.split(int(torch.randint(1, 9, ())))
            ]
        targets = torch.cat(pieces)
        if kind == "mixed":
            inputs[::3] = float("nan")
            inputs[1::5] = 3e38
        return inputs, targets

    def prepare(self, shape: PassShape, width: int) -> tuple[CheckedEngine, bool]:
        """Check rows as before the first release of a run.

        Return the engine and whether rows need fixed places.
        """
        if shape not in self.checked:
            public = torch.randn(64, *self.shape), torch.randn(64, width)
            self.checked[shape] = engine_with_equal_rows(
                self.engine,
                self.model_1D[0],
                public,
                lambda fixed: {replace(shape, fixed=fixed): 1},
            )
        return self.checked[shape]

    def sum(
        self, inputs: Tensor, targets: Tensor, present: Tensor, clip: float, shape: PassShape
    ) -> Tensor:
        """Return the clipped sum of a batch in double precision."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, _ = self.prepare(shape, targets.shape[1])
            total = engine.clipped_sum(
                self.model_1D,
                inputs[None].clone(),
                targets[None].clone(),
                present[None],
                clip,
                shape,
            )
        return total[0].double()


KINDS = ("kink, equal", "kink, different", "extreme, equal", "extreme, different", "mixed")


def trials(case: str, loss: str, seed: int, count: int) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield how far the sums of one neighbouring pair after the other are apart, in clip norms."""
    bench, made = Bench(case, loss, seed), 0
    chance = torch.Generator().manual_seed(seed)

    def pick(values: tuple[Any, ...]) -> Any:
        return values[int(torch.randint(len(values), (), generator=chance))]

    while made < count:
        kind, shape, clip, size = (
            pick(KINDS),
            pick(SHAPES),
            pick((1.0, 0.1, 1e-4, 30.0)),
            pick(SIZES),
        )
        inputs, targets = bench.rows(size, kind)
        present = torch.ones(size, dtype=torch.bool)
        whole_D = bench.sum(inputs, targets, present, clip, shape)
        for gone in sorted({0, size // 2, size - 1}):
            for change_D in _without(bench, inputs, targets, gone, clip, shape):
                made += 1
                change = float((whole_D - change_D).norm()) / clip
                yield (
                    change,
                    {
                        "case": case,
                        "loss": loss,
                        "seed": seed,
                        "kind": kind,
                        "clip": clip,
                        "size": size,
                    },
                )


def _without(
    bench: Bench, inputs: Tensor, targets: Tensor, gone: int, clip: float, shape: PassShape
) -> Iterator[Tensor]:
    """Yield the sums of neighbouring batches.

    One has a hole; where places do not matter, the last row fills it or all move up.
    """
    size = len(inputs)
    present = torch.arange(size) != gone
    yield bench.sum(inputs, targets, present, clip, shape)
    if bench.prepare(shape, targets.shape[1])[1]:
        return
    order = torch.arange(size - 1)
    if gone < size - 1:
        order[gone] = size - 1
    for kept in (order, torch.arange(size)[present]):
        yield bench.sum(inputs[kept], targets[kept], present[kept] | True, clip, shape)
