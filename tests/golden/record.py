"""Runs of a seeded task, and digests of all they leave: frames, ledgers, models, rows.

`tests/golden/test_golden.py` starts this in a process of its own, with arithmetic that is the same
on every x86 processor (`PORTABLE`), and compares with `digests.json`. To pin new digests after a
change that is meant to change them:

    python tests/golden/test_golden.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor

from dpcsgp.cli.main import cli
from dpcsgp.network import Simulator

# Kernels that every x86 processor has, in one order: digests then follow from the code alone.
PORTABLE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "+sse,+sse2",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
    "AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
}
COMMON = {
    "task.name": "digits",
    "graph.num_nodes": "4",
    "algorithm.steps": "6",
    "algorithm.momentum": "0.5",
    "privacy.epsilon": "8",
    "privacy.seed": "1",
    "run.evaluate_every": "2",
    "run.checkpoint_every": "2",
}
RUNS = {
    "rotated, one bit": {"compression.spec": "rot:1", "algorithm.polish_rounds": "2"},
    "dithered, uneven graph": {
        "compression.spec": "gsgd:4/64",
        "graph.name": "random_digraph",
        "graph.seed": "3",
    },
    "random half": {
        "compression.spec": "rand:0.5",
        "task.partition": "shards:2",
        "algorithm.gossip_every": "2",
    },
    "exact": {"algorithm.name": "dp-sgp"},
    "undirected": {"algorithm.name": "dp2sgd"},
    "choco": {
        "algorithm.name": "choco-sgd",
        "privacy.noise": "none",
        "compression.spec": "top:0.1",
        "algorithm.mixing_rate": "0.1",
    },
    "blocks": {
        "algorithm.name": "dp-block",
        "compression.spec": "gsgd:8/64",
        "algorithm.num_blocks": "3",
    },
    "noise that cancels": {"privacy.max_colluders": "1", "compression.spec": "rot:3"},
}
_RANDOM = ("run_id", "start", "prev", "sum", "time", "fragment")


def main(folder: Path) -> dict[str, Any]:
    """Return the digests of all runs, and of arithmetic that has nothing to do with them."""
    digests: dict[str, Any] = {"processor": _processor()}
    for name, settings in RUNS.items():
        digests[name] = _run(folder / name.replace(" ", "-"), settings)
    digests["resumed"] = _resumed(folder / "resumed")
    return digests


def _processor() -> str:
    """Return a digest of plain matrix products, exponentials and sums of this machine."""
    values = torch.linspace(-3, 3, 64 * 48).view(64, 48)
    product = values @ values.T
    return _digest(product, product.tanh().exp(), product.log_softmax(1), values.sum(0))


def _run(out: Path, settings: dict[str, str]) -> dict[str, str]:
    with _listening() as frames:
        _command("--out", str(out), *_words(settings))
    return {"frames": frames.hexdigest(), **_left_in(out)}


def _resumed(out: Path) -> dict[str, str]:
    """Stop a run in its third step as Ctrl-C does, and resume it: frames, model and rows as if it
    had not been stopped."""
    with _listening(stop_after=3) as frames:
        _command("--out", str(out), *_words(RUNS["rotated, one bit"]))
        _command("--out", str(out), "--resume")
    return {"frames": frames.hexdigest(), **_left_in(out)}


def _words(settings: dict[str, str]) -> list[str]:
    return [
        word
        for key, value in {**COMMON, **settings}.items()
        for word in ("--set", f"{key}={value}")
    ]


def _command(*words: str) -> None:
    with suppress(SystemExit, typer.Exit):  # 130 where the run was stopped
        cli(["run", *words], standalone_mode=False)


@contextmanager
def _listening(stop_after: int = 0) -> Iterator[Any]:
    """Make the simulator hash every byte that it passes on, and ask for a stop after some
    exchanges."""
    frames, count, exchange = (
        hashlib.blake2b(digest_size=16),
        itertools.count(1),
        Simulator.exchange,
    )

    def heard(self: Simulator, wire_NB: Tensor) -> Tensor:
        frames.update(repr(tuple(wire_NB.shape)).encode() + wire_NB.numpy().tobytes())
        if next(count) == stop_after:
            signal.raise_signal(signal.SIGINT)
        return exchange(self, wire_NB)

    setattr(Simulator, "exchange", heard)  # noqa: B010
    try:
        yield frames
    finally:
        setattr(Simulator, "exchange", exchange)  # noqa: B010


def _left_in(out: Path) -> dict[str, str]:
    model = load_file(out / "model.safetensors")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
    return {
        "model": _digest(*(model[name] for name in sorted(model))),
        "rows": _text_digest(rows),
        "ledgers": _text_digest(
            [_releases(file) for file in sorted((out / "ledger").glob("node-*.jsonl"))]
        ),
    }


def _releases(file: Path) -> list[Any]:
    """Return the lines without the random names of run and start, and without the chain, which
    follows from these."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in _RANDOM} for line in lines]


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(
            repr((tensor.dtype, tuple(tensor.shape))).encode()
            + tensor.contiguous().numpy().tobytes()
        )
    return digest.hexdigest()


def _text_digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    with open(os.devnull, "w") as nowhere:
        sys.stdout, printed = nowhere, sys.stdout  # what the runs print
        found = main(Path(sys.argv[1]))
        sys.stdout = printed
    print(json.dumps(found))
