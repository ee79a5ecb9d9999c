"""The order of a private step: open the data, keep what comes out, spend, record, send."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dpcsgp import training
from dpcsgp.config import load_config
from dpcsgp.network import Simulator
from dpcsgp.privacy.kept_releases import KeptReleases
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder

NODES, STEPS = 3, 4
SETTINGS = [
    "task.name=digits",
    "task.model=logistic",
    f"graph.num_nodes={NODES}",
    f"algorithm.steps={STEPS}",
    "algorithm.polish_rounds=0",
    "privacy.expected_batch_size=32",
    "privacy.epsilon=4",
    "privacy.seed=5",
]


@dataclass
class Diary:
    """What happened, in order: (what, what the budgets had left, what the ledger files held)."""

    ledgers: list[Path] = field(default_factory=list)
    budget: Any = None
    events: list[tuple[str, list[int], list[int]]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.events.append(
            (what, list(self.budget.remaining), [read_ledger(p).count for p in self.ledgers])
        )


class WatchedNetwork(Simulator):
    """A network that notes when frames leave."""

    diary: Diary

    def exchange(self, frames_NB: Tensor) -> Tensor:
        self.diary.note("send")
        return super().exchange(frames_NB)


class WatchedTask:
    """A task that notes when private examples are looked up."""

    def __init__(self, task: Any, diary: Diary) -> None:
        self._task, self._diary = task, diary

    def examples(self, *indices: Any) -> Any:
        self._diary.note("examples")
        return self._task.examples(*indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def watch_disk(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note when a ledger file has reached the disk, and when a release has."""
    names = {path.stat().st_ino: path.stem for path in diary.ledgers}
    fsync, keep = os.fsync, KeptReleases.keep

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        name = names.get(os.fstat(descriptor).st_ino)
        if name is not None:
            diary.note(f"disk {name}")

    def kept(self: KeptReleases, step: int, release: Any) -> None:
        keep(self, step, release)
        assert self.find(step) is not None
        diary.note("kept")

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(KeptReleases, "keep", kept)


Events = list[tuple[str, list[int], list[int]]]


def steps_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str
) -> tuple[list[Events], list[int], set[str]]:
    """Train; return the events of every step, the budgets before it, and the ledgers' names."""
    config = load_config(None, [*SETTINGS, *settings])
    data = load_builtin_data(config)
    design = design_run(config, data.facts)
    folder, network = (
        ResultsFolder.create(tmp_path / "run", config),
        WatchedNetwork(design.topology),
    )
    run = build_run(design, data, network, folder)
    diary = network.diary = Diary(
        sorted((folder.path / "ledger").glob("*.jsonl")), run.gradients.budget
    )
    run, before = (
        replace(run, gradients=replace(run.gradients, source=WatchedTask(run.task, diary))),
        [int(left or 0) for left in run.gradients.budget.remaining],
    )
    watch_disk(diary, monkeypatch)
    training.train(run)
    monkeypatch.undo()
    sends = [place for place, event in enumerate(diary.events) if event[0] == "send"]
    assert len(sends) == STEPS
    starts = [0, *(place + 1 for place in sends)]
    steps = [diary.events[start : end + 1] for start, end in zip(starts, sends, strict=False)]
    return steps, before, {f"disk {path.stem}" for path in diary.ledgers}


@pytest.mark.skipif(sys.platform == "darwin", reason="has another name for fsync")
def test_examples_kept_spend_record_disk_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, before, ledgers = steps_of_a_run(tmp_path, monkeypatch)
    for step, events in enumerate(steps):
        kept = [what for what, *_ in events].index("kept")
        computed, disk, last = events[:kept], events[kept + 1 : -1], events[-1]
        assert computed and {what for what, *_ in computed} == {"examples"}
        assert {what for what, *_ in disk} == ledgers
        assert len(disk) == NODES and last[0] == "send"
        for place, (_, left, recorded) in enumerate(events):
            made = step + (place > kept)  # spent and recorded only after the release was kept
            assert left == [count - made for count in before]
            assert recorded == [made] * NODES


@pytest.mark.skipif(sys.platform == "darwin", reason="has another name for fsync")
def test_without_kept_releases_spend_record_disk_examples_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, before, ledgers = steps_of_a_run(tmp_path, monkeypatch, "run.checkpoint_every=0")
    for step, events in enumerate(steps):
        disk, computed, last = events[:NODES], events[NODES:-1], events[-1]
        assert {what for what, *_ in disk} == ledgers
        assert computed and {what for what, *_ in computed} == {"examples"}
        assert last[0] == "send"
        assert all(left == [count - step - 1 for count in before] for _, left, _ in events)
        assert all(recorded == [step + 1] * NODES for _, _, recorded in events)
