"""What is said on a line between two parties; every message is bounded and checked when parsed.

A line begins with a hello from either side. Then one end sends frames and the other says what it
has; both beat when they have nothing else to say.

| message | from | content |
|---|---|---|
| hello | both, first | JSON: protocol, roster, release, clock, from, to |
| holding | receiver: first, and after every sync | rounds, chain |
| frame | sender | round, size, chain before, chain after, first piece |
| piece | sender | the next bytes of the frame |
| notice | both; senders before frames that they made later | JSON: some party's start (`notices`) |
| beat | both, every few seconds | nothing |
| refusal | caller, last | why it hangs up; who answers says it in the status of the call |
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from dpcsgp.errors import WireError
from dpcsgp.federation.frame_log import CHAIN_BYTES
from dpcsgp.federation.journal import Holding

PROTOCOL: Final = 1
PIECE_BYTES: Final = 2**17  # of a frame; small, so that a thin link is not taken for a silent one
MOST_BYTES: Final = 2**20  # of any message
_MOST_HELLO: Final = 1024
_CLOCK_SECONDS: Final = 300.0  # certificates and end dates need clocks that agree roughly

_HOLDING = struct.Struct(f"<cQ{CHAIN_BYTES}s")
_FRAME = struct.Struct(f"<cQQ{CHAIN_BYTES}s{CHAIN_BYTES}s")
_HELLO_KIND, _HOLDING_KIND, _FRAME_KIND, _PIECE_KIND = b"h", b"a", b"f", b"p"
_REFUSAL_KIND: Final = b"r"
_NOTICE_KIND: Final = b"n"
BEAT: Final = b"b"
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
        f"{name} {getattr(theirs, name)!r} there, {getattr(mine, name)!r} here: {remedy}"
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


def is_beat(message: bytes) -> bool:
    """Tell whether a message says only that its sender is alive."""
    return message == BEAT


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
