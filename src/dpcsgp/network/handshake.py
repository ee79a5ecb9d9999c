"""The handshake before the first step: the same run and the same start everywhere?

First exchange (`hello/RANK`): every process publishes what must be equal (protocol version, world
size, settings, graph, initial model, data shapes) and a nonce; a difference names the rank and the
key. With a key file hellos are tagged.

Second exchange (`confirm/RANK`): every process proves that it has the same nonces of all ranks, its
own taken from memory. A hello replayed from an earlier start has a valid tag too, but its nonce is
not the one that the process of that rank holds: the second exchange then fails, and no frame is
sent. With a key file, the tags of this start's frames and of all that goes through the store later
depend on all nonces.
"""

from __future__ import annotations

import hashlib
import json
import logging
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
_GRACE_SECONDS = 5.0  # how long an invalid value may stand in the place of a rank's hello
_NONCE = re.compile("[0-9a-f]{32}")
_LOG = logging.getLogger(__name__)

# (rank, text in the store) -> what it says, None if it is not valid
Reader = Callable[[int, str], str | None]


def handshake(
    board: Board, world_size: int, facts: Mapping[str, object], health: Health, seconds: float
) -> bytes | None:
    """Refuse any difference between the processes, and derive the key of this start.

    Args:
        board: the store of the run, tagged with the key file's key where there is one.
        world_size: number of processes.
        facts: public values that must be equal on all ranks (JSON).
        health: is given this process's nonce, and in the end those of all ranks.
        seconds: limit for both exchanges together.

    Returns:
        The key of this start, None without a key file.

    Raises:
        ConfigError: a rank has other facts, or another key.
        SilentPeerError: a rank did not join in time, or joined other processes.
    """
    rank, key = board.rank, board.seal.key
    # Through JSON once, so that equal facts compare equal (tuples become lists).
    mine = json.loads(json.dumps({"protocol version": PROTOCOL, "world size": world_size, **facts}))
    own = health.nonce = os.urandom(16).hex()
    exchange = _Exchange(board, world_size, health, time.monotonic() + seconds, seconds)

    # First exchange: facts and nonces. The store's copy of the own nonce is not trusted.
    def read_hello(other: int, text: str) -> str | None:
        return _read_hello(board.seal, rank, mine, other, text)

    nonces = exchange.gather("hello", _hello(board.seal, rank, mine, own), read_hello)
    nonces[rank] = own
    transcript = hashlib.blake2b(
        json.dumps(nonces).encode(), digest_size=32, person=b"dpcsgp hellos"
    ).digest()
    # Second exchange: a digest of all nonces, under the key that they give.
    run_key = frames.run_key(key, transcript) if key else None
    confirming = Board(board.store, rank, Seal(run_key))
    proof = hashlib.blake2b(transcript, digest_size=16, person=b"dpcsgp confirm").hexdigest()

    def read_proof(other: int, text: str) -> str | None:
        note = confirming.genuine(f"confirm/{other}", text, other)
        return proof if note and note.value == proof else None

    exchange.gather("confirm", confirming.sealed(f"confirm/{rank}", proof), read_proof)
    health.nonces = nonces
    _LOG.info("rank %d: handshake of %d processes complete", rank, world_size)
    return run_key


class _Exchange:
    """All-gathers one text per rank, and writes its own again where it was overwritten."""

    def __init__(
        self, board: Board, world_size: int, health: Health, deadline: float, seconds: float
    ) -> None:
        self._board, self._world_size, self._health = board, world_size, health
        self._deadline, self._seconds = deadline, seconds
        self._own: dict[str, str] = {}

    def gather(self, kind: str, own: str, read: Reader) -> list[str]:
        """Publish the own text; return what `read` makes of each rank's (the own one unread)."""
        self._own[f"{kind}/{self._board.rank}"] = own
        heard: dict[int, str] = {self._board.rank: own}
        refused: dict[int, float] = {}  # since when an invalid value stands in a rank's place
        while True:
            self._write_own()
            # Poll the ranks that are missing: a blocking read might wait for a dead process.
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
            missing = [rank for rank in range(self._world_size) if rank not in heard]
            self._check_deadlines(kind, missing, refused)
            time.sleep(0.05)

    def _write_own(self) -> None:
        # Hello and confirmation both: a late rank still has to read the hello.
        for name, text in self._own.items():
            if self._board.text(name) != text:
                self._board.store.set(name, text)

    def _check_deadlines(self, kind: str, missing: list[int], refused: Mapping[int, float]) -> None:
        """Raise for a rank whose value stayed invalid, and for ranks that did not join in time."""
        # An invalid value has a while to be replaced: it may be left from an earlier start.
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
            f"up within {self._seconds:g} s; start all processes, and check that the world size "
            "is the same everywhere"
        )
        if known_cause(self._board) is None and self._board.text(CAUSE):
            text += (
                f" ('{CAUSE}' in the store is not tagged with the key in network.key_file "
                "and was ignored)"
            )
        _LOG.warning("rank %d: no handshake with rank %s", self._board.rank, missing)
        return SilentPeerError(announce(self._board, text, missing[0]).text)


def _hello(seal: Seal, rank: int, facts: Mapping[str, object], nonce: str) -> str:
    """Return a hello."""
    # Key and form are the same in all releases, so that versions can be compared.
    content = {"facts": facts, "fresh": nonce}
    return json.dumps({**content, "tag": seal.tag(f"hello/{rank}", rank, json.dumps(content))})


def _read_hello(
    seal: Seal, rank: int, mine: Mapping[str, object], other: int, text: str
) -> str | None:
    """Return the nonce of a hello, None if it is not valid; ConfigError if its facts differ."""
    facts, nonce, tag = _parts(text)
    content = json.dumps({"facts": facts, "fresh": nonce})
    # The tag first: what a stranger wrote must not end the run by differing.
    if facts is None or not seal.fits(tag, f"hello/{other}", other, content):
        return None
    _compare(rank, mine, other, facts)
    return nonce if isinstance(nonce, str) and _NONCE.fullmatch(nonce) else None


def _parts(text: str) -> tuple[dict[str, Any] | None, Any, Any]:
    """Return facts, nonce and tag of a hello; no facts: it is not a hello."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None, None, None
    if not isinstance(content, dict) or not isinstance(content.get("facts"), dict):
        return None, None, None
    return content["facts"], content.get("fresh"), content.get("tag")


def _refuse(board: Board, kind: str, other: int) -> NoReturn:
    """Raise for an invalid value in the place of a rank's hello or confirmation."""
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
    """Raise ConfigError that names the first facts in which two ranks differ."""
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
