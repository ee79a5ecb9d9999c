"""Trackers show what the rows say, eps among it, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpcsgp
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import read_rows
from dpcsgp.records.trackers import Trackers, numbers_of

INPUTS = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
DATA = INPUTS, (INPUTS[:, 0] > 0).long()


def fit(out: Path, *trackers: str, **changes: Any) -> dpcsgp.Result:
    nodes = [tuple(part[start : start + 40] for part in DATA) for start in (0, 40)]
    settings = {
        "algorithm.steps": 4,
        "run.evaluate_every": 2,
        "privacy.seed": 9_1735,
        "run.trackers": list(trackers),
    }
    return dpcsgp.train(
        nn.Linear(4, 2), nodes, test_data=DATA, epsilon=8.0, delta=1e-3, settings=settings,
        out=out, **changes,
    )  # fmt: skip


def test_rows_settings_and_the_ending_reach_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="an extra: dpcsgp[mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    fit(tmp_path / "run", "mlflow", should_stop=lambda step: step == 2)
    result = fit(tmp_path / "run", "mlflow", resume=True)  # the same MLflow run goes on
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("dpcsgp")
    (run,) = client.search_runs([experiment.experiment_id])
    last = result.history[-1]
    assert run.data.metrics["accuracy_node_mean"] == pytest.approx(last["accuracy_node_mean"])
    assert run.data.metrics["epsilon"] == pytest.approx(result.epsilon)
    assert run.data.params["privacy.delta"] == "0.001" and run.info.status == "FINISHED"
    assert run.data.tags["stopped because"] == "completed"
    assert "91735" not in str(run.data.to_dictionary())  # the seed of the noise stays here


def test_an_active_run_of_the_caller_is_used_and_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="an extra: dpcsgp[mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    with mlflow.start_run() as active:
        fit(tmp_path / "a", "mlflow")
        fit(tmp_path / "b", "mlflow")
        assert mlflow.active_run() is not None
    assert "epsilon" in mlflow.MlflowClient().get_run(active.info.run_id).data.metrics


def test_weights_and_biases_stay_offline_and_get_no_printed_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="an extra: dpcsgp[wandb]")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    secret = "a line that was printed"
    fit(tmp_path / "run", "wandb", on_evaluation=lambda row: print(secret))
    assert wandb.run is None  # closed
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    text = log.read_bytes()
    assert b"accuracy_node_mean" in text and b"epsilon" in text
    assert secret.encode() not in text and b"91735" not in text


def test_a_tracker_that_is_missing_is_refused_before_anything_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'"wandb", which is not installed; pip install "dpcsgp'):
        fit(tmp_path / "run", "wandb")
    assert not (tmp_path / "run").exists()
    assert load_config(None, ["run.trackers=mlflow"]).run.trackers == ["mlflow"]
    with pytest.raises(ConfigError, match=r"run.trackers .*'tensorboard', 'mlflow' or 'wandb'"):
        fit(tmp_path / "run", "neptune")


def test_a_tracker_that_is_missing_is_refused_before_data_count_as_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    unreadable = [(torch.zeros(4, 3), torch.zeros(5).long())]  # would be refused when it is read
    with pytest.raises(ConfigError, match='"mlflow", which is not installed'):
        dpcsgp.train(
            torch.nn.Linear(3, 2), unreadable, epsilon=2.0, delta=1e-3, out=tmp_path / "run",
            settings={"run.trackers": ["mlflow"]},
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_left_out_with_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra: dpcsgp[tensorboard]")
    trackers = Trackers(["tensorboard"], tmp_path / "other", "id", {})
    with pytest.warns(UserWarning, match=r'"tensorboard" failed .*goes on without it'):
        trackers.write({"step": "no number", "epsilon_nodes": [1.0], "x": 1.0})
    trackers.close("completed")


def test_only_numbers_of_rows_are_shown(tmp_path: Path) -> None:
    folder = fit(tmp_path / "run").folder
    row = read_rows(folder / "metrics.jsonl")[-1]
    shown = numbers_of(row)
    assert shown["epsilon"] == max(row["epsilon_nodes"])
    assert set(shown) - {"epsilon"} <= set(row) and "nodes" not in shown and "step" not in shown
