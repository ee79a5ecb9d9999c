"""Two real processes want one ledger: one gets it, the other is refused, and no release is lost.

A few rounds in CI, `make stress` plays all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.privacy.accounting import ReleaseEvent
from dpcsgp.privacy.ledger import Ledger, LedgerHeader, read_ledger, read_ledgers

PROCESS = Path(__file__).with_name("ledger_process.py")
EVENT = ReleaseEvent("poisson", 0.5, 2.0)
LONG = 50_000


class Runner:
    """A process that opens ledgers when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, **order: Any) -> Any:
        self.tell(**order)
        return self.hear()

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Runner, Runner]]:
    runners = Runner(), Runner()
    for runner in runners:
        assert runner.hear() == "ready"
    yield runners
    for runner in runners:
        runner.end()


def pairs(in_ci: int, in_stress: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "rounds", [in_ci, pytest.param(in_stress, marks=pytest.mark.stress)]
    )


def race(pair: tuple[Runner, Runner], folder: Path, nodes: list[int]) -> None:
    """Let both open the same book at once and record 5 releases: exactly one must be allowed to."""
    for runner in pair:
        runner.tell(do="open", folder=str(folder), nodes=nodes, releases=5)
    answers = [runner.hear() for runner in pair]
    winners = [runner for runner, told in zip(pair, answers, strict=True) if isinstance(told, list)]
    for runner in winners:
        runner.ask(do="close")
    assert len(winners) == 1, answers
    assert all("in use by another process" in told for told in answers if isinstance(told, str))


def write_ledger(path: Path, releases: int) -> Path:
    with Ledger.create(path, LedgerHeader("9f3c", 0, event=EVENT)) as ledger:
        for step in range(releases):
            ledger.write(step, 0, EVENT)
        ledger.sync()
    return path


@pairs(10, 200)
def test_two_resumes_after_a_torn_record(
    tmp_path: Path, pair: tuple[Runner, Runner], rounds: int
) -> None:
    for number in range(rounds):
        path = write_ledger(tmp_path / str(number) / "node-0000.jsonl", 3)
        path.write_bytes(path.read_bytes()[:-9])
        race(pair, path.parent, [0])
        assert read_ledger(path).count == 3 + 5


@pairs(10, 200)
def test_two_fresh_starts(tmp_path: Path, pair: tuple[Runner, Runner], rounds: int) -> None:
    for number in range(rounds):
        race(pair, tmp_path / str(number), [0, 1, 2])
        assert [ledger.count for ledger in read_ledgers(tmp_path / str(number))] == [5] * 3


@pairs(10, 200)
def test_processes_with_other_nodes_share_the_folder(
    tmp_path: Path, pair: tuple[Runner, Runner], rounds: int
) -> None:
    for number in range(rounds):
        folder = tmp_path / str(number)
        for runner, nodes in zip(pair, ([0, 2], [1, 3]), strict=True):
            runner.tell(do="open", folder=str(folder), nodes=nodes, releases=2)
        assert [runner.hear() for runner in pair] == [[0, 0], [0, 0]]
        assert [runner.ask(do="close") for runner in pair] == ["closed"] * 2
        assert [ledger.count for ledger in read_ledgers(folder)] == [2] * 4


def test_a_long_ledger_that_grows_while_another_waits_for_it(
    tmp_path: Path, pair: tuple[Runner, Runner]
) -> None:
    path = write_ledger(tmp_path / "node-0000.jsonl", LONG)
    first, second = pair
    order = {"folder": str(tmp_path), "nodes": [0]}
    assert first.ask(do="open", releases=0, **order) == [LONG]
    second.tell(do="wait", releases=2, **order)
    first.tell(do="record", releases=300)
    first.tell(do="close")
    seen = [read_ledger(path).count for _ in range(2)]  # reading needs no lock
    assert [first.hear(), first.hear()] == ["done", "closed"]
    assert second.hear() == [LONG + 300]  # all releases of the first are known to the second
    second.ask(do="close")
    assert LONG <= seen[0] <= seen[1] <= LONG + 302
    assert read_ledger(path).count == LONG + 302
