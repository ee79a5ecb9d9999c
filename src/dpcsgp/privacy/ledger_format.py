"""How a ledger looks on disk, and how it is read: JSON lines in a chain of checksums.

    {"kind":"header","format":2,"start":"5d1e...","run_id":"9f3c","node":0,...,"prev":...,"sum":...}
    {"kind":"release","start":"5d1e...","step":0,"attempt":0,"sampling":...,"prev":...,"sum":...}

`sum` is BLAKE2b over the bytes of the line up to it, `prev` is the `sum` of the line before:
whoever changes, drops or reorders a line breaks the chain. Only public constants are written: no
batch sizes, indices, losses or norms.

Releases that share noise with other nodes (format 3) also say how well they hide from 0, 1, ...
colluders (`by_colluders`) and how many of them the promise allows for (`max_colluders`).

The header of a ledger whose unit of privacy is a person with all rows (format 4) says so (`unit`).

`start` is a random public name of the start that wrote the line: two copies of a ledger that are
both continued have different lines from there on. Format 1 had none; such a ledger is read and
continued, and its new lines have one.

A crash in the middle of a write leaves a torn last line. It counts as spent, because nobody can
tell what followed it. The line that takes its place has a checksum of what was there (`fragment`),
so that copies can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy.events import UNITS, ReleaseEvent, Unit

FORMAT: Final = 2  # of new ledgers; a change of any line's bytes needs another number
SHARED_FORMAT: Final = 3  # of ledgers whose releases share noise with other nodes
UNIT_FORMAT: Final = 4  # of ledgers whose unit of privacy is not a single example
_READ_FORMATS: Final = (1, FORMAT, SHARED_FORMAT, UNIT_FORMAT)
GENESIS: Final = "0" * 32
_DIGEST_BYTES: Final = 16
_LONGEST_LINE: Final = 4096  # far longer than any record: more is damage
_START_BYTES: Final = 8
_SUM_FIELD: Final = b',"sum":"'
_EVENT_FIELDS: Final = ("sampling", "sampling_rate", "noise_multiplier")


class _DamagedLineError(Exception):
    """A line does not decode; says why."""


@dataclass(frozen=True)
class LedgerHeader:
    """What a ledger is about; `event` is the release that a torn first record is counted as."""

    run_id: str
    node: int
    config: str = ""
    delta: float | None = None
    event: ReleaseEvent | None = None
    private: bool = True
    unit: Unit = "example"

    def as_record(self, start: str) -> dict[str, Any]:
        """Return the header's line as a dict, without chain fields."""
        # The order of the fields is part of the format: the checksum is over the bytes.
        own = {"run_id": self.run_id, "node": self.node, "config": self.config, "delta": self.delta}
        about = {**own, "private": self.private, **_event_fields(self.event)}
        shares = self.event is not None and self.event.max_colluders is not None
        number = SHARED_FORMAT if shares else FORMAT
        if self.unit != "example":
            number, about = UNIT_FORMAT, {**about, "unit": self.unit}
        return {"kind": "header", "format": number, "start": start, **about}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> LedgerHeader:
        """Check and read a header line."""
        if record.get("kind") != "header":
            raise _DamagedLineError("no header")
        if record.get("format") not in _READ_FORMATS:
            found = record.get("format")
            known = ", ".join(map(str, _READ_FORMATS))
            raise _DamagedLineError(f"format {found!r}, this version reads formats {known}")
        event = _event_of(record) if record.get("sampling") is not None else None
        # A right checksum says nothing about types.
        run_id, node, config, delta, private = map(
            record.get, ("run_id", "node", "config", "delta", "private")
        )
        if not (
            isinstance(run_id, str)
            and type(node) is int
            and isinstance(config, str)
            and type(private) is bool
        ):
            raise _DamagedLineError("header fields are missing")
        if delta is not None and not (isinstance(delta, float) and 0 < delta < 1):
            raise _DamagedLineError("header delta is not between 0 and 1")
        unit = record.get("unit", "example")
        if unit not in UNITS:
            raise _DamagedLineError("header unit is neither an example nor a person")
        return cls(run_id, node, config, delta, event, private, unit)


@dataclass(frozen=True)
class Fork:
    """A ledger that continues a copy of another one: `own` releases after the `common` ones."""

    path: Path
    common: int
    own: int


@dataclass(frozen=True)
class LedgerContents:
    """A verified ledger: its header, its releases by event, and the chain.

    `events` are the releases line by line and `torn` the bytes of a torn last line. `counts` adds
    those of `forks`.
    """

    path: Path
    header: LedgerHeader
    counts: Counter[ReleaseEvent] = field(default_factory=Counter)
    digests: bytearray = field(default_factory=bytearray)
    last_attempt: int = -1
    whole_bytes: int = 0
    torn_event: ReleaseEvent | None = None
    events: list[ReleaseEvent] = field(default_factory=list)
    torn: bytes = b""
    forks: tuple[Fork, ...] = ()
    places: set[tuple[int, int]] = field(default_factory=set)  # (step, attempt) of the releases

    @property
    def count(self) -> int:
        """Number of releases that count as spent, a torn one included."""
        return sum(self.counts.values())

    @property
    def head(self) -> str:
        """Checksum of the last whole line."""
        return self.digests[-_DIGEST_BYTES:].hex()

    def append(self, event: ReleaseEvent, digest: str, place: tuple[int, int]) -> None:
        """Follow a line that was written to the file."""
        self.counts[event] += 1
        self.places.add(place)
        self.events.append(event)
        self.digests.extend(bytes.fromhex(digest))

    def releases(self) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release with its count."""
        return list(self.counts.items())

    def continues(self, head: str, count: int) -> bool:
        """Say whether this ledger had `head` after `count` releases, and was only appended to."""
        # Entry 0 is the header's checksum, so entry `count` stands after `count` releases.
        start = count * _DIGEST_BYTES
        found = self.digests[start : start + _DIGEST_BYTES].hex()
        return 0 <= start < len(self.digests) and found == head


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def encode_line(record: dict[str, Any], prev: str) -> tuple[bytes, str]:
    """Return the line of a record (newline included) and its checksum."""
    text = json.dumps({**record, "prev": prev}, separators=(",", ":"), allow_nan=False)
    body = text.encode()[:-1]  # without its closing brace: the checksum follows inside of it
    digest = _digest(body)
    return body + _SUM_FIELD + digest.encode() + b'"}\n', digest


def new_start() -> str:
    """Return a fresh public name for a start."""
    return os.urandom(_START_BYTES).hex()


def release_record(
    start: str, step: int, attempt: int, event: ReleaseEvent, lost: bool = False
) -> dict[str, Any]:
    """Return the line of a release as a dict, without chain fields.

    `lost`: its own line was lost with a disk and is written anew. Every release of this package
    counts such a line as any other.
    """
    place = {"start": start, "step": step, "attempt": attempt}
    return {"kind": "release", **place, **({"lost": True} if lost else {}), **_event_fields(event)}


def torn_record(start: str, event: ReleaseEvent, fragment: bytes) -> dict[str, Any]:
    """Return the line that takes the place of a torn one; its step and attempt are not known."""
    return {"kind": "torn", "start": start, "fragment": _digest(fragment), **_event_fields(event)}


def replaces_torn(line: bytes, fragment: bytes) -> bool:
    """Say whether a verified line is the torn one in full, or was written in its place."""
    if line.startswith(fragment):
        return True
    return json.loads(line).get("fragment") == _digest(fragment)


def decode_line(line: bytes, prev: str) -> tuple[dict[str, Any], str]:
    """Return the record of a line (no newline) and its checksum; refuse damaged or moved ones."""
    # Checksum before JSON: what was damaged is not even parsed.
    body, found, rest = line.rpartition(_SUM_FIELD)
    if not found or len(line) > _LONGEST_LINE:
        raise _DamagedLineError("not a record")
    digest = _digest(body)
    if rest != digest.encode() + b'"}':
        raise _DamagedLineError("does not match its checksum")
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        raise _DamagedLineError("not JSON") from None
    if not isinstance(record, dict) or record.get("prev") != prev:
        raise _DamagedLineError("does not follow from the line before")
    return record, digest


def read_ledger(path: Path) -> LedgerContents:
    """Read and verify a ledger file without changing it."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"cannot read ledger {path}: {error.strerror}") from error
    return _verified(_Reader(path), body)


def _verified(reader: _Reader, body: bytes) -> LedgerContents:
    # Without a newline at the end the last line was cut off.
    *lines, rest = body.split(b"\n")
    last_line = len(lines) if rest == b"" else len(lines) + 1
    for number, line in enumerate(lines, start=1):
        try:
            reader.take(line)
        except _DamagedLineError as damage:
            # Only the last line can be torn; damage before it was done by somebody.
            if number < last_line or number == 1:
                raise reader.error(number, damage) from None
            reader.take_torn(line, number, b"\n")
            return reader.contents()
    if rest != b"":
        reader.take_torn(rest, last_line)
    if reader.header is None:
        raise LedgerError(f"{reader.path}, line 1: no header; this is not a ledger")
    return reader.contents()


class _Reader:
    """Takes lines one after another and keeps what they add up to."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, None
        self.format, self.torn = FORMAT, b""
        self.events: list[ReleaseEvent] = []
        self.digests, self.prev = bytearray(), GENESIS
        self.last_attempt, self.whole_bytes = -1, 0
        self.last_event: ReleaseEvent | None = None
        self.torn_event: ReleaseEvent | None = None
        self.places: set[tuple[int, int]] = set()

    def take(self, line: bytes) -> None:
        record, digest = decode_line(line, self.prev)
        if self.header is None:
            self.header, self.format = LedgerHeader.from_record(record), record["format"]
            self._check_start(record)
            self.last_event = self.header.event
        else:
            self.last_event = self._release(record)
            self.events.append(self.last_event)
        # all checksums are kept: any earlier head can be looked up (`continues`)
        self.digests += bytes.fromhex(digest)
        self.prev, self.whole_bytes = digest, self.whole_bytes + len(line) + 1

    def _release(self, record: dict[str, Any]) -> ReleaseEvent:
        # A torn record was counted by an earlier start; nobody knows its step.
        if record.get("kind") == "release":
            step, attempt = record.get("step"), record.get("attempt")
            if type(step) is not int or type(attempt) is not int:
                raise _DamagedLineError("step or attempt is missing")
            self.last_attempt = max(self.last_attempt, attempt)
            self.places.add((step, attempt))
        elif record.get("kind") != "torn":
            raise _DamagedLineError(f"unknown kind {record.get('kind')!r}")
        self._check_start(record)
        return _event_of(record)

    def _check_start(self, record: dict[str, Any]) -> None:
        """Refuse a line that does not name its start; lines of format 1 do not."""
        start = record.get("start")
        named = isinstance(start, str) and len(start) == 2 * _START_BYTES
        if not named and (start is not None or self.format > 1):
            raise _DamagedLineError("the name of its start is missing")

    def take_torn(self, line: bytes, number: int, end: bytes = b"") -> None:
        """Count an unreadable last line as one release of the kind before it.

        Without privacy if no kind is known: what was released then, nobody can tell.
        """
        if self.header is None:
            raise self.error(number, _DamagedLineError("the header is not whole"))
        # one write was interrupted, so one record at most is torn
        if line.count(b'{"kind":') > 1 or len(line) > _LONGEST_LINE:
            raise self.error(number, _DamagedLineError("more than one record is damaged"))
        try:
            # only its newline is missing
            self.torn_event = self._release(decode_line(line, self.prev)[0])
        except _DamagedLineError:
            # Shared noise may have been dearer than before (a partner stopped), never dearer than
            # the own noise alone.
            last = self.last_event or ReleaseEvent("poisson", 1.0, 0.0)
            self.torn_event = last.against("all")
        self.torn = line + end

    def error(self, number: int, damage: _DamagedLineError) -> LedgerError:
        return LedgerError(
            f"{self.path}, line {number}: {damage}; the ledger was edited or damaged, so what "
            "was spent is unknown. Restore the file from a backup; without it, count the data as "
            "fully spent"
        )

    def contents(self) -> LedgerContents:
        assert self.header is not None
        # What was torn counts as spent, but is no line of the chain.
        counts = Counter(self.events)
        if self.torn_event is not None:
            counts[self.torn_event] += 1
        return LedgerContents(
            self.path, self.header, counts, self.digests, self.last_attempt, self.whole_bytes,
            self.torn_event, self.events, self.torn, places=self.places,
        )  # fmt: skip


def _event_fields(event: ReleaseEvent | None) -> dict[str, Any]:
    fields = {name: getattr(event, name) if event else None for name in _EVENT_FIELDS}
    if event is not None and event.max_colluders is not None:
        fields |= {"max_colluders": event.max_colluders, "by_colluders": list(event.by_colluders)}
    return fields


def _event_of(record: dict[str, Any]) -> ReleaseEvent:
    sampling, rate, noise = (record.get(name) for name in _EVENT_FIELDS)
    if not (isinstance(sampling, str) and isinstance(rate, float) and isinstance(noise, float)):
        raise _DamagedLineError("event fields are missing")
    colluders, rows = record.get("max_colluders"), record.get("by_colluders", [])
    whole = colluders is None or type(colluders) is int
    if not (whole and isinstance(rows, list) and all(isinstance(row, float) for row in rows)):
        raise _DamagedLineError("fields about shared noise are of a wrong kind")
    try:
        return _known_event(sampling, rate, noise, colluders, tuple(rows))
    except ConfigError as error:
        raise _DamagedLineError(str(error)) from None


@lru_cache(maxsize=256)
def _known_event(
    sampling: str, rate: float, noise: float, colluders: int | None, rows: tuple[float, ...]
) -> ReleaseEvent:
    """Return one object for all lines with the same event: a long ledger has few kinds."""
    return replace(
        ReleaseEvent.of(sampling, rate, 0.0),
        noise_multiplier=noise,
        max_colluders=colluders,
        by_colluders=rows,
    )


def ledger_files(folder: Path) -> Iterator[Path]:
    """Yield the ledger files of a results folder, of its `ledger` folder, or the file itself."""
    if not folder.exists():
        raise ConfigError(
            f"{folder}: no such file or folder; give a ledger file or the results folder of a run"
        )
    if folder.is_file():
        yield folder
        return
    # A results folder or the ledger folder in it: both are given in practice.
    inner = folder / "ledger" if (folder / "ledger").is_dir() else folder
    files = sorted(inner.glob("node-*.jsonl"))
    if not files:
        raise ConfigError(
            f"{inner}: holds no ledger (node-*.jsonl); give the results folder of a run with "
            "releases"
        )
    yield from files
