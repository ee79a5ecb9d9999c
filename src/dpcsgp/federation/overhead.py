"""What a federation costs beside the processes of one operator: rounds, starts and idle memory.

A round: the same settings are run by parties over TLS, and by processes over gloo as `dpcsgp
launch` and torchrun start them, in turn, each with few steps and with many. The difference between
many and few is what rounds cost, without imports, data and start. Processor time is that of all
processes together. A start: until a party has its data, has checked the roster and listens. Idle
memory: parties that wait for one that is not there. It is given as proportional size (PSS), which
shares out the pages that several processes have in common.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from dpcsgp.benchmarking import Measurements
from dpcsgp.benchmarking.stopwatch import Ratio, Times, compare, deciding_clock
from dpcsgp.errors import DpcsgpError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.demonstration import NAMES, found_locally, free_addresses, start_party
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.status_file import STATUS
from dpcsgp.runtime.workers import tied_command

ROUND_LIMIT: Final = 1.5
START_LIMIT: Final = 4.0  # seconds
MEMORY_LIMIT: Final = 2e9  # bytes, five parties together
_GROUP: Final = "federation"
_STEPS: Final = (5, 45)
_VISITS: Final = 3
_IDLE_SECONDS: Final = 5.0
_LONGEST: Final = 900.0

# The demo's model and batch; five parties share its 60,000 examples.
_DEMO: Final[dict[str, dict[str, Any]]] = {
    "task": {"name": "mnist", "model": "mlp:128"},
    "graph": {"name": "directed_exponential"},
    "privacy": {"expected_batch_size": 2048},
    "run": {"evaluate_every": 0, "checkpoint_every": 10},
}
_SMALL: Final[dict[str, dict[str, Any]]] = {
    **_DEMO,
    "task": {"name": "digits", "model": "logistic"},
    "privacy": {},
}
_PROMISES: Final = {"mnist": Promise(12_000, 4.0, 1e-4), "digits": Promise(300, 4.0, 1e-4)}


def benchmark_federation(quick: bool = False) -> Measurements:
    """Measure rounds, starts and idle memory; `quick` uses tiny sizes that are held to no limit."""
    outcome = Measurements()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sizes = {"tiny": _SMALL} if quick else {"demo": _DEMO, "tiny": _SMALL}
        for name, plan in sizes.items():
            limit = ROUND_LIMIT if name == "demo" else None
            outcome.ratios.append(_rounds(root / name, name, plan, limit, quick))
        outcome.ratios += _idle(root / "idle", _SMALL if quick else _DEMO, quick)
    if deciding_clock() == "cpu":
        outcome.notes.append("the machine is busy with other work: processor time decides")
    return outcome


def _rounds(root: Path, name: str, plan: dict[str, Any], limit: float | None, quick: bool) -> Ratio:
    """Compare a round of parties with a round of processes."""
    steps = (2, 62) if quick else _STEPS
    ways = {"a round of parties": _run_parties, "a round of `launch`": _run_processes}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for visit in range(1 if quick else _VISITS):
        for way, run in ways.items():
            few, many = (
                run(root / f"{visit}-{run.__name__}-{count}", _with_steps(plan, count))
                for count in steps
            )
            costs = [
                (late - soon) / (steps[1] - steps[0]) for soon, late in zip(few, many, strict=True)
            ]
            found[way].append((max(costs[0], 1e-6), max(costs[1], 1e-6)))
    times = {
        way: Times(tuple(wall for wall, _ in each), tuple(cpu for _, cpu in each))
        for way, each in found.items()
    }
    ours, peer = ways
    task = plan["task"]
    note = f"{name} size: {task['name']}, {task['model']}, {len(NAMES)} nodes"
    return compare(_GROUP, times, ours, peer, clock=deciding_clock(), limit=limit, note=note)


def _with_steps(plan: Mapping[str, Any], steps: int) -> dict[str, Any]:
    return {**plan, "algorithm": {"steps": steps, "learning_rate": 1.0}}


def _run_parties(root: Path, plan: dict[str, Any]) -> tuple[float, float]:
    """Run a federation to its end; return wall and processor seconds."""
    found_locally(root, NAMES, plan, _PROMISES[plan["task"]["name"]])
    return _timed([lambda name=name: start_party(root, name) for name in NAMES], root)


def _run_processes(root: Path, plan: dict[str, Any]) -> tuple[float, float]:
    """Run the same settings as the processes of one operator; return wall and processor seconds."""
    root.mkdir(parents=True)
    promise = _PROMISES[plan["task"]["name"]]
    privacy = {**plan["privacy"], "epsilon": promise.epsilon, "delta": promise.delta}
    graph = {**plan["graph"], "num_nodes": len(NAMES)}
    settings = [
        f"{section}.{key}={value}"
        for section, values in {**plan, "privacy": privacy, "graph": graph}.items()
        for key, value in values.items()
    ]
    words = [word for each in settings for word in ("--set", each)]
    port = free_addresses(1)[0].rpartition(":")[2]

    def start(rank: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(NAMES)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        with open(root / f"{rank}.log", "ab") as log:
            return subprocess.Popen(
                tied_command("run", *words, "--out", str(root / "run")),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    return _timed([lambda rank=rank: start(rank) for rank in range(len(NAMES))], root)


def _timed(
    starts: Sequence[Callable[[], subprocess.Popen[bytes]]], root: Path
) -> tuple[float, float]:
    """Start processes and wait for all; return wall seconds and processor seconds of all."""
    began, cpu = time.perf_counter(), 0.0
    with _ended_in_any_case([start() for start in starts]) as processes:
        for process in processes:
            # The system tells the processor time of a process to whoever waits for it.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            cpu += usage.ru_utime + usage.ru_stime
            if process.returncode != 0:
                raise DpcsgpError(
                    f"a process ended with {process.returncode}; see {_last_line(root)}"
                )
    return time.perf_counter() - began, cpu


@contextmanager
def _ended_in_any_case(processes: list[subprocess.Popen[bytes]]) -> Any:
    try:
        yield processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                process.wait()


def _last_line(root: Path) -> str:
    lines = [line for log in sorted(root.glob("*.log")) for line in log.read_text().splitlines()]
    return lines[-1] if lines else "no message"


def _idle(root: Path, plan: dict[str, Any], quick: bool) -> list[Ratio]:
    """Start five parties of six: how long a start takes, and what they use while they wait."""
    names = (*NAMES, "fir")
    promise = _PROMISES[plan["task"]["name"]]
    share = Promise(promise.num_examples * len(NAMES) // len(names), promise.epsilon, promise.delta)
    found_locally(root, names, _with_steps(plan, 20), share)
    walls, cpus = [], []
    with ExitStack() as stack:
        processes = []
        for name in NAMES:
            began = time.perf_counter()
            process = stack.enter_context(_ended_in_any_case([start_party(root, name)]))[0]
            processes.append(process)
            _await_status(root, name, process)
            walls.append(time.perf_counter() - began)
            cpus.append(_processor_seconds(process.pid))
        time.sleep(1.0 if quick else _IDLE_SECONDS)
        memory = sum(_proportional_bytes(process.pid) for process in processes)
    clock = deciding_clock()
    start = sorted(cpus if clock == "cpu" else walls)[len(NAMES) // 2]
    limits = {"limit": None if quick else 1.0}
    return [
        Ratio.single(
            _GROUP,
            "start of a party",
            f"{START_LIMIT:g} s",
            start / START_LIMIT,
            start,
            START_LIMIT,
            clock=clock,
            note="median of five, one after the other",
            **limits,
        ),
        Ratio.single(
            _GROUP,
            "five idle parties",
            f"{MEMORY_LIMIT / 1e9:g} GB",
            memory / MEMORY_LIMIT,
            memory,
            MEMORY_LIMIT,
            unit="B",
            note="proportional size (PSS), added up",
            **limits,
        ),
    ]


def _await_status(root: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a party has told its status for the first time: it listens then."""
    deadline = time.monotonic() + _LONGEST
    folder = PartyFolder.open(root / name)
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise DpcsgpError(f"{name} did not start: {_last_line(root)}")
        if list(folder.path.glob(f"runs/*/{STATUS}")):
            json.loads((latest_place(folder) / STATUS).read_bytes())
            return
        time.sleep(0.02)


def _processor_seconds(pid: int) -> float:
    if sys.platform != "linux":
        return 0.0
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process; pages that several share count in proportion (Linux)."""
    path = Path(f"/proc/{pid}/smaps_rollup")
    if not path.exists():
        raise DpcsgpError("the memory of other processes is read from /proc, which is not here")
    lines = path.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
