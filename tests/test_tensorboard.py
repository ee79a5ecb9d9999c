"""TensorBoard events say what the JSON lines say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli

events: Any = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="TensorBoard is an extra: dpcsgp[tensorboard]",
)


@pytest.mark.slow
def test_events_hold_the_values_of_the_rows(tmp_path: Path) -> None:
    words = [
        "task.name=digits",
        "task.model=logistic",
        "graph.num_nodes=2",
        "algorithm.steps=4",
        "run.evaluate_every=2",
    ]
    flags = [word for setting in (*words, "privacy.epsilon=4") for word in ("--set", setting)]
    done = CliRunner().invoke(
        cli, ["run", *flags, "--tensorboard", "--json", "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    log = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    log.Reload()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [(event.step, event.value) for event in log.Scalars("accuracy_node_mean")]
    assert found == [
        (row["step"], pytest.approx(row["accuracy_node_mean"], abs=1e-6)) for row in rows
    ]
    assert [event.value for event in log.Scalars("epsilon")][-1] == pytest.approx(
        rows[-1]["epsilon_nodes"][0], rel=1e-5
    )
