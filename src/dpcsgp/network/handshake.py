"""Before the first step: do all processes mean the same run, and did they meet in the same start?

First round (`hello/RANK`): every process publishes what must be equal (protocol version, world
size, settings, graph, initial model, data shapes) and fresh random bytes; a difference names the
rank and the key. With a key file hellos are tagged. Second round (`confirm/RANK`): every process
proves that it heard the same fresh bytes from all, its own taken from memory. Hellos of an earlier
start are tagged rightly too, but lead to other bytes than those that the process which they imitate
has heard: the second round then fails, and no frame is sent. With a key file, the tags of this
start's frames and of all that goes through the store later depend on all fresh bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dpcsgp.compression import frames
from dpcsgp.errors import ConfigError
from dpcsgp.network.board import Board, Seal
from dpcsgp.network.health import CAUSE, Health, SilentPeerError, announce, known_cause

PROTOCOL = 3
_MOST_NAMED = 3
_GRACE_SECONDS = 5.0  # how long something else may stand in the place of a rank's hello
_FRESH = re.compile("[0-9a-f]{32}")

# (rank, text in the store) -> what it says, None if it is not genuine
Reader = Callable[[int, str], str | None]


def handshake(
    board: Board, world_size: int, facts: Mapping[str, object], health: Health, seconds: float
) -> bytes | None:
    """Refuse any difference between the processes; return the key of this start, None without a key
    file."""
    rank, key = board.rank, board.seal.key
    mine = json.loads(json.dumps({"protocol version": PROTOCOL, "world size": world_size, **facts}))
    own = health.life = os.urandom(16).hex()
    waiting = _Round(board, world_size, health, time.monotonic() + seconds, seconds)

    def read_hello(other: int, text: str) -> str | None:
        return _read_hello(board.seal, rank, mine, other, text)

    fresh = waiting.gather("hello", _hello(board.seal, rank, mine, own), read_hello)
    fresh[rank] = own  # what the store says about this process is of no interest
    transcript = hashlib.blake2b(
        json.dumps(fresh).encode(), digest_size=32, person=b"dpcsgp hellos"
    ).digest()
    run_key = frames.run_key(key, transcript) if key else None
    confirming = Board(board.store, rank, Seal(run_key))
    proof = hashlib.blake2b(transcript, digest_size=16, person=b"dpcsgp confirm").hexdigest()

    def read_proof(other: int, text: str) -> str | None:
        note = confirming.genuine(f"confirm/{other}", text, other)
        return proof if note and note.value == proof else None

    waiting.gather("confirm", confirming.sealed(f"confirm/{rank}", proof), read_proof)
    health.lives = fresh
    return run_key


class _Round:
    """Waits for one text of every rank and keeps up its own against whoever overwrites it."""

    def __init__(
        self, board: Board, world_size: int, health: Health, deadline: float, seconds: float
    ) -> None:
        self._board, self._world_size, self._health = board, world_size, health
        self._deadline, self._seconds = deadline, seconds
        self._own: dict[str, str] = {}

    def gather(self, kind: str, own: str, read: Reader) -> list[str]:
        """Publish the own text; return what `read` makes of everybody's, by rank (the own one
        unread)."""
        self._own[f"{kind}/{self._board.rank}"] = own
        heard: dict[int, str] = {self._board.rank: own}
        refused: dict[int, float] = {}  # since when something else stands in a rank's place
        while True:
            self._keep_up()
            for other in set(range(self._world_size)) - set(heard):
                text = self._board.text(f"{kind}/{other}")
                said = read(other, text) if text is not None else None
                if said is not None:
                    heard[other] = said
                elif text is not None:
                    refused.setdefault(other, time.monotonic())
            self._health.raise_if_failed()
            if len(heard) == self._world_size:
                return [heard[other] for other in range(self._world_size)]
            self._give_up_in_time(
                kind, [rank for rank in range(self._world_size) if rank not in heard], refused
            )
            time.sleep(0.05)

    def _keep_up(self) -> None:
        for name, text in self._own.items():
            if self._board.text(name) != text:
                self._board.store.set(name, text)

    def _give_up_in_time(self, kind: str, missing: list[int], refused: Mapping[int, float]) -> None:
        now, grace = time.monotonic(), min(_GRACE_SECONDS, 0.7 * self._seconds)
        late = [
            rank
            for rank in missing
            if rank in refused and now > min(refused[rank] + grace, self._deadline)
        ]
        if late:
            _refuse(self._board, kind, late[0])
        if now > self._deadline:
            raise self._missing(missing)

    def _missing(self, missing: list[int]) -> SilentPeerError:
        text = (
            f"handshake: rank {', '.join(map(str, missing))} of {self._world_size} did not show "
            "up within "
            f"{self._seconds:g} s; start all processes, and check that the world size is the "
            "same everywhere"
        )
        if known_cause(self._board) is None and self._board.text(CAUSE):
            text += f" ('{CAUSE}' in the store is not tagged with the key in network.key_file and was ignored)"
        return SilentPeerError(announce(self._board, text, missing[0]).text)


def _hello(seal: Seal, rank: int, facts: Mapping[str, object], fresh: str) -> str:
    """Return a hello; its place and form have been the same in all releases, so that versions can
    be compared."""
    content = {"facts": facts, "fresh": fresh}
    return json.dumps({**content, "tag": seal.tag(f"hello/{rank}", rank, json.dumps(content))})


def _read_hello(
    seal: Seal, rank: int, mine: Mapping[str, object], other: int, text: str
) -> str | None:
    """Return the fresh bytes of a hello, None if it is not genuine; ConfigError if it is and the
    facts differ."""
    facts, fresh, tag = _parts(text)
    content = json.dumps({"facts": facts, "fresh": fresh})
    if facts is None or not seal.fits(tag, f"hello/{other}", other, content):
        return None
    _compare(rank, mine, other, facts)
    return fresh if isinstance(fresh, str) and _FRESH.fullmatch(fresh) else None


def _parts(text: str) -> tuple[dict[str, Any] | None, Any, Any]:
    """Take a hello apart; no facts: it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None, None, None
    if not isinstance(content, dict) or not isinstance(content.get("facts"), dict):
        return None, None, None
    return content["facts"], content.get("fresh"), content.get("tag")


def _refuse(board: Board, kind: str, other: int) -> NoReturn:
    """Say what stands in the place of a rank's hello or confirmation."""
    where = f"'{kind}/{other}' in the store of the run"
    if kind == "confirm":
        raise SilentPeerError(
            f"handshake: rank {other} met other processes than this one ({where} does not fit): "
            "some rank was started twice or restarted alone, or something else writes to the "
            "store. Stop all processes, then start them all"
        )
    facts = _parts(board.text(f"hello/{other}") or "")[0] or {}
    version = facts.get("protocol version")
    other_version = isinstance(version, int) and version != PROTOCOL
    raise ConfigError(
        f"handshake: rank {other} has another key in network.key_file or none, or something else "
        f"writes to the store: {where} "
        + ("carries no right tag" if board.seal.key else "is no hello")
        + (f" (it claims protocol version {version}, here {PROTOCOL})" if other_version else "")
        + "; copy the same key file to every machine, and close the store's port to all others"
    )


def _compare(
    rank: int, mine: Mapping[str, object], other_rank: int, theirs: Mapping[str, object]
) -> None:
    keys = [*mine, *(key for key in theirs if key not in mine)]
    differing = [key for key in keys if mine.get(key) != theirs.get(key)]
    if not differing:
        return
    named = ", ".join(
        f"{key} = {theirs.get(key)!r} (rank {rank}: {mine.get(key)!r})"
        for key in differing[:_MOST_NAMED]
    )
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    raise ConfigError(
        f"handshake: rank {other_rank} has {named}{more}; start all processes with the same "
        "settings, data and version"
    )
