"""Checkpoints of a run: atomic, checksummed, safetensors and JSON only; the last two are kept.

A checkpoint of one process is two files: `step-000030.part-0-of-1.safetensors` (the tensors) and a
`.json` of the same name (counters, the ledgers' heads, the tensors' checksum). The JSON file is
renamed into place last: it is the commit. On resume the processes agree on the newest step that all
of them have complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpcsgp.errors import CheckpointError
from dpcsgp.records.files import write_atomically

FORMAT = 1
_NAME = re.compile(r"step-(\d+)\.part-(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class Checkpoint:
    """What one process needs to go on: tensors by name, and small JSON values."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@runtime_checkable
class Keeper(Protocol):
    """A part of a run with tensors that a checkpoint keeps beside the state."""

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        """Their names."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return those that are there."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; the traffic is restored already."""
        ...


@dataclass(frozen=True)
class CheckpointFolder:
    """The `checkpoint/` folder of a run, as one of its processes sees it."""

    path: Path
    run_id: str
    rank: int = 0
    world_size: int = 1
    keep: int = 2
    config: str = ""  # fingerprint of the settings: a run goes on under the settings it began with
    reach: int = 0  # steps before the newest one to which a start may have to go back

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write a checkpoint; an error or a crash leaves the previous ones complete."""
        # Two checksums: of the tensors, and of the JSON text itself without this field.
        body = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        head = {"format": FORMAT, "run_id": self.run_id, "config": self.config, "step": step}
        head |= {"meta": dict(meta), "checksum": _checksum(body)}
        text = json.dumps(head, indent=1)
        head["self"] = _checksum(text.encode())
        try:
            # Tensors first: until the JSON file is there, the step does not exist.
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(step, ".safetensors"), body)
            write_atomically(self._file(step, ".json"), json.dumps(head, indent=1).encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {self._file(step, '.json')}: {error.strerror}; "
                "free space or choose a writable --out folder; the previous checkpoint is intact"
            ) from error
        self._forget_old(step)

    def complete_steps(self) -> list[int]:
        """Return the steps of this process's valid checkpoints, ascending.

        Damaged ones are left out.
        """
        return [step for step in sorted(self._steps()) if self._is_valid(step)]

    def load(self, step: int) -> Checkpoint:
        """Return this process's checkpoint of a step."""
        return self._read(step)

    def load_common(self, agreed: Iterable[Sequence[int]]) -> Checkpoint | None:
        """Return the checkpoint of the newest step that every process has complete.

        `agreed` has one list of steps per process. None means to start anew.
        """
        # A process may have been killed while it wrote: what only some have does not count.
        steps_of = [set(steps) for steps in agreed]
        common = set.intersection(*steps_of)
        # A checkpoint of step 0 alone is nothing lost: some process was killed before it had
        # written its own.
        if not common and (set.union(*steps_of) | self._steps()) - {0}:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole for every process of the run; "
                "start again with another --out folder (what was released stays in the ledger)"
            )
        return self._read(max(common)) if common else None

    def _is_valid(self, step: int) -> bool:
        try:
            self._read(step)
        except CheckpointError:
            return False
        return True

    def _read(self, step: int) -> Checkpoint:
        path = self._file(step, ".json")
        try:
            # Anything may be in a damaged file: whatever cannot be read is refused.
            head = json.loads(path.read_bytes())
            own = head.pop("self")
            body = path.with_suffix(".safetensors").read_bytes()
        except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path.name} is damaged or missing ({type(error).__name__})"
            ) from None
        if own != _checksum(json.dumps(head, indent=1).encode()) or head.get(
            "checksum"
        ) != _checksum(body):
            raise CheckpointError(f"{path.name} does not match its checksum")
        # Undamaged, but is it of this version, these settings, this run and this step?
        if head["format"] != FORMAT:
            raise CheckpointError(
                f"{path.name} has format {head['format']}, this version reads {FORMAT}"
            )
        if head.get("config") != self.config:
            raise CheckpointError(
                f"{path.name} was written under other settings; restore the run's config.toml"
            )
        if head["run_id"] != self.run_id or head["step"] != step:
            raise CheckpointError(f"{path.name} belongs to another run or step")
        try:
            return Checkpoint(step, load(body), head["meta"])
        except SafetensorError as error:
            raise CheckpointError(f"{path.name}: {error}") from None

    def _steps(self) -> set[int]:
        if not self.path.is_dir():
            return set()
        # Files of other ranks, or of a start with another world size, are not ours.
        matches = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        mine = (self.rank, self.world_size)
        return {
            int(match[1]) for match in matches if match and (int(match[2]), int(match[3])) == mine
        }

    def _file(self, step: int, suffix: str) -> Path:
        return self.path / f"step-{step:06d}.part-{self.rank}-of-{self.world_size}{suffix}"

    def _forget_old(self, newest: int) -> None:
        steps = [step for step in sorted(self._steps()) if step <= newest]
        # One that old, or older, is enough.
        unreached = [step for step in steps if step <= newest - self.reach][:-1]
        for step in [step for step in steps[: -self.keep] if step in unreached]:
            # The commit goes first: a crash in between leaves tensors without a step, and no half
            # step.
            self._file(step, ".json").unlink(missing_ok=True)
            self._file(step, ".safetensors").unlink(missing_ok=True)


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
