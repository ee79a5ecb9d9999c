"""Other devices: passes run where the data are, as far as a machine without a GPU can tell.

Tensors on torch's "meta" device have a shape and a device but no values: whatever mixes devices, or
looks at a value to decide what to do next, fails on them."""

from __future__ import annotations

import pytest
import torch

from dpcsgp.errors import ConfigError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.runs.design import check_device
from dpcsgp.tasks import Supervised, build_model


@pytest.mark.parametrize(
    "model", ["mlp:8", "mlp:8,4", "logistic"]
)  # convolutions pick filled places: no meta version
def test_examples_and_clipped_sums_stay_on_the_device(model: str) -> None:
    module = build_model(model, (1, 28, 28), 10)
    dim = ParameterLayout.of(module).flatten(module).numel()
    inputs, labels = (
        torch.empty(12, 1, 28, 28, device="meta"),
        torch.zeros(12, dtype=torch.int64, device="meta"),
    )
    task = Supervised(module, inputs, labels, (6, 6), (inputs, labels))
    found, targets = task.examples(torch.zeros(2, 4, dtype=torch.int64))
    assert found.device.type == targets.device.type == "meta"
    models_ND = torch.empty(2, dim, device="meta")
    engine = clipping_engine(module, task.loss)
    sum_ND = engine.clipped_sum(
        models_ND, found, targets, torch.ones(2, 4, dtype=torch.bool, device="meta"), 1.0
    )
    assert sum_ND.device.type == "meta"
    assert sum_ND.shape == models_ND.shape


def test_a_device_that_is_not_there_is_refused_before_anything_is_spent() -> None:
    check_device("cpu")
    with pytest.raises(ConfigError, match=r"run\.device = 'gpu'.*no such device"):
        check_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"run\.device = 'cuda'.*set run\.device = 'cpu'"):
            check_device("cuda")
