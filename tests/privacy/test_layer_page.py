"""docs/layers.md names the layers that have closed forms, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.layer_rules import COMPOSITES, FOREIGN_RULES, RULES, has_rule
from dpcsgp.privacy.model_checks import check_model

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")


def first_cells(title: str) -> list[str]:
    """Return the first cells of the table below a title."""
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.*?) \|", part, re.MULTILINE)[1:]


def test_the_page_lists_the_layers_with_closed_forms() -> None:
    listed = {name for cell in first_cells("Fast") for name in re.findall(r"`(\w+)`", cell)}
    inside = nn.modules.linear.NonDynamicallyQuantizableLinear  # a part of MultiheadAttention
    there = {kind.__name__ for kind in (*RULES, *COMPOSITES) if kind is not inside}
    assert listed == there | {name for _, name in FOREIGN_RULES}


def test_the_layers_that_the_page_calls_slow_have_no_closed_form() -> None:
    named = re.findall(r"\| other layers \| (.*) \|", PAGE)[0]
    kinds = [getattr(nn, name) for name in re.findall(r"`(\w+)`", named)]
    assert kinds and not {*RULES, *COMPOSITES}.intersection(kinds)


OPTIONS: dict[str, Callable[[], nn.Module]] = {
    "LSTM(proj_size=...)": lambda: nn.LSTM(3, 4, proj_size=2),  # torch.func has none either
    "MultiheadAttention(kdim=...)": lambda: nn.MultiheadAttention(4, 2, kdim=3),
    "add_bias_kv": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    'EmbeddingBag(mode="max")': lambda: nn.EmbeddingBag(3, 2, mode="max"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_the_page_calls_slow_have_no_closed_form(option: str) -> None:
    assert f"`{option}`" in PAGE
    assert not has_rule(OPTIONS[option]())


def test_projected_lstms_are_refused_with_what_the_page_promises() -> None:
    with pytest.raises(ModelError, match=r"proj_size=2.* LSTM without it, then nn\.Linear\(4, 2\)"):
        check_model(nn.LSTM(3, 4, proj_size=2))
    check_model(nn.Sequential(nn.LSTM(3, 4, proj_size=2).requires_grad_(False), nn.Linear(2, 2)))


SLOW: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "PReLU": (nn.PReLU, (4,)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(1, 2, 2), (1, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2)),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_layers_work_and_say_so(name: str) -> None:
    build, shape = SLOW[name]
    module = build()
    engine = clipping_engine(module, lambda out, targets: out.flatten(1).square().sum(1))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    inputs, present = torch.randn(1, 3, *shape), torch.ones(1, 3, dtype=torch.bool)
    with pytest.warns(UserWarning, match=f"no closed form.*{name}"):
        total = engine.clipped_sum(flat_1D, inputs, torch.zeros(1, 3), present, 1.0)
    assert 0 < float(total.norm()) <= 3.1
