"""Starts the processes of a run one by one, so that a test can treat one of them badly. Used by the tests beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dpcsgp.network.torch_distributed import serve_store

FAULTY = Path(__file__).with_name("faulty_worker.py")
TINY = [
    "task.name=digits", "task.model=logistic", "graph.name=directed_ring", "graph.num_nodes=3", "privacy.noise=none",
    "privacy.expected_batch_size=8", "privacy.seed=1", "run.evaluate_every=0", "algorithm.polish_rounds=0",
]  # fmt: skip


def settings(*values: str) -> list[str]:
    """Return `--set` for each value."""
    return [word for value in values for word in ("--set", value)]


class Process(subprocess.Popen[str]):
    """A process with its rank, whose output is collected."""

    rank: int
    log: Path

    def said(self) -> str:
        """Return what it has written so far, on one line."""
        return " ".join(self.log.read_text(errors="replace").split())


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would give."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def start(words: Sequence[str], rank: int, world_size: int, port: int, log: Path) -> Process:
    """Start one process of a run."""
    with open(log, "w") as file:
        process = Process(
            [sys.executable, *words], env=environment(rank, world_size, port), stdout=file, stderr=file, text=True
        )
    process.rank, process.log = rank, log
    return process


@contextmanager
def processes(
    commands: Sequence[Sequence[str]], folder: Path, world_sizes: Sequence[int] | None = None
) -> Iterator[list[Process]]:
    """Start one process per command around a store of our own; none of them is left at the end."""
    store = serve_store()
    sizes = world_sizes or [len(commands)] * len(commands)
    children = [
        start(words, rank, sizes[rank], store.port, folder / f"log-{rank}") for rank, words in enumerate(commands)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def wait_for(condition: object, seconds: float) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for_steps(folder: Path, steps: int, node: int = 0) -> None:
    """Wait until a node has recorded this many releases."""
    ledger = folder / "ledger" / f"node-{node:04d}.jsonl"
    wait_for(lambda: ledger.exists() and len(ledger.read_bytes().splitlines()) > steps, 120)


def all_end(children: Sequence[Process], seconds: float) -> float:
    """Wait until all have ended and return how long that took."""
    began = time.monotonic()
    wait_for(lambda: all(child.poll() is not None for child in children), seconds)
    return time.monotonic() - began
