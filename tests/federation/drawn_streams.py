"""Notes every stream of shared noise that a party's process draws, and what it adds in a step."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.randomness import PairStreams


def note_draws(path: Path) -> None:
    """Append a line per stream and per sum of a step, before anything is made of them."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    draw, add = PairStreams.bytes, PairNoise.counts

    def note(line: dict[str, Any]) -> None:
        os.write(file, json.dumps({"pid": os.getpid(), **line}).encode() + b"\n")

    def drawn(
        self: PairStreams, first: int, second: int, purpose: str, step: int, num_bytes: int
    ) -> np.ndarray:
        out = draw(self, first, second, purpose, step, num_bytes)
        # The first bytes tell streams apart: 256 bits under one key, purpose and step.
        note(
            {
                "stream": hashlib.sha256(out[:32].tobytes()).hexdigest(),
                "purpose": purpose,
                "step": step,
            }
        )
        return out

    def added(self: PairNoise, step: int, dim: int) -> np.ndarray:
        counts_ND = add(self, step, dim)
        note({"step": step, "counts": counts_ND[0].tolist()})
        return counts_ND

    PairStreams.bytes, PairNoise.counts = drawn, added


def _lines(root: Path, node: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / f"drawn-{node}").read_text().splitlines()]


def streams_of(root: Path, node: int) -> Counter[str]:
    """Return how often a party has drawn each stream, all its starts together."""
    return Counter(line["stream"] for line in _lines(root, node) if line.get("purpose") == "words")


def check_streams(root: Path, nodes: Iterable[int]) -> None:
    """No party draws a stream twice; one that two have in common has two ends only."""
    everybody: Counter[str] = Counter()
    for node in nodes:
        found = streams_of(root, node)
        assert found and max(found.values()) == 1
        everybody += found
    assert max(everybody.values()) == 2


def uncancelled(root: Path, nodes: Iterable[int], steps: int) -> list[int]:
    """Return the steps in which the shared noise of all parties does not add up to nothing.

    Of a step that was drawn twice the first draw was not kept, and so not released.
    """
    added = [
        {line["step"]: line["counts"] for line in _lines(root, node) if "counts" in line}
        for node in nodes
    ]
    assert all(found.keys() == set(range(steps)) for found in added)
    return [step for step in range(steps) if np.sum([own[step] for own in added], axis=0).any()]
