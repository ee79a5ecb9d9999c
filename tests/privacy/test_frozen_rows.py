"""Features of private rows: the same bits whatever the other rows are, and however many."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.frozen_rows import ROWS_OF_A_PASS, FrozenRows

EXTREMES = (float("nan"), float("inf"), -1e38, 1e-42, 0.0)


class Attending(nn.Module):
    """Words, an encoder layer, their mean; the head is `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Linear(5, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(self.layer(self.words(rows)).mean(dim=1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3),
        nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


MODELS = {"attention": (Attending, "out", (7, 5)), "convolution": (convolutions, "6", (1, 8, 8))}


def passes(name: str) -> tuple[FrozenRows, Tensor]:
    torch.manual_seed(0)
    build, entry, shape = MODELS[name]
    rows = torch.randn(150, *shape)
    public = torch.randn(32, *shape), torch.zeros(32)
    return FrozenRows.checked(build(), entry, public, max(ROWS_OF_A_PASS)), rows


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_more_or_less_changes_no_bit_of_the_others(name: str) -> None:
    """One row taken out moves all that follow, over the borders of passes too."""
    frozen, rows = passes(name)
    whole = frozen.features(rows)
    assert frozen.rows_per_pass == 64
    for gone in (0, 1, 63, 64, 100, 149):
        left = torch.cat([rows[:gone], rows[gone + 1 :]])
        expected = torch.cat([whole[:gone], whole[gone + 1 :]])
        assert torch.equal(bits(frozen.features(left, len(rows))), bits(expected))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("value", EXTREMES)
def test_hostile_companions_change_no_bit(name: str, value: float) -> None:
    frozen, rows = passes(name)
    whole, hostile = frozen.features(rows), rows.clone()
    kept = torch.arange(len(rows)) % 3 != 0
    hostile[~kept] = value
    assert torch.equal(bits(frozen.features(hostile)[kept]), bits(whole[kept]))


class Raising(nn.Module):
    """Raises on rows with a large first value; in `bad` passes gives features of another shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.out, self.how = nn.Linear(4, 6), nn.Linear(6, 2), how

    def forward(self, rows: Tensor) -> Tensor:
        features, bad = self.body(rows), bool((rows[:, 0] > 50).any())
        if bad and self.how == "raises":
            raise ValueError("a secret value")
        if bad and self.how == "shape":
            features = features[:, None]
        if bad and self.how == "not called":
            return rows[:, :2]
        if bad and self.how == "twice":
            self.out(features)
        return self.out(features)


@pytest.mark.parametrize("how", ["raises", "shape", "not called", "twice"])
def test_a_row_on_which_the_model_fails_has_no_features_and_the_others_keep_theirs(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    public = torch.randn(32, 4), torch.zeros(32)
    frozen = FrozenRows.checked(Raising(how), "out", public, 16)
    rows = torch.randn(100, 4)
    whole, hostile = frozen.features(rows), rows.clone()
    bad = torch.tensor([3, 4, 40, 99])
    hostile[bad, 0] = 60.0
    kept = torch.ones(100, dtype=torch.bool)
    kept[bad] = False
    found = frozen.features(hostile)
    assert found.shape == whole.shape
    assert torch.equal(bits(found[kept]), bits(whole[kept]))
    assert found[bad].isnan().all()
    assert "secret" not in caplog.text


class Mixing(nn.Module):
    """A frozen part that mixes rows in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.out, self.how, self.calls = nn.Linear(4, 6), nn.Linear(6, 2), how, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        features = self.body(rows)
        match self.how:
            case "largest":
                features = features / features.abs().max()
            case "mean":
                features = features - 1e-6 * features.mean(dim=0)
            case "neighbour":
                features = features + 1e-6 * features.roll(1, dims=0)
            case "place":
                features = features + 1e-6 * torch.arange(len(rows))[:, None]
            case "parity":
                features = features + 1e-6 * (rows[:, 0] > 0).sum().remainder(2)
            case "chance":
                features = features + 1e-6 * torch.randn_like(features)
            case "calls":
                features = features + 1e-6 * self.calls
            case "number":
                features = features * len(rows)
        return self.out(features)


@pytest.mark.parametrize("how", ["largest", "mean", "neighbour", "place", "parity"])
def test_rows_that_would_mix_are_passed_one_at_a_time(how: str) -> None:
    """Then nothing can mix: a row taken out still changes no bit."""
    torch.manual_seed(0)
    public, rows = (torch.randn(32, 4), torch.zeros(32)), torch.randn(20, 4)
    frozen = FrozenRows.checked(Mixing(how), "out", public, 64)
    assert frozen.rows_per_pass == 1
    expected = torch.cat([frozen.features(rows)[:7], frozen.features(rows)[8:]])
    found = frozen.features(torch.cat([rows[:7], rows[8:]]))
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("how", ["chance", "calls"])
def test_what_does_not_repeat_itself_has_no_features(how: str) -> None:
    public = torch.randn(32, 4), torch.zeros(32)
    with pytest.raises(ArithmeticError, match="do not repeat"):
        FrozenRows.checked(Mixing(how), "out", public, 64)


def test_the_number_of_rows_of_a_pass_is_public() -> None:
    """A model that counts its rows sees one number, and one number of passes, whoever is there."""
    public = torch.randn(32, 4), torch.zeros(32)
    frozen = FrozenRows.checked(Mixing("number"), "out", public, 64)
    rows, seen = torch.randn(100, 4), []
    run: Any = frozen._run
    frozen._run = lambda batch: seen.append(len(batch)) or run(batch)  # pyright: ignore[reportAttributeAccessIssue]
    whole = frozen.features(rows, 200)
    first = seen.copy()
    seen.clear()
    assert torch.equal(bits(frozen.features(rows[:10], 200)), bits(whole[:10]))
    assert seen == first == [64] * len(first)
    assert len(first) == 1 + 4  # blanks once, then passes for 200 declared rows


def test_the_model_that_is_trained_never_sees_a_row() -> None:
    module = Mixing("none")
    before = copy.deepcopy(module.__dict__["calls"])
    frozen = FrozenRows.checked(module, "out", (torch.randn(8, 4), torch.zeros(8)), 16)
    frozen.features(torch.randn(8, 4))
    assert module.calls == before == 0
    assert not module.out._forward_pre_hooks


@pytest.mark.parametrize("stack", [False, True])
def test_missing_features_count_as_zero_in_the_clipped_sum(stack: bool) -> None:
    """As the whole model does it: a row that raises adds nothing, the others what they add."""
    torch.manual_seed(0)
    frozen = FrozenRows.checked(Raising("raises"), "out", (torch.randn(32, 4), torch.zeros(32)), 16)
    rows, labels = torch.randn(1, 16, 4), torch.randint(2, (1, 16))
    rows[0, 5, 0] = 60.0
    head = nn.Linear(6, 2)
    module = nn.Sequential(head) if stack else head
    engine = clipping_engine(module, lambda out, y: cross_entropy(out, y, reduction="none"))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    features, present = frozen.features(rows[0])[None], torch.ones(1, 16, dtype=torch.bool)
    found = engine.clipped_sum(flat_1D, features.clone(), labels.clone(), present, 1.0)
    present[0, 5] = False
    expected = engine.clipped_sum(flat_1D, features.clone(), labels.clone(), present, 1.0)
    assert torch.equal(bits(found), bits(expected)) and bool(found.any())
