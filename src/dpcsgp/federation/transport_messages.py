"""What is said on a line between two parties; every message is bounded and checked when parsed.

A line begins with a hello from either side. Then one end sends frames and the other says what it
has; both beat when they have nothing else to say.

| message | from | content |
|---|---|---|
| hello | both, first | JSON: protocol, roster, release, clock, from, to |
| holding | receiver: first, and after every sync | rounds, chain |
| heard | sender, after every holding | rounds; a receiver leaves when its last word was heard |
| frame | sender | round, size, chain before, chain after, first piece |
| piece | sender | the next bytes of the frame |
| notice | both; senders before frames that they made later | JSON: some party's start (`notices`) |
| beat | both, every few seconds | names of the parties that keep it waiting |
| refusal | caller, last | why it hangs up; who answers says it in the status of the call |
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from dpcsgp.errors import WireError
from dpcsgp.federation.frame_log import CHAIN_BYTES
from dpcsgp.federation.journal import Holding
from dpcsgp.federation.words import as_words

PROTOCOL: Final = 2
PIECE_BYTES: Final = 2**17  # of a frame; small, so that a thin link is not taken for a silent one
MOST_BYTES: Final = 2**20  # of any message
_MOST_HELLO: Final = 1024
_CLOCK_SECONDS: Final = 300.0  # certificates and end dates need clocks that agree roughly

_HOLDING = struct.Struct(f"<cQ{CHAIN_BYTES}s")
_FRAME = struct.Struct(f"<cQQ{CHAIN_BYTES}s{CHAIN_BYTES}s")
_HELLO_KIND, _HOLDING_KIND, _FRAME_KIND, _PIECE_KIND = b"h", b"a", b"f", b"p"
_REFUSAL_KIND: Final = b"r"
_NOTICE_KIND: Final = b"n"
_HEARD_KIND: Final = b"k"
_HEARD = struct.Struct("<cQ")
_BEAT_KIND: Final = b"b"
_MOST_NAMES: Final = 1024  # bytes of names in a beat
_MOST_TEXT: Final = 500


@dataclass(frozen=True)
class Facts:
    """What both ends of a line must agree on; two ends of one line have `node` and `peer` swapped.

    Attributes:
        roster: digest of the roster, hex.
        node: who says this.
        peer: to whom.
        release: version of this package.
        protocol: version of these messages.
        clock: seconds since the epoch.
    """

    roster: str
    node: int
    peer: int
    release: str
    protocol: int
    clock: float

    @classmethod
    def now(cls, roster_digest: bytes, node: int, peer: int) -> Facts:
        """Return what this party says to a peer now."""
        return cls(roster_digest.hex(), node, peer, version("dpcsgp"), PROTOCOL, time.time())


class FrameHead(NamedTuple):
    """Announces a frame; `before` and `after` are chains of the sender's log."""

    round: int
    size: int
    before: bytes
    after: bytes


def hello(facts: Facts) -> bytes:
    """Return the first message of a line."""
    return _HELLO_KIND + json.dumps(asdict(facts)).encode()


def check_hello(message: bytes, mine: Facts, over: Mapping[str, str] | None = None) -> None:
    """Refuse a hello that differs from what this party would say.

    Args:
        message: the hello.
        mine: what this party says.
        over: what to say to those who still have an older version of the roster, by its digest.

    Raises:
        WireError: names everything that differs, with both values and the remedy.
    """
    theirs = _parsed_hello(message)
    if text := (over or {}).get(theirs.roster):
        raise WireError(text)
    differences = [
        f"{name} {_shown(name, theirs)} there, {_shown(name, mine)} here: {remedy}"
        for name, remedy in (
            ("protocol", "install the same dpcsgp release"),
            ("release", "install the same dpcsgp release"),
            (
                "roster",
                "both parties need the same roster file (`dpcsgp federation show` of two "
                "files names what differs)",
            ),
        )
        if getattr(theirs, name) != getattr(mine, name)
    ]
    if not abs(theirs.clock - mine.clock) <= _CLOCK_SECONDS:  # NaN too
        differences.append(
            f"clock {theirs.clock:.0f} there, {mine.clock:.0f} here: set both to the right time"
        )
    if (theirs.node, theirs.peer) != (mine.peer, mine.node):
        differences.append(
            f"speaks as node {theirs.node} to node {theirs.peer}, but its certificate is that of "
            f"node {mine.peer} and this is node {mine.node}"
        )
    if differences:
        raise WireError("; ".join(differences))


def _shown(name: str, facts: Facts) -> str:
    """Return a fact for people: a roster by the words that they compare."""
    value = getattr(facts, name)
    whole = name == "roster" and len(value) == 64 and not value.strip("0123456789abcdef")
    return f"'{as_words(value)}'" if whole else repr(value)


def roster_of(message: bytes) -> str:
    """Return the digest of the roster that a hello names, hex.

    Raises:
        WireError: the message is no hello.
    """
    return _parsed_hello(message).roster


def _parsed_hello(message: bytes) -> Facts:
    if message[:1] != _HELLO_KIND or len(message) > _MOST_HELLO:
        raise WireError("the line does not begin with a hello")
    try:
        found: Any = json.loads(message[1:])
        facts = Facts(**found)
    except (ValueError, TypeError, RecursionError):
        raise WireError("the hello cannot be read: another release?") from None
    right = {"roster": str, "node": int, "peer": int, "release": str, "protocol": int}
    for name, kind in {**right, "clock": float}.items():
        if type(getattr(facts, name)) is not kind:
            raise WireError(f"the hello's {name} is no {kind.__name__}: another release?")
    return facts


def holding(held: Holding) -> bytes:
    """Say what is safe on this disk."""
    return _HOLDING.pack(_HOLDING_KIND, *held)


def frame(head: FrameHead, piece: bytes) -> bytes:
    """Announce a frame, with its first piece."""
    return _FRAME.pack(_FRAME_KIND, *head) + piece


def piece(content: bytes) -> bytes:
    """Return the message of a further piece."""
    return _PIECE_KIND + content


def notice(content: bytes) -> bytes:
    """Pass a notice on."""
    return _NOTICE_KIND + content


def parsed_notice(message: bytes) -> bytes | None:
    """Return the notice in a message; None: it holds something else."""
    return message[1:] if message[:1] == _NOTICE_KIND else None


def beat(waiting_for: Iterable[str] = ()) -> bytes:
    """Say that this party is alive, and which parties keep it waiting."""
    names = "\n".join(waiting_for).encode()
    if len(names) > _MOST_NAMES:  # this is for people, and the first ones will do
        names = names[:_MOST_NAMES].rpartition(b"\n")[0]
    return _BEAT_KIND + names


def parsed_beat(message: bytes) -> tuple[str, ...] | None:
    """Return whom the sender of a beat waits for; None: the message is no beat.

    Raises:
        WireError: it is one, but cannot be read.
    """
    if message[:1] != _BEAT_KIND:
        return None
    try:
        text = message[1:].decode()
    except UnicodeDecodeError:
        text = "\0"
    names = tuple(text.split("\n")) if text else ()
    if len(message) > 1 + _MOST_NAMES or not all(name and name.isprintable() for name in names):
        raise WireError(f"a beat cannot be read: {_described(message)}")
    return names


def refusal(text: str) -> bytes:
    """Say why this end hangs up."""
    return _REFUSAL_KIND + text.encode()[: 4 * _MOST_TEXT]


def check_no_refusal(message: bytes) -> None:
    """Raise what the other end gives as its reason for hanging up.

    Raises:
        WireError: the message is a refusal.
    """
    if message[:1] == _REFUSAL_KIND:
        raise WireError(f"the other end says: {foreign_text(message[1:].decode(errors='replace'))}")


def foreign_text(text: str) -> str:
    """Return a text of another party so that it can be shown: one short line."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_TEXT])


def parsed_holding(message: bytes) -> Holding:
    """Return what the other end has.

    Raises:
        WireError: the message is no holding.
    """
    if message[:1] != _HOLDING_KIND or len(message) != _HOLDING.size:
        raise WireError(f"expected a holding, got {_described(message)}")
    _, rounds, chain = _HOLDING.unpack(message)
    return Holding(rounds, chain)


def heard(rounds: int) -> bytes:
    """Say that a receiver's word about these rounds was heard."""
    return _HEARD.pack(_HEARD_KIND, rounds)


def parsed_heard(message: bytes) -> int | None:
    """Return of how many rounds the sender knows that they are safe; None: it says nothing of it.

    Raises:
        WireError: the message says so, but cannot be read.
    """
    if message[:1] != _HEARD_KIND:
        return None
    if len(message) != _HEARD.size:
        raise WireError(f"a confirmation cannot be read: {_described(message)}")
    return _HEARD.unpack(message)[1]


def parsed_frame(message: bytes) -> tuple[FrameHead, memoryview]:
    """Return the head of a frame and its first piece.

    Raises:
        WireError: the message is no beginning of a frame.
    """
    if message[:1] != _FRAME_KIND or len(message) < _FRAME.size:
        raise WireError(f"expected a frame, got {_described(message)}")
    _, round_, size, before, after = _FRAME.unpack_from(message)
    return FrameHead(round_, size, before, after), memoryview(message)[_FRAME.size :]


def parsed_piece(message: bytes) -> memoryview:
    """Return a further piece of a frame.

    Raises:
        WireError: the message is no piece.
    """
    if message[:1] != _PIECE_KIND or len(message) < 2:
        raise WireError(f"expected a piece of a frame, got {_described(message)}")
    return memoryview(message)[1:]


def _described(message: bytes) -> str:
    return f"{len(message)} bytes of kind {message[:1]!r}"
