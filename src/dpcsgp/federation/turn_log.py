"""What a party had heard before each of its own frames: on disk before the frame is released.

With lag this decides the frame, and it depends on when messages came. So it is written down, and a
start after a crash takes exactly the same: the frame that is computed anew is the released one.

A line is a round, the number of frames taken of each sender, the step before which the gradient in
the frame was begun (-1: it has none, or gradients are never late), the number of frames that were
there when it was sent, and a checksum that depends on roster and node. What a crash leaves half
written at the end is cut off: its frame was not released.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from dpcsgp.errors import JournalError

NO_GRADIENT: Final = -1
TURNS: Final = "turns.jsonl"


@final
class PartyTurn(NamedTuple):
    """What went into one own frame.

    Attributes:
        credits: how many frames of each sender, by ascending node, were taken before.
        gradient: the step before which its gradient was begun; -1: it has none, or gradients are
            never late.
        ahead: how many frames were there when it was sent, its own round included: they are in
            the model of the next gradient.
    """

    credits: tuple[int, ...]
    gradient: int
    ahead: tuple[int, ...]


@final
class TurnLog:
    """The turns of one party in one version of a roster, from its first round on, which is 0 here.

    Args:
        path: the file; made if missing.
        num_senders: how many are heard.
        origin: public bytes of roster and node; turns of another one are refused.

    Raises:
        JournalError: the file is damaged other than at its end, or of another roster or node.
    """

    def __init__(self, path: Path, num_senders: int, origin: bytes) -> None:
        self._path, self._senders, self._origin = path, num_senders, origin
        self._turns: list[PartyTurn] = []
        body = path.read_bytes() if path.exists() else b""
        self._end = self._read(body)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._end)

    @property
    def next(self) -> int:
        """The round that is recorded next."""
        return len(self._turns)

    def find(self, round_: int) -> PartyTurn | None:
        """Return the turn of a round; None if it has not come yet."""
        return self._turns[round_] if round_ < len(self._turns) else None

    def last_gradient_before(self, round_: int) -> int:
        """Return which gradient was put in last before a round; -1: none."""
        used = [turn.gradient for turn in self._turns[:round_]]
        return max(used, default=NO_GRADIENT)

    def num_gradients(self) -> int:
        """Return how many gradients were put in."""
        return sum(turn.gradient != NO_GRADIENT for turn in self._turns)

    def record(self, round_: int, turn: PartyTurn) -> None:
        """Bring a turn to the disk; one that is there must be the same.

        Raises:
            JournalError: another turn was recorded, it is not the next one, or the disk fails.
        """
        found = self.find(round_)
        if found is not None:
            if found != turn:
                raise JournalError(
                    f"{self._path}, round {round_}: {found} was recorded, now it would be {turn}; "
                    "nothing is sent. Restore checkpoint and journal from one copy"
                )
            return
        if round_ != self.next:
            raise JournalError(
                f"{self._path}: the next turn is that of round {self.next}, not {round_}; the "
                "checkpoint is newer than the journal, restore both from one copy"
            )
        line = _line(round_, turn, self._origin)
        try:
            written = 0
            while written < len(line):  # a disk that fills up takes less than it is given
                written += os.pwrite(self._file, line[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:
            raise JournalError(
                f"{self._path} cannot be written ({error.strerror}); free space. Nothing was sent"
            ) from error
        self._turns.append(turn)
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self, body: bytes) -> int:
        """Take all complete lines; return where they end."""
        end = 0
        for line in body.splitlines(keepends=True):
            turn = self._parsed(line, len(self._turns))
            if turn is None:
                if end + len(line) < len(body):
                    raise JournalError(
                        f"{self._path}, line {len(self._turns) + 1} is damaged or of another "
                        "roster or node; restore the journal from a backup"
                    )
                break
            self._turns.append(turn)
            end += len(line)
        return end

    def _parsed(self, line: bytes, round_: int) -> PartyTurn | None:
        try:
            number, credits, gradient, ahead, _ = json.loads(line)
            turn = PartyTurn(tuple(credits), gradient, tuple(ahead))
            right = number == round_ and len(credits) == len(ahead) == self._senders
        except (ValueError, TypeError, RecursionError):
            return None
        return turn if right and line == _line(round_, turn, self._origin) else None


def _line(round_: int, turn: PartyTurn, origin: bytes) -> bytes:
    content: Sequence[object] = (round_, list(turn.credits), turn.gradient, list(turn.ahead))
    text = json.dumps(content).encode() + origin
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return json.dumps([*content, digest]).encode() + b"\n"
