"""Releases on disk until their step is in a checkpoint: after a crash they are not made again.

A private gradient that may have been sent must not be drawn a second time: that would cost privacy
twice, and others would see two different messages of one round. So it is written to disk before the
ledger's line and before anything leaves. A start that goes on from an older checkpoint takes it
from there: the same bits, the same messages, nothing to pay.

    gradient computed -> kept here -> line in the ledger -> message

A crash before the first arrow's end leaves nothing that counts; one before the second leaves a
release that the ledger lacks, and the next start writes its line before it trains. Step and
`attempt` (the number of the start that made it) name a release in file and ledger. What is kept is
noised already and was meant to be sent.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpcsgp.errors import CheckpointError
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.records.files import write_atomically

MOST_BYTES: Final = (
    64 * 2**20
)  # of one step; larger releases would cost more to keep than to repeat
_NAME: Final = re.compile(r"step-(\d{6,})\.part-(\d+)-of-(\d+)\.safetensors")


@final
@dataclass(frozen=True)
class Release:
    """The private gradients of one step."""

    grad_ND: Tensor
    events: tuple[ReleaseEvent | None, ...]  # what it costs each node; None: it released nothing
    attempt: int  # number of the start that made it


@final
@dataclass(frozen=True)
class KeptReleases:
    """The folder with the kept releases of one process.

    Args:
        folder: where the files lie; made when the first release is kept.
        run_id: public name of the run; releases of another run are refused.
        nodes: numbers of the hosted nodes.
        rank: number of this process among `world_size`.
        world_size: number of processes.
    """

    folder: Path
    run_id: str
    nodes: tuple[int, ...]
    rank: int = 0
    world_size: int = 1

    def keep(self, step: int, release: Release) -> None:
        """Write a release; it is on disk when this returns."""
        about = {
            "run_id": self.run_id,
            "step": step,
            "nodes": self.nodes,
            "events": [event.as_json() if event else None for event in release.events],
            "attempt": release.attempt,
        }
        body = save({"grad_ND": release.grad_ND.contiguous()}, {"about": json.dumps(about)})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(step), body)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._file(step)}: {error.strerror}; free space or choose a "
                "writable --out folder, then continue with --resume: nothing was released"
            ) from error

    def find(self, step: int) -> Release | None:
        """Return the release of a step, None if none was kept.

        Raises:
            CheckpointError: the file is damaged or of another run.
        """
        path = self._file(step)
        if not path.exists():
            return None
        try:
            return self._read(path, step)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"{path} is damaged or belongs to another run or node; restore it from a backup. "
                "Without it the step would be released a second time: delete the file to allow that"
            ) from None

    def _read(self, path: Path, step: int) -> Release:
        """Read a file; any of several errors if it is not what this process kept."""
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            grad_ND = file.get_tensor("grad_ND")
        events = (ReleaseEvent.from_json(it) if it else None for it in about["events"])
        release = Release(grad_ND, tuple(events), about["attempt"])
        if (about["run_id"], about["step"], about["nodes"]) != (
            self.run_id,
            step,
            list(self.nodes),
        ):
            raise ValueError("of another run, step or process")
        right = grad_ND.dtype == torch.float32 and grad_ND.ndim == 2
        if not (right and bool(grad_ND.isfinite().all()) and type(release.attempt) is int):
            raise ValueError("not what was kept")
        if not len(release.events) == len(grad_ND) == len(self.nodes):
            raise ValueError("of another number of nodes")
        return release

    def steps_from(self, step: int) -> list[int]:
        """Return the steps that are kept, from this one on, ascending."""
        return sorted(kept for kept in self._steps() if kept >= step)

    def forget_before(self, step: int) -> None:
        """Delete releases of steps that no start can come back to."""
        for old in (kept for kept in self._steps() if kept < step):
            self._file(old).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all releases, and what a kill left half-written: the run has ended."""
        self.forget_before(max(self._steps(), default=0) + 1)
        half_written = f".step-*.part-{self.rank}-of-{self.world_size}.*.tmp"
        for name in fnmatch.filter(self._names(), half_written):
            (self.folder / name).unlink(missing_ok=True)
        # The last of the processes takes the folder away: not empty or gone already is no fault.
        with suppress(OSError):
            self.folder.rmdir()

    def _steps(self) -> set[int]:
        matches = map(_NAME.fullmatch, self._names())
        mine = (self.rank, self.world_size)
        return {
            int(match[1]) for match in matches if match and (int(match[2]), int(match[3])) == mine
        }

    def _names(self) -> list[str]:
        """Return the names in the folder; none if there is no folder (any more)."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:  # other processes of the run may take it away at the end
            return []

    def _file(self, step: int) -> Path:
        name = f"step-{step:06d}.part-{self.rank}-of-{self.world_size}.safetensors"
        return self.folder / name


def worth_keeping(num_nodes: int, dim: int) -> bool:
    """Say whether the releases of a step are small enough to be written to disk each time."""
    return 4 * num_nodes * dim <= MOST_BYTES
