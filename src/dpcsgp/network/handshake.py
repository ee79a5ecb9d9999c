"""Before the first step: do all processes mean the same run?

Every process publishes what must be equal (protocol version, world size, settings, graph, initial model, data shapes) and
compares everybody's facts with its own; a difference names the rank and the key. Every process also throws in fresh
random bytes: with a key file, the tags of this start's frames depend on all of them, so that no frame recorded earlier
fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from dpcsgp.errors import ConfigError
from dpcsgp.network.health import Health, SilentPeerError, Store, announce, read

PROTOCOL = 2
_MOST_NAMED = 3


def shake_hands(
    store: Store, rank: int, world_size: int, facts: Mapping[str, object], health: Health, seconds: float
) -> bytes:
    """Publish this process's facts, wait for all others, refuse any difference; return bytes that no other start has."""
    mine = json.loads(json.dumps({"protocol version": PROTOCOL, "world size": world_size, **facts}))
    store.set(f"hello/{rank}", json.dumps({"facts": mine, "fresh": os.urandom(16).hex()}))
    deadline = time.monotonic() + seconds
    heard: dict[int, Any] = {}
    while len(heard) < world_size:
        missing = [other for other in range(world_size) if other not in heard]
        for other in missing:
            if text := read(store, f"hello/{other}"):
                heard[other] = json.loads(text)
                _compare(rank, mine, other, heard[other]["facts"])
        health.raise_if_failed()
        if len(heard) < world_size and time.monotonic() > deadline:
            raise _missing(store, missing, world_size, seconds)
        time.sleep(0.05)
    fresh = [heard[other]["fresh"] for other in range(world_size)]
    return hashlib.blake2b(json.dumps(fresh).encode(), digest_size=32).digest()


def _missing(store: Store, missing: list[int], world_size: int, seconds: float) -> SilentPeerError:
    text = (
        f"handshake: rank {', '.join(map(str, missing))} of {world_size} did not show up within {seconds:g} s; "
        "start all processes, and check that the world size is the same everywhere"
    )
    return SilentPeerError(announce(store, text, missing[0]).text)


def _compare(rank: int, mine: Mapping[str, object], other_rank: int, theirs: Mapping[str, object]) -> None:
    keys = [*mine, *(key for key in theirs if key not in mine)]
    differing = [key for key in keys if mine.get(key) != theirs.get(key)]
    if not differing:
        return
    named = ", ".join(
        f"{key} = {theirs.get(key)!r} (rank {rank}: {mine.get(key)!r})" for key in differing[:_MOST_NAMED]
    )
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    raise ConfigError(
        f"handshake: rank {other_rank} has {named}{more}; start all processes with the same settings, data and version"
    )
