"""Parties whose roster is amended while they run: own data, real processes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import avg_pool2d
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))
from parties import free_address
from running import FORKS, quicken, releases_in, slow_down, unblock_signals

from dpcsgp.cli.main import cli
from dpcsgp.errors import DpcsgpError
from dpcsgp.federation.amending import Amendment, amend
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.journal import Journal
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_request import PartyRequest, as_leaver
from dpcsgp.federation.party_run import prepare_party, results_folder, run_party
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import finished_summary
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.privacy import read_ledgers
from dpcsgp.privacy.ledger import LedgerContents
from dpcsgp.runtime.session import Hooks
from dpcsgp.tasks.downloads.datasets import load_dataset

SEED = 5
PLAN = """
[task]
name = "own"
model = "logistic"

[data]
input_shape = [6]
num_classes = 2

[algorithm]
steps = {steps}
polish_rounds = 1
learning_rate = 1.0

[privacy]
clip_norm = 1.0

[compression]
spec = "rot:2"

[run]
checkpoint_every = 3
evaluate_every = 1

[graph]
name = "directed_ring"
"""
EXAMPLES = 60
PROMISE = Promise(EXAMPLES, 4.0, 1e-3)


def run(*words: str | Path) -> Result:
    """Run a command; its own errors are raised."""
    result = CliRunner().invoke(cli, [str(word) for word in words], env={"COLUMNS": "120"})
    if isinstance(result.exception, DpcsgpError):
        raise result.exception
    return result


def deal_mnist(root: Path, names: Sequence[str], each: int, seed: int) -> None:
    """Give each of these parties rows of MNIST, in 7 x 7 cells, and all 10,000 public ones."""
    images = load_dataset("mnist")
    order = np.random.default_rng(seed).permutation(len(images.train_labels))
    for place, name in enumerate(names):
        mine = torch.from_numpy(order[each * place : each * (place + 1)])
        _save_cells(root / f"{name}.npz", images.train_inputs[mine], images.train_labels[mine])
    _save_cells(root / "test.npz", images.test_inputs, images.test_labels)


def _save_cells(path: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Write the mean pixel of every 4 x 4 cell: small models, quick parties."""
    cells = avg_pool2d(images.reshape(-1, 1, 28, 28).float() / 255, 4).flatten(1)
    # Most of an image is empty: rows get norms of about 4.
    np.savez(path, x=2.5 * cells.numpy(), y=labels.numpy())


def new_party(
    root: Path, name: str, closed: bool = False, promise: Promise = PROMISE
) -> PartyFolder:
    """Make a party, with examples of its own and public ones for all unless they are there."""
    random = np.random.default_rng(sum(map(ord, name)))
    for file, count in ((f"{name}.npz", EXAMPLES), ("test.npz", 200)):
        x = random.normal(size=(count, 6))
        if not (root / file).exists():
            np.savez(root / file, x=x, y=(x[:, 0] + x[:, 1] > 0).astype(int))
    address = None if closed else free_address()
    return PartyFolder.create(root / name, name, address, promise)


def first_version(
    root: Path,
    names: Sequence[str],
    steps: int = 12,
    plan: str = PLAN,
    closed: Sequence[str] = (),
    promise: Promise = PROMISE,
) -> Roster:
    """Make parties and `v1.toml`, approved by all."""
    cards = [new_party(root, name, name in closed, promise).card for name in names]
    (root / "plan.toml").write_text(plan.format(steps=steps), encoding="utf-8")
    roster = found(Plan.load(root / "plan.toml"), cards).roster
    write(root, roster)
    return roster


def next_version(root: Path, old: Roster, wanted: Amendment, approved: bool = True) -> Roster:
    """Amend a roster, in `vN.toml`, approved by all of its parties."""
    roster = amend(old, wanted).roster
    write(root, roster, approved)
    return roster


def write(root: Path, roster: Roster, approved: bool = True, name: str = "") -> None:
    (root / (name or f"v{roster.version}.toml")).write_text(roster.text(), encoding="utf-8")
    for card in roster.parties if approved else ():
        approve(party(root, card.name), roster)


def party(root: Path, name: str) -> PartyFolder:
    return PartyFolder.open(root / name)


def request_of(root: Path, name: str, file: str, seed: int | None = SEED) -> PartyRequest:
    examples = OwnExamples(str(root / f"{name}.npz"), None, str(root / "test.npz"))
    return PartyRequest(party(root, name), Roster.load(root / file), examples, seed=seed)


def take_part(root: str, name: str, file: str, pause: float, seed: int, slow: float = 0.0) -> None:
    """Be one party until the end; the exit code is that of the command.

    Every gradient takes `slow` seconds more; if negative, exponential times of that mean.
    """
    unblock_signals()
    torch.set_num_threads(1)
    quicken()
    slow_down(slow, ord(name[0]))
    _tap(Path(root) / f"tap-{name}")
    request = as_leaver(request_of(Path(root), name, file, seed))
    prepared, results = prepare_party(request), results_folder(request)
    if finished_summary(results, request.roster) is None:
        slowly = Hooks(on_start=lambda folder: lambda row: time.sleep(pause))
        os._exit(run_party(prepared, results, slowly).progress.ending.exit_code)


def _tap(path: Path) -> None:
    """Note every piece of a frame before it leaves: version, round, start and digest."""
    tap = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    piece = Journal.piece

    def noted(self: Journal, round_: int, start: int, size: int) -> bytes:
        content = piece(self, round_, start, size)
        roster = json.loads((self._folder / "journal.json").read_bytes())["roster"]
        line = [roster, round_, start, hashlib.blake2b(content).hexdigest()]
        os.write(tap, json.dumps(line).encode() + b"\n")
        return content

    Journal.piece = noted


@dataclass
class Running:
    """Processes of parties, by name."""

    root: Path
    pause: float = 0.0
    seed: int = SEED
    slow: dict[str, float] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)

    def start(self, file: str, *names: str) -> None:
        for name in names:
            slow = self.slow.get(name, 0.0)
            words = (str(self.root), name, file, self.pause, self.seed, slow)
            self.processes[name] = FORKS.Process(target=take_part, args=words)
            self.processes[name].start()

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
            self.processes[name].join()

    def wait(self, *names: str, seconds: float = 150.0) -> None:
        """Wait until these have ended well."""
        deadline = time.monotonic() + seconds
        for name in names or tuple(self.processes):
            self.processes[name].join(max(deadline - time.monotonic(), 0.01))
            assert self.processes[name].exitcode == 0, (name, self.status(name))

    def status(self, name: str) -> dict[str, Any]:
        found = list((self.root / name).glob("runs/*/status.json"))
        return json.loads(found[0].read_bytes()) if found else {}

    def releases(self, name: str) -> int:
        return releases_in(self.root / name)

    def until_released(self, name: str, count: int, seconds: float = 150.0) -> None:
        """Wait until a party has made so many releases."""
        deadline = time.monotonic() + seconds
        while self.releases(name) < count:
            assert time.monotonic() < deadline, self.status(name)
            time.sleep(0.05)

    def until(self, name: str, seconds: float = 150.0, **least: Any) -> dict[str, Any]:
        """Wait until the status of a party has these values, numbers at least."""
        deadline = time.monotonic() + seconds
        while not all(_enough(self.status(name).get(key), least[key]) for key in least):
            assert time.monotonic() < deadline, self.status(name)
            assert self.processes[name].exitcode is None, (name, self.processes[name].exitcode)
            time.sleep(0.05)
        return self.status(name)


def _enough(found: Any, least: Any) -> bool:
    if isinstance(least, str):
        return least in str(found)
    return found is not None and found >= least


@contextmanager
def running(
    root: Path, pause: float = 0.0, seed: int = SEED, slow: dict[str, float] | None = None
) -> Iterator[Running]:
    """Run parties inside of a block; none outlives it."""
    parties = Running(root, pause, seed, slow or {})
    try:
        yield parties
    finally:
        for process in parties.processes.values():
            process.kill()
            process.join()


def ledger_of(root: Path, name: str) -> LedgerContents:
    """Return the only ledger of a party, chain checked."""
    (ledger,) = read_ledgers(latest_place(party(root, name)) / "ledger")
    return ledger


def steps_of(root: Path, name: str) -> list[int]:
    """Return the steps that a party has released, line by line."""
    (file,) = (latest_place(party(root, name)) / "ledger").glob("node-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "release"]


def summary_of(root: Path, name: str) -> dict[str, Any]:
    return json.loads((latest_place(party(root, name)) / "summary.json").read_bytes())


def frames_sent(root: Path, name: str) -> dict[tuple[str, int, int], set[str]]:
    """Return digests of what left, by fingerprint of the version, number in it, and place."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for line in (root / f"tap-{name}").read_text().splitlines():
        roster, number, start, digest = json.loads(line)
        found.setdefault((roster, number, start), set()).add(digest)
    return found
