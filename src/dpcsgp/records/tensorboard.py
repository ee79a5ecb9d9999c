"""Evaluations as TensorBoard events, beside the JSON lines: `pip install "dpcsgp[tensorboard]"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpcsgp.errors import ConfigError


def tensorboard_log(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes the numbers of an evaluation row under `folder/tensorboard`.

    Rows hold public values only, so the events do as well.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            '--tensorboard: TensorBoard is not installed; pip install "dpcsgp[tensorboard]"'
        ) from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "final"):
                writer.add_scalar(name, float(value), row["step"])
        epsilons = [float(value) for value in row["epsilon_nodes"]]
        writer.add_scalar("epsilon", max(epsilons), row["step"])
        writer.flush()

    return write
