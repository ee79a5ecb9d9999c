"""Expected batch and rows of a pass are two things: fewer rows at a time, the same release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpcsgp
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.tasks.supervised import cross_entropy_per_example

MODELS = {
    "stack": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    ),
}


class Noisy(Dataset[Any]):
    """Rows that are read when they are drawn, each with a view of its own."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # hardly to be seen: which place has which view may depend on the number of places
        return self.rows[index] + 1e-7 * torch.randn(6), self.labels[index]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_run_is_the_same_with_one_three_and_all_rows_per_pass(
    tmp_path: Path, name: str, lazy: bool
) -> None:
    """The same examples, views and noise: models differ by rounding alone. Sizes differ, so that
    nodes have passes of several shapes."""
    torch.manual_seed(0)
    module, found = MODELS[name](), []
    rows = [torch.randn(count, 6) for count in (40, 90)]
    tables = [(part, (part[:, 0] > 0).long()) for part in rows]
    data = [Noisy(*table) for table in tables] if lazy else tables
    for most in (1, 3, 50, "auto"):
        result = dpcsgp.train(
            module,
            data,
            epsilon=4.0,
            delta=1e-3,
            settings={
                "run.max_rows_per_pass": most,
                "algorithm.steps": 2,
                "privacy.seed": 3,
                "compression.spec": "none",
            },
            out=tmp_path / str(most),
        )
        found.append(result.model(rows[0]).detach())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_bytes_of_a_row_follow_from_shapes() -> None:
    def row_bytes(width: int) -> int:
        module = nn.Sequential(nn.Unflatten(1, (1, width)), nn.Conv1d(1, 8, 3), nn.Tanh())
        module.append(nn.Flatten())
        engine = clipping_engine(module, cross_entropy_per_example)
        flat_1D = ParameterLayout.of(module).flatten(module)[None]
        state = torch.get_rng_state()
        found = [engine.row_bytes(flat_1D, fill * torch.ones(1, width)) for fill in (0.0, 1e9)]
        assert found[0] == found[1] and torch.equal(state, torch.get_rng_state())
        return found[0]

    small, large = row_bytes(100), row_bytes(1000)
    assert 4 * 8 * 98 <= small <= 20 * 8 * 98  # the outputs, and a few times that
    assert 8 < large / small < 12


SCRIPT = """
import resource, sys, torch
from torch import nn
import dpcsgp
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Unflatten(1, (1, 64, 64)), nn.Conv2d(1, 32, 3, padding=1)]
for _ in range(6):
    layers += [nn.Tanh(), nn.Conv2d(32, 32, 3, padding=1)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
rows = torch.randn(200, 4096)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dpcsgp.train(model, [(rows, (rows[:, 0] > 0).long())], epsilon=2.0, delta=1e-3, out=sys.argv[1],
    settings={"algorithm.name": "dp-sgd", "algorithm.steps": 1, "run.max_rows_per_pass": "auto",
              "run.memory_limit_gb": float(sys.argv[2]), "privacy.expected_batch_size": 100})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6)
"""


@pytest.mark.stress
def test_the_limit_bounds_what_a_run_takes(tmp_path: Path) -> None:
    """A row keeps about 14 MB: 100 at a time would take 1.4 GB, and checks take memory, too."""
    peaks = {
        limit: float(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, str(tmp_path / limit), limit],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()[-1]
        )
        for limit in ("0.1", "2.0")
    }
    assert peaks["0.1"] < peaks["2.0"]
