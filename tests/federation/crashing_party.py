"""A party that dies at a chosen moment: right after one of its writes, or right before it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import running

from dpcsgp.federation.journal import Journal
from dpcsgp.federation.turn_log import TurnLog
from dpcsgp.privacy.kept_releases import KeptReleases
from dpcsgp.privacy.private_gradients import PrivateGradients
from dpcsgp.records.checkpoint import CheckpointFolder

CODE = 77
# In the order in which they happen in a round.
MOMENTS = {
    "release kept": (KeptReleases, "keep"),
    "ledger line": (PrivateGradients, "account"),
    "turn": (TurnLog, "record"),
    "frame": (Journal, "release"),
    "checkpoint": (CheckpointFolder, "save"),
}


def take_part(root: str, node: int, moment: str, calls: int, before: bool) -> None:
    """Be one party until this write has been made so often, then die on the spot."""
    owner, name = MOMENTS[moment]
    write, made = getattr(owner, name), 0

    def deadly(self: Any, *words: Any, **more: Any) -> Any:
        nonlocal made
        made += 1
        if before and made == calls:
            os._exit(CODE)
        found = write(self, *words, **more)
        if made == calls:
            os._exit(CODE)
        return found

    setattr(owner, name, deadly)
    running.take_part(root, node, running.SEED, 0.0, None, True)
