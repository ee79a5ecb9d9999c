"""A process that imports everything once and then forks the workers of a run: ten of them start
nearly as fast as one.

It is told what to do in one JSON line on its standard input, answers with a line `RANK CODE` for
each worker that has ended, and passes on signals (`RANK NUMBER` lines). When its input ends, its
parent has gone: the workers are killed."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

from dpcsgp.runtime.children import PARENT, die_with_parent

_POLL_SECONDS = 0.05


def main() -> None:
    """Serve one family of workers until all have ended or the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    die_with_parent()
    import dpcsgp.runtime.process  # noqa: F401  (what takes long, done once; no threads run yet, so forking is safe)

    with open(
        0, "rb", buffering=0, closefd=False
    ) as file:  # unbuffered: what follows is read in `_serve`
        line = file.readline()
    if not line:
        return
    order = json.loads(line)
    pids = {rank: _fork(order, rank) for rank in range(order["world_size"])}
    try:
        _serve(pids)
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)


def _serve(pids: dict[int, int]) -> None:
    """Report ends and pass on signals; `pids` holds the workers that have not been collected."""
    orders = b""
    while pids:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            received = os.read(0, 4096)
            if not received:
                return
            *lines, orders = (orders + received).split(b"\n")
            for line in lines:
                rank, number = map(int, line.split())
                if rank in pids:
                    os.kill(pids[rank], number)
        for rank in list(pids):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                del pids[rank]
                print(rank, os.waitstatus_to_exitcode(status), flush=True)


def _fork(order: dict[str, Any], rank: int) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(nursery)})
        _redirect(order["complaints"][rank])
        code = _command(order["words"])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _redirect(complaints: str) -> None:
    """Cut the worker off from the nursery's pipes; what it complains about goes to a file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    file = os.open(complaints, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in enumerate((nothing, nothing, file)):
        os.dup2(source, target)


def _command(words: Sequence[str]) -> int:
    """Be `dpcsgp words...` and return its exit code."""
    from dpcsgp.cli.main import app

    sys.argv = ["dpcsgp", *words]
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    main()
