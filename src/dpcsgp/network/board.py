"""Values in the key-value store of a run: authenticated where there is a key, checked when read.

Any process that reaches the store's port can write to it. A value is stored as `AUTHOR TAG JSON`;
the tag is BLAKE2b under the key of this start over (name, author, JSON), so that nobody without the
key can alter a value, move it to another name or replay one of an earlier start. Without a key the
tag is `-`, and only form and range of a value can be checked.

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

# Returns what was expected in the place of a value, None if the value is valid.
Fault = Callable[[Any], str | None]


class StoreValueError(DpcsgpError):
    """A value in the store is not one that a process of this run writes: names its key."""


class Store(Protocol):
    """The part of a key-value store that is needed here; `get` is only called for existing keys."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys exist."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the key holds the expected one (empty: if the key does not exist)."""
        ...


class Seal:
    """Makes and checks tags (message authentication codes); without a key it accepts everything.

    `start` is a nonce that the launcher drew for this start and handed to its workers outside of
    the store: it binds the key to the start from the beginning. Without it a key of this start is
    known only after the handshake (`advance`).
    """

    def __init__(self, key: bytes | None = None, start: str = "") -> None:
        self._bound = bool(start)
        self.key = frames.run_key(key, start.encode()) if key and start else key

    def advance(self, run_key: bytes | None) -> None:
        """Use the key that the handshake derived for this start from now on."""
        # The launcher takes no part in the handshake: where it drew a nonce, its key stays.
        if not self._bound:
            self.key = run_key

    def tag(self, name: str, author: int, text: str) -> str:
        """Return the tag of a text under a name."""
        if self.key is None:
            return _NO_TAG
        # As JSON, so that no other (name, author, text) gives the same bytes.
        content = json.dumps([name, author, text]).encode()
        tag = hashlib.blake2b(content, digest_size=16, key=self.key, person=b"dpcsgp store")
        return tag.hexdigest()

    def fits(self, tag: object, name: str, author: int, text: str) -> bool:
        """Say whether a tag is valid, in constant time."""
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
        """Write a JSON value as this rank."""
        self.store.set(name, self.sealed(name, value))

    def sealed(self, name: str, value: Any) -> str:
        """Return what `put` writes."""
        text = json.dumps(value)
        return f"{self.rank} {self.seal.tag(name, self.rank, text)} {text}"

    def text(self, name: str) -> str | None:
        """Return the unchecked text under a key, None if the key does not exist; never waits."""
        return self.store.get(name).decode(errors="replace") if self.store.check([name]) else None

    def look(
        self, name: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note | None:
        """Return a checked value, None if the key does not exist.

        Args:
            name: key of the store.
            author: the rank that must have written it; None: any.
            fault: further check of the value.

        Raises:
            StoreValueError: the value is not one that a process of this run writes.
        """
        text = self.text(name)
        return None if text is None else self.opened(name, text, author, fault)

    def peek(
        self, name: str, author: int | None = None, fault: Fault = lambda value: None
    ) -> Note | None:
        """Return a checked value; one that fails the check counts as missing."""
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
        # Author, tag, then the content: nothing is parsed as JSON before its tag is verified.
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
    # int() would also take spaces, underscores and the digits of other scripts.
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 8
