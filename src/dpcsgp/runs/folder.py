"""The results folder: settings, environment, rows, ledger, checkpoints, model and summary."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dpcsgp.config import Config, load_config, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.records.files import write_atomically
from dpcsgp.records.metrics import environment, write_json


def new_run_id() -> str:
    """Return a fresh public name for a run; ledgers and checkpoints carry it."""
    return secrets.token_hex(8)


def new_folder(config: Config) -> Path:
    """Return a fresh name under runs/."""
    method = config.algorithm.name.replace(":", "-")
    # Two runs started in the same second get -2, -3 and so on.
    name = f"{config.task.name}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    suffixes = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))
    folders = (Path("runs") / f"{name}{suffix}" for suffix in suffixes)
    return next(folder for folder in folders if not folder.exists())


@dataclass(frozen=True)
class ResultsFolder:
    """A folder that belongs to exactly one run.

    Attributes:
        path: where it is.
        run_id: public name of the run.
        checkpoints: where its checkpoints are; None: in the folder itself.
        ledger_node: number under which the only hosted node began its ledger; None: its own. It
            differs where a roster was amended and the node got another number.
    """

    path: Path
    run_id: str
    checkpoints: Path | None = None
    ledger_node: int | None = None

    def ledger_nodes(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers under which the ledgers of these hosted nodes were begun."""
        return tuple(nodes) if self.ledger_node is None else (self.ledger_node,)

    @classmethod
    def create(cls, path: Path, config: Config) -> ResultsFolder:
        """Start a new folder; one that already holds a run is refused: nothing is overwritten."""
        refuse_taken(path)
        folder = cls(path, new_run_id())
        try:
            folder._write_start(config)
        except OSError as error:
            raise ConfigError(
                f"--out {path} cannot be written: {error.strerror}; choose another folder"
            ) from None
        return folder

    @classmethod
    def reopen(cls, path: Path) -> tuple[ResultsFolder, Config]:
        """Open the folder of a run that is to be continued, and return its settings too."""
        try:
            run_id = json.loads((path / "environment.json").read_text())["run_id"]
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"--resume: {path} holds no run (environment.json is missing or damaged)"
            ) from None
        return cls(path, run_id), load_config(path / "config.toml")

    @classmethod
    def open(cls, path: Path, config: Config, resume: bool) -> ResultsFolder:
        """Reopen the folder of a run that is resumed, or start a new one."""
        return cls.reopen(path)[0] if resume else cls.create(path, config)

    @classmethod
    def join(cls, path: Path, config: Config, run_id: str) -> ResultsFolder:
        """Use the folder that rank 0 made; without a shared disk, make one of the same run."""
        folder = cls(path, run_id)
        if not (path / "environment.json").exists():
            folder._write_start(config)
        return folder

    def write_model(
        self, average_D: Tensor | None, models_ND: Tensor, nodes: Sequence[int] | None = None
    ) -> None:
        """Write models as flat vectors in the order of the module's parameters.

        Args:
            average_D: the average model; None where nobody has all models.
            models_ND: every node's model.
            nodes: whose models these are; None: those of all nodes, in order.
        """
        tensors = {"node_models": models_ND.cpu().contiguous()}
        if nodes is not None:
            tensors["nodes"] = torch.tensor(nodes, dtype=torch.int64)
        if average_D is not None:
            tensors["average_model"] = average_D.cpu().contiguous()
        write_atomically(self.path / "model.safetensors", save(tensors))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.path / "summary.json", summary)

    def _write_start(self, config: Config) -> None:
        # config.toml comes last: `refuse_taken` looks for it.
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "environment.json", {"run_id": self.run_id, **environment()})
        write_atomically(self.path / "config.toml", to_toml(config).encode())


def write_classes(folder: Path, classes: Sequence[Any] | None) -> None:
    """Keep the labels that the model's outputs stand for, if labels were mapped."""
    if classes is not None:
        labels = [label if isinstance(label, int | float) else str(label) for label in classes]
        write_atomically(folder / "classes.json", (json.dumps(labels) + "\n").encode())


def refuse_taken(path: Path) -> None:
    """Refuse a folder that already holds a run."""
    if (path / "config.toml").exists():
        raise ConfigError(
            f"--out {path} already holds a run; continue it with --resume, or name another folder"
        )


def open_config(
    config_file: Path | None, settings: Sequence[str], out: Path | None, resume: bool
) -> Config:
    """Return the settings: of the results folder when resuming, else of the file and --set."""
    if not resume:
        return load_config(config_file, settings)
    if out is None:
        raise ConfigError("--resume needs --out FOLDER: the results folder of the run to continue")
    if config_file is not None or settings:
        raise ConfigError(
            "--resume takes its settings from the results folder; "
            "leave out the config file and --set"
        )
    config = ResultsFolder.reopen(out)[1]
    refuse_changed_settings(out, config)
    return config


def refuse_changed_settings(out: Path, config: Config) -> None:
    """Refuse to go on under other settings than those the ledgers were started with."""
    ledgers = (out / "ledger").glob("node-*.jsonl")
    started = {read_ledger(file).header.config for file in ledgers}
    # Machines of one run may differ in a few local settings, and the folder holds rank 0's: one
    # match is enough.
    if started and config.fingerprint() not in started:
        raise ConfigError(
            f"--resume: {out / 'config.toml'} is not what this run was started with; restore it, "
            "or start a new run in another --out folder (both ledgers then count: `dpcsgp account "
            "FIRST SECOND`)"
        )


def previous_processes(checkpoints: Path) -> set[int]:
    """Return how many processes wrote the checkpoints in a folder (empty: there are none)."""
    files = checkpoints.glob("step-*.part-*-of-*.json")
    return {int(path.stem.rpartition("-of-")[2]) for path in files}
