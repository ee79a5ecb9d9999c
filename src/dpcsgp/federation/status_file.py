"""The status file of a party, as it is read: it takes no more than the standard library."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dpcsgp.errors import ConfigError

STATUS: Final = "status.json"  # in the results folder
FORMAT: Final = 1
STALE_SECONDS: Final = 6.0
# What a party may be doing; the last three are ends.
PHASES: Final = (
    "starting",
    "beginning the version",
    "meeting the others",
    "training",
    "polishing",
    "ending the version",
    "handing over",
    "ended",
    "interrupted",
    "failed",
)
OVER: Final = PHASES[-3:]


def read_status(path: Path) -> dict[str, Any]:
    """Return the last status of a party; `running` and `age` say whether it is news.

    Raises:
        ConfigError: there is none.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the party has not been started yet") from None
    except ValueError:
        raise ConfigError(f"{path} cannot be read; is it a status file?") from None
    age = max(time.time() - found["updated"], 0.0)
    over = found["phase"] in OVER
    running = not over and age < STALE_SECONDS
    if not running:  # nobody waits any more, and lines are cut
        found["waiting_for"] = []
        found["peers"] = [{**peer, "connected": False} for peer in found["peers"]]
    return {**found, "age": age, "running": running}


def waited_for(name: str, behind: Sequence[str]) -> str:
    """Say who is waited for, and for whom that party waits in turn.

    >>> waited_for("north", ["west"])
    'north (which waits for west)'
    """
    return f"{name} (which waits for {', '.join(behind)})" if behind else name
