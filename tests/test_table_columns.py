"""Tables whose columns have other orders at different nodes: brought into one, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dpcsgp
from dpcsgp.errors import RefusedDataError


def frame(seed: int, order: str = "abcd") -> tuple[Any, Any]:
    inputs = pd.DataFrame(np.random.default_rng(seed).normal(size=(30, 4)), columns=list("abcd"))
    return inputs[list(order)], (inputs["a"] > 0).astype(int)


def trained(out: Path, nodes: list[Any], test: Any = None) -> torch.Tensor:
    torch.manual_seed(0)
    settings = {"algorithm.steps": 3, "privacy.seed": 1, "graph.name": "complete"}
    result = dpcsgp.train(
        nn.Linear(4, 2), nodes, test_data=test, epsilon=3.0, delta=1e-3, settings=settings, out=out
    )
    return load_file(result.folder / "model.safetensors")["node_models"]


def test_tables_in_another_order_train_the_same_bits(tmp_path: Path) -> None:
    right = trained(tmp_path / "right", [frame(1), frame(2)], frame(3))
    mixed = trained(tmp_path / "mixed", [frame(1, "dcba"), frame(2, "bacd")], frame(3))
    assert torch.equal(right, mixed)
    first = trained(tmp_path / "first", [frame(1), frame(2, "bacd")])
    assert torch.equal(first, trained(tmp_path / "alike", [frame(1), frame(2)]))
    # Without names there is nothing to compare.
    bare = [(inputs.to_numpy(), targets) for inputs, targets in (frame(1), frame(2))]
    numbered = [(pd.DataFrame(inputs), targets) for inputs, targets in bare]
    assert torch.equal(first, trained(tmp_path / "numbered", [numbered[0], bare[1]]))


def test_other_names_are_refused_by_node_and_name(tmp_path: Path) -> None:
    inputs, targets = frame(2)
    with pytest.raises(RefusedDataError, match="node 1: no column 'a'; unexpected columns 'z'"):
        trained(tmp_path / "run", [frame(1), (inputs.rename(columns={"a": "z"}), targets)])
    with pytest.raises(RefusedDataError, match="node 1: more than one column 'a'"):
        trained(tmp_path / "run", [frame(1), (inputs.rename(columns={"b": "a"}), targets)])


def test_rows_in_another_order_than_their_targets_are_refused(tmp_path: Path) -> None:
    inputs, targets = frame(2)
    with pytest.raises(RefusedDataError, match=r"node 1: targets and inputs .*\.loc\[inputs.index"):
        trained(tmp_path / "run", [frame(1), (inputs, targets.iloc[::-1])])
    turned = inputs.iloc[::-1]
    fixed = trained(tmp_path / "a", [frame(1), (turned, targets.loc[turned.index])])
    plain = turned.reset_index(drop=True), targets.loc[turned.index].reset_index(drop=True)
    assert torch.equal(fixed, trained(tmp_path / "b", [frame(1), plain]))
