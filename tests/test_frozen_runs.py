"""Whole runs of models of which a head is trained: what they were without features."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpcsgp
from dpcsgp.errors import ModelError
from dpcsgp.runs import build

SETTINGS: dict[str, Any] = {
    "algorithm.steps": 4,
    "privacy.seed": 3,
    "privacy.expected_batch_size": 16,
    "compression.spec": "none",
    "algorithm.learning_rate": 0.5,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 1,
}


def frozen(*layers: nn.Module) -> nn.Sequential:
    """Freeze the first of a sequence of layers."""
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers)


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switch the features off."""
    return lambda: monkeypatch.setattr(build, "with_frozen_features", lambda task, *_: task)


class RowExact(nn.Module):
    """A body whose bits do not depend on the shape of a pass, a head that is no linear stack."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat([first, second], dim=1) * self.gain)


def rows_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 6, generator=generator)
    return rows, (rows[:, 0] > 0).long()


def trained(module: nn.Module, out: Path, split: bool = False, **others: Any) -> dpcsgp.Result:
    def shaped(pair: tuple[Tensor, Tensor]) -> Any:
        rows, labels = pair
        return ({"first": rows[:, :2], "second": rows[:, 2:]} if split else rows), labels

    return dpcsgp.train(
        module,
        [shaped(rows_of(50, 0)), shaped(rows_of(70, 1))],
        test_data=shaped(rows_of(40, 2)),
        epsilon=4.0,
        delta=1e-3,
        settings=SETTINGS,
        out=out,
        **others,
    )


def test_released_sums_are_those_of_the_whole_model_bit_for_bit(
    tmp_path: Path, uncached: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Where features have the same bits in any pass, so has everything that a run leaves."""
    torch.manual_seed(0)
    module = RowExact()
    with caplog.at_level(logging.INFO):
        one = trained(module, tmp_path / "one", split=True, num_examples=[60, 70])
    assert "once per example: 6 features before 'head'" in caplog.text
    uncached()
    other = trained(module, tmp_path / "other", split=True, num_examples=[60, 70])
    models = [load_file(result.folder / "model.safetensors") for result in (one, other)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    drop = {"seconds", "wall_seconds", "time"}
    for here, there in zip(one.history, other.history, strict=True):
        assert {k: v for k, v in here.items() if not drop & set(k.split("_"))} == {
            k: v for k, v in there.items() if not drop & set(k.split("_"))
        }


def test_a_stopped_run_goes_on_to_the_same_bits_and_keeps_no_feature(
    tmp_path: Path, uncached: Callable[[], None]
) -> None:
    torch.manual_seed(0)
    module = frozen(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))
    whole = trained(module, tmp_path / "whole")
    trained(module, tmp_path / "parts", should_stop=lambda step: step == 2)
    resumed = trained(module, tmp_path / "parts", resume=True)
    one, other = (load_file(each.folder / "model.safetensors") for each in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    # the result is the whole model: frozen part as it was, on inputs as they are
    rows, _ = rows_of(40, 2)
    assert whole.model(rows).shape == (40, 2)
    assert torch.equal(whole.state_dict()["0.weight"], module.state_dict()["0.weight"])
    loaded = dpcsgp.load_model(whole.folder, module)
    assert torch.equal(loaded(rows), whole.model(rows))
    # no file holds what the frozen part made of a row
    features = torch.tanh(module[0](rows_of(50, 0)[0])).detach()
    files = [path.read_bytes() for path in (tmp_path / "parts").rglob("*") if path.is_file()]
    assert not any(row[:4].numpy().tobytes() in text for text in files for row in features)
    # and all of it is, but for rounding, what it was without features
    uncached()
    before = trained(module, tmp_path / "before")
    torch.testing.assert_close(whole.model(rows), before.model(rows), rtol=1e-4, atol=1e-5)
    assert whole.history[-1]["accuracy_nodes"] == before.history[-1]["accuracy_nodes"]
    assert whole.epsilon == before.epsilon


def test_persons(tmp_path: Path, uncached: Callable[[], None]) -> None:
    torch.manual_seed(0)
    module, found = frozen(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), []
    unit = [[row // 2 for row in range(50)], [row // 3 for row in range(70)]]
    for name in ("with", "without"):
        more = {**SETTINGS, "privacy.max_rows_per_unit": 2, "privacy.expected_batch_size": 8}
        result = dpcsgp.train(
            module, [rows_of(50, 0), rows_of(70, 1)], epsilon=4.0, delta=1e-3, settings=more,
            unit=unit, out=tmp_path / name,
        )  # fmt: skip
        found.append(result.model(rows_of(40, 2)[0]))
        uncached()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Batchwise(nn.Module):
    """A frozen part that looks at the whole batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2), how

    def forward(self, rows: Tensor) -> Tensor:
        features = self.body(rows)
        scale = features.abs().max() if self.how == "largest" else len(rows)
        return self.head(features / scale)


@pytest.mark.parametrize("how", ["largest", "number"])
def test_a_frozen_part_that_looks_at_the_batch_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(ModelError, match="depends on the other examples"):
        trained(Batchwise(how), tmp_path / how)
    assert not (tmp_path / how).exists()
