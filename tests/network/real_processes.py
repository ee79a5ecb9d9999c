"""Starts the processes of a run one by one, for tests that stop or kill one of them.

They are forked from a server that has imported everything already: importing costs far more than
the runs.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpcsgp.network.torch_distributed import serve_store

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["dpcsgp.runtime.process", "dpcsgp.cli.main", "sklearn.datasets"])

FAULTY = Path(__file__).with_name("faulty_worker.py")
TINY = [
    "task.name=digits",
    "task.model=logistic",
    "graph.name=directed_ring",
    "graph.num_nodes=3",
    "privacy.noise=none",
    "privacy.expected_batch_size=8",
    "privacy.seed=1",
    "run.evaluate_every=0",
    "algorithm.polish_rounds=0",
]


def settings(*values: str) -> list[str]:
    """Return `--set` for each value."""
    return [word for value in values for word in ("--set", value)]


class RealProcess:
    """A process of a run; `words` are a script and its arguments, or the arguments of `dpcsgp`."""

    def __init__(self, words: Sequence[str], place: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.touch()
        self._process = _FORKS.Process(target=_become, args=(list(words), dict(place), str(log)))
        self._process.start()

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill and collect it."""
        self._process.kill()
        self._process.join()

    def said(self) -> str:
        """Return what it has written so far, on one line."""
        return " ".join(self._log.read_text(errors="replace").split())


def environment(rank: int, world_size: int, port: int, store: Any = None) -> dict[str, str]:
    """Return what torchrun puts in the environment; with a store, another process serves it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port if store else port),
        "TORCHELASTIC_USE_AGENT_STORE": str(store is not None),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _become(words: list[str], place: Mapping[str, str], log: str) -> None:
    """Turn a fork into what `python words...` would be."""
    os.environ.update(place)
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if words[0].endswith(".py"):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return
    from dpcsgp.cli.main import app

    sys.argv = ["dpcsgp", *words]
    app()


@contextmanager
def processes(
    commands: Sequence[Sequence[str]],
    folder: Path,
    world_sizes: Sequence[int] | None = None,
    port: int = 0,
) -> Iterator[list[RealProcess]]:
    """Start one process per command; all have ended when the block ends.

    The store is the test's own, or rank 0 serves it on `port`.
    """
    store = None if port else serve_store()
    sizes = world_sizes or [len(commands)] * len(commands)
    children = [
        RealProcess(words, environment(rank, sizes[rank], port, store), folder / f"log-{rank}")
        for rank, words in enumerate(commands)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.end()


def wait_for(condition: Callable[[], object], seconds: float) -> float:
    """Wait until a function returns something true; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - began


def wait_for_steps(folder: Path, steps: int, node: int = 0) -> None:
    """Wait until a node has recorded this many releases."""
    ledger = folder / "ledger" / f"node-{node:04d}.jsonl"
    wait_for(lambda: ledger.exists() and len(ledger.read_bytes().splitlines()) > steps, 120)


def all_end(children: Sequence[RealProcess], seconds: float) -> float:
    """Wait until all have ended and return how long that took."""
    return wait_for(lambda: all(child.code is not None for child in children), seconds)
