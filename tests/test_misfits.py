"""Number formats and labels that do not fit the model: errors say what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpcsgp
from dpcsgp.errors import DpcsgpError

RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randn(90, 4, generator=RANDOM)
LABELS = (INPUTS[:, 0] > 0).long()
BYTES = torch.randint(0, 256, (90, 1, 4, 4), generator=RANDOM).to(torch.uint8)


def refusal(
    model: nn.Module, inputs: Tensor, targets: Tensor, tested: bool, out: Path, **other: Any
) -> str:
    """Return what is said about such data; nothing may have begun by then."""
    parts = [(x, y) for x, y in zip(inputs.split(30), targets.split(30), strict=True)]
    test = {"test_data": parts[2]} if tested else {}
    with pytest.raises(DpcsgpError) as caught:
        dpcsgp.train(model, parts[:2], epsilon=2.0, delta=1e-3, out=out, **test, **other)
    assert not out.exists()
    return str(caught.value)


FORMATS: dict[str, tuple[nn.Module, Tensor, list[str]]] = {
    "bytes into a convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        BYTES,
        ["(1, 4, 4) (torch.uint8)", ".float() / 255"],
    ),
    "bytes into a linear layer": (
        nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
        BYTES,
        ["torch.uint8", ".float() / 255"],
    ),
    "whole numbers into a linear layer": (
        nn.Linear(4, 2),
        (10 * INPUTS).long(),
        ["(4,) (torch.int64)", "give them as .float(),"],
    ),
    "numbers into an embedding": (
        nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 2)),
        INPUTS,
        ["(4,) (torch.float32)", ".long()"],
    ),
}


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_number_formats_that_layers_do_not_take(name: str, tested: bool, tmp_path: Path) -> None:
    model, inputs, words = FORMATS[name]
    text = refusal(model, inputs, LABELS, tested, tmp_path / "run")
    assert all(word in text for word in words), text


def test_other_errors_get_no_advice_about_formats(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(7, 2))  # 8 would be right
    text = refusal(model, LABELS[:, None].expand(-1, 4), LABELS, True, tmp_path / "run")
    assert "cannot be multiplied" in text and "float()" not in text


LABEL_FORMS: dict[str, tuple[int, Tensor, list[str]]] = {
    "fractions": (2, LABELS.float(), ["torch.float32 of shape ()", "targets.long()", '"mse"']),
    "one-hot": (2, nn.functional.one_hot(LABELS, 2), ["shape (2,)", "targets.argmax(dim=1)"]),
    "a column": (2, LABELS[:, None], ["shape (1,)", "targets.squeeze(1)"]),
    "from one": (2, LABELS + 1, ["label 2", "2 outputs", "subtract 1"]),
    "signs": (2, 2 * LABELS - 1, ["label -1", "(labels + 1) // 2"]),
    "signs for one output": (1, 2 * LABELS - 1, ["1 output", "(labels + 1) // 2"]),
    "one output": (1, LABELS, ["1 output", "give it 2", "binary_cross_entropy_with_logits"]),
}


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.parametrize("name", LABEL_FORMS)
def test_labels_that_cross_entropy_does_not_take(name: str, tested: bool, tmp_path: Path) -> None:
    outputs, labels, words = LABEL_FORMS[name]
    text = refusal(nn.Linear(4, outputs), INPUTS, labels, tested, tmp_path / "run")
    assert all(word in text for word in words), text


def test_probabilities_of_classes_are_targets(tmp_path: Path) -> None:
    shares = nn.functional.one_hot(LABELS, 2).float()
    result = dpcsgp.train(
        nn.Linear(4, 2), [(INPUTS, shares)], epsilon=2.0, delta=1e-3, out=tmp_path / "run",
        settings={"algorithm.name": "dp-sgd", "algorithm.steps": 1},
    )  # fmt: skip
    assert result.summary["steps"] == 1
