"""Checkpoints come back as they were, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpcsgp.errors import CheckpointError
from dpcsgp.records.checkpoint import Checkpoint, CheckpointFolder

TENSORS = {
    "x_ND": torch.arange(6.0).reshape(2, 3),
    "pull_ND": torch.ones(2, 3, dtype=torch.float64),
}


def newest(folder: CheckpointFolder) -> Checkpoint | None:
    return folder.load_common([folder.complete_steps()])


def test_round_trip_and_the_last_two_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoint", "run")
    assert newest(folder) is None
    for step in (10, 20, 30):
        folder.save(step, TENSORS, {"round": step, "seconds": 0.1 + 0.2})
    checkpoint = newest(folder)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.meta) == (30, {"round": 30, "seconds": 0.1 + 0.2})
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert len(list(folder.path.iterdir())) == 4


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(
    tmp_path: Path, suffix: str
) -> None:
    folder = CheckpointFolder(tmp_path, "run")
    for step in (10, 20):
        folder.save(step, TENSORS, {"round": step})
    victim = tmp_path / f"step-000020.part-0-of-1{suffix}"
    body = bytearray(victim.read_bytes())
    body[len(body) // 2] ^= 1
    victim.write_bytes(body)
    checkpoint = newest(folder)
    assert checkpoint is not None and checkpoint.step == 10
    (tmp_path / f"step-000010.part-0-of-1{suffix}").write_bytes(b"")
    with pytest.raises(CheckpointError, match="whole for every process"):
        newest(folder)


def test_another_run_is_refused(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, "run").save(10, TENSORS, {})
    with pytest.raises(CheckpointError, match="another run"):
        CheckpointFolder(tmp_path, "other").load(10)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, "run", config="a").save(10, TENSORS, {})
    with pytest.raises(CheckpointError, match="other settings"):
        CheckpointFolder(tmp_path, "run", config="b").load(10)


def test_a_step_counts_only_when_all_parts_are_there(tmp_path: Path) -> None:
    folders = [CheckpointFolder(tmp_path, "run", rank, 2) for rank in range(2)]
    for step in (10, 20):
        folders[0].save(step, TENSORS, {})
    folders[1].save(10, TENSORS, {})
    agreed = [folder.complete_steps() for folder in folders]
    assert agreed == [[10, 20], [10]]
    for folder in folders:
        checkpoint = folder.load_common(agreed)
        assert checkpoint is not None and checkpoint.step == 10


def test_no_temporary_files_stay_behind(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, "run").save(1, TENSORS, {})
    assert not list(tmp_path.glob(".*"))


def test_processes_that_were_killed_before_all_had_a_checkpoint_start_anew(tmp_path: Path) -> None:
    """Whatever one process has, all take the same decision."""
    folders = [CheckpointFolder(tmp_path, "run", rank, 2) for rank in range(2)]
    folders[0].save(0, {"x": torch.zeros(1)}, {})
    agreed = [folder.complete_steps() for folder in folders]
    assert agreed == [[0], []]
    assert [folder.load_common(agreed) for folder in folders] == [None, None]
    # step 4 without step 0 of the other: something was lost
    folders[0].save(4, {"x": torch.zeros(1)}, {})
    for folder in folders:
        with pytest.raises(CheckpointError, match="whole for every process"):
            folder.load_common([folder.complete_steps() for folder in folders])


def test_checkpoints_stay_as_far_as_a_start_may_have_to_go_back(tmp_path: Path) -> None:
    """However many were saved since: one that far back, or older, is always there."""
    folder = CheckpointFolder(tmp_path, "run", reach=5)
    for step in (0, 3, 4, 6, 7, 8, 9, 12, 13):
        folder.save(step, {"x": torch.zeros(1)}, {})
        steps = folder.complete_steps()
        assert steps[0] <= max(step - 5, 0) and step in steps
    assert steps == [8, 9, 12, 13]
