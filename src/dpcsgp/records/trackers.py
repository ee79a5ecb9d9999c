"""Evaluations in TensorBoard, MLflow or Weights & Biases, beside the JSON lines: `run.trackers`.

They get the numbers of evaluation rows, eps among them, and the settings: what is public anyway.
Printed lines and code are not collected. Each package is imported only when it is asked for. A
tracker that fails later on is left out with a warning; training goes on.

| tracker | where it writes | needs |
|---|---|---|
| `tensorboard` | `tensorboard/` in the results folder | `dpcsgp[tensorboard]` |
| `mlflow` | the active run, or a new one where `MLFLOW_TRACKING_URI` says | `dpcsgp[mlflow]` |
| `wandb` | the active run, or `wandb/` in the results folder; online if `WANDB_MODE` says so | \
`dpcsgp[wandb]` |
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, final

from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import read_rows

# Seeds, paths, and what may change from start to start.
_LEFT_OUT: Final = (
    "privacy.seed",
    "network.key_file",
    "graph.edges_file",
    "run.device",
    "run.trackers",
)
_MODULES: Final = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
_HINTS: Final = {"mlflow": "MLFLOW_TRACKING_URI names a server or a database. "}
_PROJECT: Final = "dpcsgp"


class Tracker(Protocol):
    """Shows the numbers of a run somewhere."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Show the numbers of one evaluation."""
        ...

    def close(self, ending: str) -> None:
        """Show how the run ended, and let go."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before anything is spent."""
    for name in names:
        try:
            import_module(_MODULES[name])
        except ImportError:
            raise ConfigError(
                f'run.trackers has "{name}", which is not installed; '
                f'pip install "dpcsgp[{name}]", or leave it out'
            ) from None


@final
class Trackers:
    """All trackers of a run."""

    def __init__(
        self, names: Sequence[str], folder: Path, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        """Open the trackers.

        Args:
            names: of trackers.
            folder: the results folder.
            run_id: the public name of the run.
            settings: `section.key` -> value; secrets and paths are left out.
        """
        public = {key: value for key, value in settings.items() if key not in _LEFT_OUT}
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            try:
                self._open[name] = _OPENERS[name](folder, run_id, public)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                raise ConfigError(
                    f'run.trackers: "{name}" cannot be opened: {text}. {_HINTS.get(name, "")}'
                    "Nothing was spent: mend it, or leave it out, and go on with --resume"
                ) from error

    def write(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """Show one row of an evaluation; `prefix` comes before every name."""
        values = {prefix + name: value for name, value in numbers_of(row).items()}
        self._each(lambda tracker: tracker.write(values, row["step"]))

    def write_all(self, rows: Path) -> None:
        """Show all rows of a file of evaluations."""
        for row in read_rows(rows) if self._open else ():
            self.write(row)

    def close(self, ending: str) -> None:
        """Show how the run ended."""
        self._each(lambda tracker: tracker.close(ending))
        self._open.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close("failed")  # a run that ended otherwise has closed them

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._open[name]
                warnings.warn(
                    f'run.trackers: "{name}" failed ({type(error).__name__}: {error}); training '
                    "goes on without it",
                    stacklevel=4,
                )


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation row; `epsilon` is the largest over the nodes."""
    values = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name not in ("step", "final")
    }
    return values | {"epsilon": max(float(value) for value in row["epsilon_nodes"])}


@final
class _TensorBoard:
    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ending: str) -> None:
        self._writer.add_text("stopped because", ending)
        self._writer.close()


@final
class _MLflow:
    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._owned = active is None
        self._run = active.info.run_id if active else self._new_run(folder, run_id)
        for key, value in settings.items():
            # The caller's own run may hold several of ours: tags can be replaced, params cannot.
            note = self._client.log_param if self._owned else self._client.set_tag
            note(self._run, key, str(value)[:500])

    def _new_run(self, folder: Path, run_id: str) -> str:
        """Return the MLflow run of this run: the one of an earlier start, or a new one."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        before = self._client.search_runs([experiment], f"tags.`dpcsgp.run_id` = '{run_id}'")
        if before:
            return before[0].info.run_id
        tags = {"dpcsgp.run_id": run_id}
        return self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, ending: str) -> None:
        self._client.set_tag(self._run, "stopped because", ending)
        if self._owned:
            self._client.set_terminated(self._run)


@final
class _WeightsAndBiases:
    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        self._owned = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.name,
            id=run_id,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            # Printed lines, code and facts about the machine are none of its business.
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._run.config.update(dict(settings), allow_val_change=True)
        # Rows of several processes come after those of the first: steps may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self, ending: str) -> None:
        self._run.summary["stopped because"] = ending
        if self._owned:
            self._run.finish()


_OPENERS: Final[dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WeightsAndBiases,
}
