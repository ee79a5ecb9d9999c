"""Starts the processes of a run on this machine, shows one progress line for all, and leaves no orphan behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dpcsgp.assembly import build_topology
from dpcsgp.cli.session import check_quickly, new_folder, open_config
from dpcsgp.cli.tables import outcome_table
from dpcsgp.config import Config
from dpcsgp.errors import DpcsgpError
from dpcsgp.network.health import read
from dpcsgp.network.torch_distributed import Place, serve_store, spread
from dpcsgp.report import write_report

GRACE_SECONDS = 10.0  # how long the others may take to name the cause after one process has failed


def launch_session(
    config_file: Path | None,
    settings: Sequence[str],
    out: Path | None,
    processes: int | None,
    resume: bool,
    allow_divergence: bool,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run all processes to their end and return the merged summary."""
    console = Console(quiet=quiet)
    config = open_config(config_file, settings, out, resume)
    out = out or new_folder(config)
    check_quickly(config, out, resume)
    num_nodes = build_topology(config).num_nodes
    world_size = processes or num_nodes
    spread(num_nodes, world_size)
    store = serve_store()
    place = Place(0, world_size, "127.0.0.1", store.port, hosts_store=False)
    words = ["run", *([str(config_file)] if config_file else []), "--out", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--resume"] * resume + ["--allow-divergence"] * allow_divergence
    with _children(words, place) as children, _progress(console, config) as show:
        watch_store = place.open_store(timeout=5)
        while any(child.poll() is None for child in children):
            show(watch_store, world_size)
            _end_all_if_one_failed(children, config.network.timeout_seconds)
            time.sleep(0.2)
        _raise_if_failed(children)
    summary = json.loads((out / "summary.json").read_text())
    page = write_report([out])
    console.print(outcome_table(summary))
    console.print(f"results: {out}    page: {page}", highlight=False, soft_wrap=True)
    return summary


class Child(subprocess.Popen[bytes]):
    """A worker process whose complaints are kept in a file."""

    complaints: Path
    rank: int
    failed_at: float | None = None


@contextmanager
def _children(words: Sequence[str], place: Place) -> Iterator[list[Child]]:
    """Start the workers; whatever happens, none of them outlives this block."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        previous = signal.signal(signal.SIGINT, lambda *_: _forward(children, signal.SIGINT))
        signal.signal(signal.SIGTERM, lambda *_: _forward(children, signal.SIGINT))
        try:
            for rank in range(place.world_size):
                children.append(_start(words, place, rank, Path(folder) / f"rank-{rank}"))
            yield children
        finally:
            signal.signal(signal.SIGINT, previous)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()


def _start(words: Sequence[str], place: Place, rank: int, complaints: Path) -> Child:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // place.world_size)),
    }
    with open(complaints, "wb") as file:
        child = Child(
            [sys.executable, "-m", "dpcsgp", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on once
        )
    child.complaints, child.rank = complaints, rank
    return child


def _forward(children: Sequence[Child], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _end_all_if_one_failed(children: Sequence[Child], timeout: float) -> None:
    now = time.monotonic()
    failed = [child for child in children if child.poll() not in (None, 0, 1, 130)]
    for child in failed:
        child.failed_at = child.failed_at or now
    if failed and now - min(child.failed_at or now for child in failed) > timeout + GRACE_SECONDS:
        for child in children:
            if child.poll() is None:
                child.kill()


def _raise_if_failed(children: Sequence[Child]) -> None:
    failed = [child for child in children if child.returncode not in (0, 130)]
    if not failed:
        return
    reports = []
    for child in failed:
        text = child.complaints.read_text(errors="replace").strip()
        cause = text.splitlines()[-1] if text else f"ended by signal {-child.returncode}"
        reports.append(f"rank {child.rank}: {text if 'error:' in text else cause}")
    raise DpcsgpError("the run did not finish\n" + "\n".join(reports))


@contextmanager
def _progress(console: Console, config: Config) -> Iterator[Any]:
    total = config.algorithm.steps + config.algorithm.polish_rounds
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting processes", total=total)

        def show(store: Any, world_size: int) -> None:
            texts = [read(store, f"progress/{rank}") for rank in range(world_size)]
            facts = [json.loads(text) for text in texts if text]
            if len(facts) < world_size:
                return
            slowest = min(facts, key=lambda fact: fact["step"] + fact["polished"])
            accuracies = [value for fact in facts for value in fact["accuracy"] or []]
            accuracy = f"{100 * sum(accuracies) / len(accuracies):.1f} %" if accuracies else "-"
            text = (
                f"step {slowest['step']}/{config.algorithm.steps}  accuracy {accuracy}  "
                f"eps {max(fact['epsilon'] for fact in facts):.3f}  {slowest['bytes_per_edge'] / 1e6:.3f} MB/edge"
            )
            bar.update(task, completed=slowest["step"] + slowest["polished"], description=text)

        yield show
