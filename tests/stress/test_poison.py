"""A poisoned example (NaN or infinite pixels) leaves no trace: it counts as a zero gradient,
silently.

Compared are two seeded runs whose data differ in one example of node 2: poisoned, or absent (a
place that is never drawn would change the batch, so "absent" is an example with a zero gradient).
Everything an observer could see must be equal bit for bit."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpcsgp import training
from dpcsgp.config import load_config
from dpcsgp.network import Simulator
from dpcsgp.privacy import ClippingEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import write_results

SETTINGS = [
    "task.name=digits", "task.model=mlp:16", "graph.name=directed_ring", "graph.num_nodes=4",
    "algorithm.steps=6", "privacy.epsilon=4", "privacy.seed=3",
    "run.evaluate_every=2", "run.checkpoint_every=3",
]  # fmt: skip


class Tap(Simulator):
    """Keeps every frame."""

    frames: list[Tensor]

    def exchange(self, frames_NB: Tensor) -> Tensor:
        self.frames = [*getattr(self, "frames", []), frames_NB.clone()]
        return super().exchange(frames_NB)


class Without:
    """A clipping engine for which the examples with these values are absent."""

    def __init__(self, engine: ClippingEngine, value: float) -> None:
        self._engine, self._value = engine, value

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = PassShape(),
    ) -> Tensor:
        absent_NE = (inputs == self._value).flatten(2).any(-1)
        return self._engine.clipped_sum(
            parameters_ND, inputs, targets, present_NE & ~absent_NE, clip_norm, shape
        )


def watched_run(
    out: Path, pixel: float | None, *settings: str
) -> tuple[training.Run, training.Progress]:
    """Train with one example of node 2 set to `pixel`; None: the same example marked and left
    out."""
    mark = 12345.0
    config = load_config(None, [*SETTINGS, *settings])
    data = load_builtin_data(config)
    victim = data.parts[2][:5]
    inputs = data.inputs.clone()
    inputs[victim, ..., :3] = mark if pixel is None else pixel
    design = design_run(config, data.facts)
    folder = ResultsFolder.create(out, config)
    run = build_run(design, replace(data, inputs=inputs), Tap(design.topology), folder)
    if pixel is None:
        engine = Without(run.gradients.engine, mark)
        run = replace(run, gradients=replace(run.gradients, engine=engine))
    progress = training.train(run)
    write_results(folder, design, run, progress)
    run.gradients.ledger.close()
    return run, progress


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp:16", "logistic"])
@pytest.mark.parametrize(
    "pixel", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "overflow"]
)
def test_a_poisoned_example_is_as_if_absent(
    tmp_path: Path,
    pixel: float,
    model: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    outputs = []
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, value in (("poisoned", pixel), ("absent", None)):
            run, progress = watched_run(tmp_path / name, value, f"task.model={model}")
            captured = capfd.readouterr()
            told = [str(warning.message) for warning in caught]
            told += [record.getMessage() for record in caplog.records]
            outputs.append((run, progress, captured.out + captured.err, told))
            caught.clear()
            caplog.clear()
    (poisoned, end, text, told), (absent, other_end, other_text, other_told) = outputs
    assert isinstance(poisoned.network, Tap)
    assert isinstance(absent.network, Tap)
    assert end.stopped_because == other_end.stopped_because == "completed"
    assert (text, told) == (other_text, other_told)
    assert all(
        torch.equal(a, b)
        for a, b in zip(poisoned.network.frames, absent.network.frames, strict=True)
    )
    assert torch.isfinite(end.state.x_ND).all()
    ledgers = [
        sorted(p.name for p in (tmp_path / name / "ledger").iterdir())
        for name in ("poisoned", "absent")
    ]
    assert ledgers[0] == ledgers[1]
    assert poisoned.gradients.ledger.releases(2) == absent.gradients.ledger.releases(2)
