"""Values in the store of a run: tagged with a key if the processes share one, and checked whenever
they are read.

Whoever reaches the store's port can write to it. A value is stored as `AUTHOR TAG JSON`; the tag is
BLAKE2b under the key of this start over (name, author, JSON), so that nobody without the key can
alter a value, move it to another name or serve one of an earlier start. Without a key the tag is
`-`, and only form and range of a value can be checked.

Legend: a *name* is a key of the store, the *author* the rank that wrote a value (-1: the launcher).
Reference: RFC 7693 (BLAKE2).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dpcsgp.compression import frames
from dpcsgp.errors import DpcsgpError

LAUNCHER = -1
_NO_TAG = "-"
_SHOWN = 40  # characters of a foreign value that an error quotes

# says what was expected in the place of a value, None if it is right
Fault = Callable[[Any], str | None]


class StoreValueError(DpcsgpError):
    """A value in the store is not what a process of this run writes: names the key of the store."""


class Store(Protocol):
    """The part of a key-value store that is needed here; `get` is called for keys that are
    there."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the key holds the expected one (empty: if it is not there)."""
        ...


class Seal:
    """Makes and checks tags; without a key it has none to make and accepts all.

    `start` are bytes that the launcher drew for this start and handed to its workers past the
    store: they bind the key to the start from the beginning. Without them a key of this start is
    known only after the handshake (`advance`)."""

    def __init__(self, key: bytes | None = None, start: str = "") -> None:
        self._bound = bool(start)
        self.key = frames.run_key(key, start.encode()) if key and start else key

    def advance(self, run_key: bytes | None) -> None:
        """Use the key of this start from now on; the launcher, which shakes no hands, knows only
        its own."""
        if not self._bound:
            self.key = run_key

    def tag(self, name: str, author: int, text: str) -> str:
        """Return the tag of a text under a name."""
        if self.key is None:
            return _NO_TAG
        content = json.dumps([name, author, text]).encode()
        return hashlib.blake2b(
            content, digest_size=16, key=self.key, person=b"dpcsgp store"
        ).hexdigest()

    def fits(self, tag: object, name: str, author: int, text: str) -> bool:
        """Say whether a tag is the right one."""
        expected = self.tag(name, author, text)
        return self.key is None or hmac.compare_digest(expected.encode(), str(tag).encode())


class Note(NamedTuple):
    """A value that was found in the store, and who wrote it."""

    author: int
    value: Any


class Board:
    """The store of a run, as one process uses it."""

    def __init__(self, store: Store, rank: int, seal: Seal | None = None) -> None:
        self.store, self.rank, self.seal = store, rank, seal or Seal()

    def put(self, name: str, value: Any) -> None:
        """Write a JSON value in this process's name."""
        self.store.set(name, self.sealed(name, value))

    def sealed(self, name: str, value: Any) -> str:
        """Return what `put` writes."""
        text = json.dumps(value)
        return f"{self.rank} {self.seal.tag(name, self.rank, text)} {text}"

    def text(self, name: str) -> str | None:
        """Return what a key holds, checked by nobody, or None if it is not there; does not wait for
        it."""
        return self.store.get(name).decode(errors="replace") if self.store.check([name]) else None

    def look(
        self, name: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note | None:
        """Return a checked value, None if it is not there; StoreValueError for one that nobody of
        this run wrote."""
        text = self.text(name)
        return None if text is None else self.opened(name, text, author, fault)

    def peek(
        self, name: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note | None:
        """Return a checked value; one that fails the check counts as not there."""
        text = self.text(name)
        return None if text is None else self.genuine(name, text, author, fault)

    def genuine(
        self, name: str, text: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note | None:
        """Check what was read under a name; None if it fails the check."""
        try:
            return self.opened(name, text, author, fault)
        except StoreValueError:
            return None

    def opened(
        self, name: str, text: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note:
        """Check what was read under a name; StoreValueError if it fails the check."""
        by, _, rest = text.partition(" ")
        tag, _, content = rest.partition(" ")
        if not _is_rank(by) or author not in (None, int(by)):
            raise self._foreign(
                name, text, "no value of this run" if author is None else f"not by rank {author}"
            )
        if not self.seal.fits(tag, name, int(by), content):
            raise self._foreign(
                name, text, "its tag does not fit the key in network.key_file and this start"
            )
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            raise self._foreign(name, text, "not JSON") from None
        if expected := fault(value):
            raise self._foreign(name, content, f"expected {expected}")
        return Note(int(by), value)

    def _foreign(self, name: str, text: str, why: str) -> StoreValueError:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return StoreValueError(
            f"the store of the run holds {shown!r} under '{name}': {why}. "
            "Something else writes to the store: close its port (MASTER_PORT) to all but "
            "the machines of this run, then continue with --resume"
        )


def _is_rank(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 8
