"""A party that keeps to the rule but for one number in its frames, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import running

from dpcsgp.compression import frames

FIRST_LIE = 4


def take_part(root: str, node: int, weight: str, place: int) -> None:
    """Be one party until the end, with another number in its frames from a round on."""
    join = frames.join

    def lying(senders: Any, round_: int, y_NK: Tensor, *words: Any, **more: Any) -> Tensor:
        if round_ >= FIRST_LIE:
            y_NK = y_NK.clone()
            y_NK[:, place] = float(weight)
        return join(senders, round_, y_NK, *words, **more)

    frames.join = lying
    running.take_part(root, node, running.SEED, 0.0, None, True)
