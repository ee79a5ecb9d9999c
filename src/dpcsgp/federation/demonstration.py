"""Five parties on this machine, each in a folder and a process of its own; one of them is killed.

Nothing here is special to the demonstration but the loopback addresses: keys, cards, roster,
consent, TLS and the command that runs a party are those of a real federation.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.errors import ConfigError, DpcsgpError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.status_file import STATUS, read_status
from dpcsgp.runtime.workers import tied_command

NAMES: Final = ("amber", "birch", "cedar", "dune", "elm")
PROMISE: Final = Promise(300, 4.0, 1e-4)
STEPS: Final = 300
PLAN: Final = {
    "task": {"name": "digits", "model": "logistic"},
    "algorithm": {"steps": STEPS, "learning_rate": 1.0},
    "graph": {"name": "directed_exponential"},
    "run": {"evaluate_every": 50, "checkpoint_every": 20},
}
_GONE_SECONDS: Final = 7.0  # how long the killed party stays away
_LONGEST: Final = 300.0
_GLANCE: Final = 0.5

Show = Callable[[Sequence[dict[str, Any]]], None]


@final
@dataclass(frozen=True)
class DemoResult:
    """What one party ended with, and everything that is not as it should be."""

    party: str
    accuracy: float
    epsilon: float
    bytes_sent: int
    releases: int
    starts: int
    faults: tuple[str, ...]


def demonstrate(root: Path, show: Show, say: Callable[[str], None]) -> list[DemoResult]:
    """Found a federation, run it, kill a party, start it again, and look at the results.

    Args:
        root: a new folder.
        show: given the status of all parties, again and again.
        say: told what happens, one sentence at a time.

    Raises:
        ConfigError: the folder has something in it.
        DpcsgpError: a party failed or did not end in time.
    """
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"--out {root}: something is there already; choose another folder")
    roster = found_locally(root)
    say(f"five parties made a roster and approved it: {roster.words}")
    demo, victim = _Demo(root, show), NAMES[2]
    try:
        for name in NAMES:
            demo.start(name)
        demo.watch(lambda: demo.step(victim) >= STEPS // 3)
        say(f"kill -9 {victim} at step {demo.step(victim)} of {STEPS}")
        demo.kill(victim)
        back = time.monotonic() + _GONE_SECONDS
        demo.watch(lambda: time.monotonic() > back)
        waiting = demo.waiting_for(victim)
        say(f"waiting for {victim}: {', '.join(waiting) or 'nobody'}")
        demo.start(victim)
        say(f"{victim} was started again, with the same line")
        demo.watch(lambda: demo.ended() == set(NAMES))
    finally:
        demo.end()
    results = [
        demo.result(node, name, 2 if name == victim else 1) for node, name in enumerate(NAMES)
    ]
    if not waiting:
        results[2] = replace(results[2], faults=(*results[2].faults, "nobody waited for it"))
    return results


def found_locally(
    root: Path,
    names: Sequence[str] = NAMES,
    plan: Mapping[str, Any] = PLAN,
    promise: Promise = PROMISE,
    addresses: Sequence[str] = (),
) -> Roster:
    """Make the parties' folders, the roster, and everybody's consent; addresses of this machine."""
    addresses = addresses or free_addresses(len(names))
    parties = [
        PartyFolder.create(root / name, name, address, promise)
        for name, address in zip(names, addresses, strict=True)
    ]
    roster = found(Plan(dict(plan), None), [party.card for party in parties]).roster
    (root / "federation.toml").write_text(roster.text(), encoding="utf-8")
    for party in parties:
        approve(party, roster)
    return roster


def start_party(root: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """Type the line that a party types; what it says goes to ROOT/NAME.log.

    It ends with this process: a demonstration that was killed leaves no party running.
    """
    line = tied_command("party", "run", "federation.toml", "--folder", name)
    # Several parties share the cores of this machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(root / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [*line, *words],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def free_addresses(count: int) -> list[str]:
    """Return loopback addresses whose ports are free now."""
    with ExitStack() as stack:
        open_ = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in open_]


@final
@dataclass
class _Demo:
    """The processes of the parties, and what their status files say."""

    root: Path
    show: Show
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    deadline: float = field(default_factory=lambda: time.monotonic() + _LONGEST)

    def start(self, name: str) -> None:
        """Start a party."""
        self.processes[name] = start_party(self.root, name)

    def kill(self, name: str) -> None:
        """End a party without a warning."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def end(self) -> None:
        """End whatever still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def statuses(self) -> list[dict[str, Any]]:
        """Return what each party has told last; nothing of those that have not started yet."""
        found = []
        for name in NAMES:
            try:
                path = latest_place(PartyFolder.open(self.root / name)) / STATUS
                found.append(read_status(path))
            except ConfigError:
                continue
        return found

    def step(self, name: str) -> int:
        """Return the last step that a party has told."""
        return next((it["step"] for it in self.statuses() if it["party"] == name), 0)

    def waiting_for(self, name: str) -> list[str]:
        """Return who waits for a party."""
        return [it["party"] for it in self.statuses() if name in it["waiting_for"]]

    def ended(self) -> set[str]:
        """Return who has ended as it should."""
        return {name for name, process in self.processes.items() if process.poll() == 0}

    def watch(self, done: Callable[[], bool]) -> None:
        """Show the parties until something is the case; a party that fails ends it all."""
        while not done():
            self.show(self.statuses())
            time.sleep(_GLANCE)
            for name, process in self.processes.items():
                if process.poll() not in (None, 0, -signal.SIGKILL):
                    raise DpcsgpError(
                        f"{name} ended with code {process.poll()}; see {self.root / name}.log"
                    )
            if time.monotonic() > self.deadline:
                raise DpcsgpError(f"not at the end after {_LONGEST:.0f} s; see {self.root}/*.log")
        self.show(self.statuses())

    def result(self, node: int, name: str, starts: int) -> DemoResult:
        """Read a party's summary, and hold it against the plan."""
        folder = latest_place(PartyFolder.open(self.root / name))
        summary = json.loads((folder / "summary.json").read_bytes())
        (releases,) = summary["releases"]
        checks = {
            f"{releases} releases for {STEPS} steps": releases == STEPS,
            f"stopped because: {summary['stopped_because']}": summary["handed_over"],
            f"eps {summary['epsilon']} of {PROMISE.epsilon}": summary["private"],
            f"node {summary['node']} instead of {node}": summary["node"] == node,
        }
        return DemoResult(
            name,
            summary["accuracy_node_mean"],
            float(summary["epsilon"]),
            summary["bytes_sent_per_node"],
            releases,
            starts,
            tuple(text for text, right in checks.items() if not right),
        )
