"""`dpcsgp.plan`: settings and costs for one's own model, without private data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpcsgp
from dpcsgp.cli.main import app
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.planning.pass_costs import measure_passes
from dpcsgp.privacy import clipping_engine
from dpcsgp.tasks.models import build_model
from dpcsgp.tasks.supervised import LOSSES

SIZES = [40, 50, 60]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))


def examples(count: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
    return scale * inputs, (inputs[:, 0] > 0).long()


def test_what_is_planned_is_what_train_does(tmp_path: Path) -> None:
    found = dpcsgp.plan(net, SIZES, epsilon=4.0, delta=1e-3)
    nodes = [examples(size) for size in SIZES]
    by_default = dpcsgp.train(net, nodes, epsilon=4.0, delta=1e-3, out=tmp_path / "default")
    planned = dpcsgp.train(net, nodes, settings=found.settings, out=tmp_path / "planned")
    for result in (by_default, planned):
        flat = load_config(result.folder / "config.toml").flat()
        assert {name: flat[name] for name in found.settings} == found.settings
        assert result.summary["bytes_per_edge"] == found.bytes_per_edge
        assert result.summary["noise_multiplier"] == list(found.noise_multipliers)
    assert found.config().task.name == "own"


def test_the_plan_fits_a_terminal_and_names_costs_and_choices() -> None:
    text = repr(dpcsgp.plan(net, SIZES, epsilon=4.0, test_data=examples(30)))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("noise", "learning rate", "bytes per edge", "memory", "time", "longer at the"):
        assert word in text
    assert "by the rule    privacy.delta" in text


def test_short_public_gradients_lower_the_clip_norm_and_the_rate_follows() -> None:
    usual = dpcsgp.plan(net, SIZES, epsilon=4.0)
    short = dpcsgp.plan(_flat, SIZES, epsilon=4.0, test_data=examples(30, scale=0.01))
    assert short.gradients is not None
    clip_norm = short.settings["privacy.clip_norm"]
    assert clip_norm == pytest.approx(short.gradients.median, rel=0.5)
    assert clip_norm < 0.9
    path = short.settings["algorithm.learning_rate"] * clip_norm
    assert path == pytest.approx(usual.settings["algorithm.learning_rate"], rel=0.1)
    fixed = {"privacy.clip_norm": 1.0}
    kept = dpcsgp.plan(_flat, SIZES, test_data=examples(30, scale=0.01), settings=fixed)
    assert kept.settings["privacy.clip_norm"] == 1.0


def _flat() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, 2, bias=False))


def test_inputs_that_nobody_described_leave_time_and_memory_open() -> None:
    def picture() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))

    unknown = dpcsgp.plan(picture, SIZES, epsilon=4.0)
    assert unknown.seconds is None and "give input_shape" in repr(unknown)
    known = dpcsgp.plan(picture, SIZES, epsilon=4.0, input_shape=(1, 8, 8))
    assert known.seconds is not None and known.memory_bytes
    assert known.settings == unknown.settings
    with pytest.raises(ModelError, match=r"input_shape=\(\.\.\.\)"):
        dpcsgp.plan(picture, SIZES, epsilon=4.0, input_shape=(3, 8, 8))


def test_hopeless_noise_is_called_so() -> None:
    assert "noise dominates" in dpcsgp.plan(net, [2, 2], epsilon=0.1).verdict
    assert "small noise" in dpcsgp.plan(net, [5000, 5000], epsilon=8.0).verdict


@pytest.mark.parametrize("sizes", [[], [0, 0], [60, -1]])
def test_sizes_that_cannot_be_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="num_examples"):
        dpcsgp.plan(net, sizes, epsilon=1.0)


def test_a_pass_is_seen_with_all_that_it_holds() -> None:
    def per_row(width: int) -> float:
        module = build_model(f"mlp:{width}", (64,), 10)
        engine = clipping_engine(module, LOSSES["cross_entropy"][0])
        rows = torch.rand(8, 64), torch.arange(8)
        return measure_passes(engine, module, *rows).bytes_per_row

    # at least the hidden layer, its activation and its gradient are held for every row
    assert per_row(4096) - per_row(1024) >= 3 * 4 * 3072


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dpcsgp", *words])
    with pytest.raises(SystemExit) as ended:
        app()
    captured = capsys.readouterr()
    return (ended.value.code or 0), captured.out, captured.err  # pyright: ignore[reportReturnType]


MODEL = """from torch import nn
def build():
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
"""


def test_the_command_plans_for_a_model_of_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    Path("planned_model.py").write_text(MODEL)
    words = ("plan", "--model", "planned_model:build", "--num-examples", "40,50,60")
    code, out, err = command(
        capsys, monkeypatch, *words, "--epsilon", "4", "--json", "--out", "p.toml"
    )
    assert code == 0, err
    answer = json.loads(out)
    assert answer["settings"] == dpcsgp.plan(net, SIZES, epsilon=4.0).settings
    assert load_config(Path("p.toml")).flat()["algorithm.steps"] == 40
    code, out, _ = command(capsys, monkeypatch, *words, "--epsilon", "4")
    assert code == 0 and "learning rate" in out
    for wrong, message in (
        (("--model", "planned_model:bild"), "nothing named 'bild'"),
        (("--model", "no_such_module:build"), "PYTHONPATH"),
        (("--num-examples", "40,x"), "whole numbers"),
        (("--max-minutes", "3"), "--max-minutes"),
    ):
        code, _, err = command(capsys, monkeypatch, *words, *wrong)
        assert code == 2 and message in " ".join(err.split())


def test_doctor_and_audit_take_the_folder_of_an_own_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "own"
    nodes: list[Any] = [None, *(examples(size) for size in SIZES)]
    dpcsgp.train(
        net, nodes, test_data=examples(9), epsilon=4.0, settings={"algorithm.steps": 3}, out=out
    )
    code, text, err = command(capsys, monkeypatch, "doctor", str(out), "--json")
    assert code == 0, err
    assert json.loads(text)["dim"] == sum(p.numel() for p in net().parameters())
    few = ("--trials", "80", "--draws", "10000", "--json")
    code, text, err = command(capsys, monkeypatch, "audit", str(out / "config.toml"), *few)
    assert code == 0, err
    assert json.loads(text)["mechanism"]["stated_examples"] == 40
    (out / "facts.json").unlink()
    for name in ("doctor", "audit"):
        code, _, err = command(capsys, monkeypatch, name, str(out))
        assert code == 2 and "dpcsgp.plan(model" in " ".join(err.split())


def test_one_number_is_a_single_node() -> None:
    one, listed = (
        dpcsgp.plan(nn.Linear(4, 2), sizes, epsilon=2.0, delta=1e-3) for sizes in (300, [300])
    )
    assert one.settings == listed.settings
