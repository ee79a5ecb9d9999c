"""Before the first step: do all processes mean the same run?

Every process publishes what must be equal (protocol version, settings, graph, initial model, data shapes, world size) and
compares everybody's facts with its own; a difference names the rank and the key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from dpcsgp.errors import ConfigError, DpcsgpError
from dpcsgp.network.health import Store, read

PROTOCOL = 1


def shake_hands(store: Store, rank: int, world_size: int, facts: Mapping[str, object], timeout: float) -> None:
    """Publish this process's facts, wait for all others, and refuse any difference."""
    mine = {"protocol version": PROTOCOL, "world size": world_size, **facts}
    store.set(f"hello/{rank}", json.dumps(mine))
    deadline = time.monotonic() + timeout
    missing = list(range(world_size))
    while missing:
        for other in list(missing):
            text = read(store, f"hello/{other}")
            if text is not None:
                _compare(rank, mine, other, json.loads(text))
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise DpcsgpError(
                f"handshake: rank {', '.join(map(str, missing))} of {world_size} did not show up within {timeout:g} s; "
                "start all processes, and check that the world size is the same everywhere"
            )
        time.sleep(0.02)


def _compare(rank: int, mine: Mapping[str, object], other_rank: int, theirs: Mapping[str, object]) -> None:
    for key in sorted(mine.keys() | theirs.keys()):
        here, there = json.loads(json.dumps(mine.get(key))), theirs.get(key)
        if here != there:
            raise ConfigError(
                f"handshake: rank {other_rank} has {key} = {there!r}, rank {rank} has {here!r}; "
                "start all processes with the same settings, data and version"
            )
