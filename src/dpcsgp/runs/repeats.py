"""Has this process trained on the same examples before? Then the eps of both runs adds up.

Only a digest under a random key is kept, in this process's memory, of a few examples.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from dpcsgp.tasks.examples import NodeExamples

_EXAMPLES: Final = 32  # whose bytes tell one data set from another
_KEY: Final = os.urandom(32)
_seen: Final[dict[bytes, Path]] = {}


def digests_of(parts: Mapping[int, NodeExamples]) -> dict[int, bytes]:
    """Return node -> what its examples are known by in this process."""
    return {node: _digest(part) for node, part in parts.items()}


def remember(digests: Mapping[int, bytes], folder: Path) -> None:
    """Remember what is trained on from now on, and where its ledgers are."""
    for digest in digests.values():
        _seen.setdefault(digest, folder)


def warn_about_repeats(digests: Mapping[int, bytes], folder: Path) -> None:
    """Warn where this process has trained on nodes' examples before, in another folder."""
    again = {
        node: _seen[digest]
        for node, digest in digests.items()
        if _seen.get(digest, folder) != folder
    }
    if again:
        first, others = next(iter(again.items())), len(again) - 1
        more = f" and {others} more" if others else ""
        warnings.warn(
            f"node {first[0]}{more}: trained on before, in {first[1]}; the eps of both runs adds "
            f"up for these examples: `dpcsgp account {first[1]} {folder}` prints the sum",
            stacklevel=3,
        )


def _digest(part: NodeExamples) -> bytes:
    step = max(1, len(part) // _EXAMPLES)
    indices = list(range(0, len(part), step))
    (inputs, targets), _ = part.read(indices, [0] * len(indices))
    digest = hashlib.blake2b(str(len(part)).encode(), key=_KEY, digest_size=16)
    for values in (inputs, targets):
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
