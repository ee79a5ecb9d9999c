"""A party's network that goes on while its senders are at most `max_lag` rounds behind.

Before an own frame it waits only for those that are further behind; what has come is taken, of
rounds before the own one, and written down in the turn log before the frame is released. A start
after a crash takes what the log says, in the same order, and so computes the same frames.

Rounds are those of the whole plan here; journal and turn log begin anew in every version of the
roster. A version that ends before its plan ends in step: what is under way then is waited for and
taken (`algorithms.lagged_dp_csgp.settle`), so frames and turns alone decide the model. Turns after
that round, of a party that had gone further, count for nothing.

Legend: S senders, B bytes of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpcsgp.errors import JournalError
from dpcsgp.federation.archive import Archive, Ended
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.federation.transport_ends import Timing
from dpcsgp.federation.turn_log import NO_GRADIENT, TURNS, PartyTurn, TurnLog
from dpcsgp.graphs import Topology
from dpcsgp.graphs.lag import edges_into, is_late


class LaggedPartyNetwork(PartyNetwork):
    """The network of one party with lag; arguments as in `PartyNetwork`, and three more.

    Args:
        max_lag: rounds that this party may be ahead of those it hears.
        first: the first round of this version of the roster.
        hands_over: whether the first frame is the own model, before that round.
    """

    def __init__(
        self,
        own: Self,
        peers: Iterable[Peer],
        topology: Topology,
        roster_digest: bytes,
        folder: Path,
        size_of_round: Callable[[int], int],
        steps: int,
        patience: float | None = None,
        max_lag: int = 1,
        timing: Timing = Timing(),
        notices: NoticeBoard | None = None,
        archives: Sequence[Archive] = (),
        over: Mapping[str, str] | None = None,
        ended: Ended | None = None,
        first: int = 0,
        hands_over: bool = False,
    ) -> None:
        self.max_lag = max_lag
        self._first, self._handed = first, int(hands_over)
        self._shift = first - self._handed  # from a number of the journal to a round
        self._end = None if ended is None else ended.frames + self._shift
        self._order = [sender for _, sender in edges_into(topology, [own.node])]
        self._taken: tuple[int, ...] = ()
        self._ahead: tuple[int, ...] = ()
        self._gradient = NO_GRADIENT  # in the next frame
        super().__init__(
            own, peers, topology, roster_digest, folder, size_of_round, steps, patience, timing,
            notices, archives, over, ended,
        )  # fmt: skip
        try:  # only now is the folder this process's own
            origin = roster_digest + own.node.to_bytes(8, "little")
            self.turns = TurnLog(folder / TURNS, len(self._order), origin)
            # A turn is written before its frame, and a frame before the next turn.
            sent = self._journal.written - self._handed
            if not 0 <= self.turns.next - sent <= 1:
                self.turns.close()
                raise JournalError(
                    f"{folder / TURNS} has {self.turns.next} turns, but frames of {max(sent, 0)} "
                    "rounds were released; restore the journal as a whole"
                )
        except BaseException:
            super().close()
            raise

    def credits(self, round_: int, in_step: Sequence[bool]) -> tuple[int, ...]:
        """Say how many frames of each sender are taken before the own frame of a round.

        Waits for senders that are too far behind; after a crash, for what was taken before.

        Raises:
            SilentPeerError: patience is over; names the party.
            WaitStoppedError: `stop` was called.
        """
        known = self.turn_of(round_)
        if known is not None:
            # What was there right after the frame too: it had come, and may be lost on this disk.
            least = map(max, known.credits, known.ahead)
        else:
            lag = 0 if in_step[0] else self.max_lag
            least = [max(round_ - lag, self._first)] * len(self._order)
        needed = dict(zip(self._order, least, strict=True))
        last = max(needed.values(), default=0) - 1
        self._wait(lambda: self._short_of(needed), f"round {last}")
        self._taken = self._here(round_) if known is None else known.credits
        return self._taken

    def ahead(self, round_: int) -> tuple[int, ...]:
        """Say how many frames of each sender are here, the round of the own frame included."""
        known = self.turn_of(round_)
        self._ahead = self._here(round_ + 1) if known is None else known.ahead
        return self._ahead

    def _here(self, most: int) -> tuple[int, ...]:
        return tuple(min(self._arrived(sender), most) for sender in self._order)

    def frames_of(self, round_: int, senders: Sequence[int]) -> Tensor:
        """Return frames (S, B) of a round that have come."""
        rows = [self._journal.frame_of(sender, round_ - self._shift) for sender in senders]
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)

    def send(self, frames_NB: Tensor) -> None:
        """Write the turn down, then release the own frame; nobody's frame is waited for.

        Raises:
            RestoredBackupError: others hold frames that this journal does not know.
            JournalError: another frame or turn is on disk for this round, or the disk is full.
        """
        round_ = self.traffic.rounds
        frame = self._checked(round_, frames_NB)
        # Receivers first: a party that was restored from a backup must not write a new turn.
        if round_ >= self._journal.released:
            self.meet_receivers()
        turn = PartyTurn(self._taken, self._gradient, self._ahead)
        self.turns.record(round_ - self._handed, turn)
        self._gradient = NO_GRADIENT
        self._release(round_, frame)
        self.traffic.count(len(frame))

    def forget_before(self, round_: int) -> None:
        """Drop journaled frames; what a checkpoint of this round has not taken yet is kept."""
        super().forget_before(max(round_ - self.max_lag - 1, 0))

    def close(self) -> None:
        """End all lines and close the journal."""
        super().close()
        self.turns.close()

    def turn_of(self, round_: int) -> PartyTurn | None:
        """Return the recorded turn of a round; None: it has not come, or the version ended."""
        if self._end is not None and round_ >= self._end:
            return None
        return self.turns.find(round_ - self._first)

    # Late gradients.

    def last_gradient_before(self, round_: int) -> int:
        """Return which gradient was put in last in this version before a round; -1: none."""
        last = round_ if self._end is None else min(round_, self._end)
        return self.turns.last_gradient_before(last - self._first)

    def put_in(self, gradient: int) -> None:
        """Say which gradient is in the next frame; `NO_GRADIENT`: none."""
        self._gradient = gradient

    def await_or_late(self, round_: int, ready: Callable[[], bool]) -> bool:
        """Wait for an own gradient; say whether it is ready, or the own frame is late.

        Late is by what others have sent alone: see `graphs.lag.is_late`.

        Raises:
            WaitStoppedError: `stop` was called.
        """
        last = self._steps if self._end is None else min(self._steps, self._end)
        with self._journal.changed:
            while not ready():
                self._raise_if_stopped("the own gradient")
                if is_late(map(self._arrived, self._order), round_, self.max_lag, last):
                    return False
                self._journal.changed.wait(1.0)
        return True

    def wake(self) -> None:
        """End a wait for an own gradient; any thread may call it."""
        with self._journal.changed:
            self._journal.changed.notify_all()

    def _arrived(self, sender: int) -> int:
        """Return the round of a sender that comes next."""
        return self._journal.awaited(sender).rounds + self._shift

    def _short_of(self, needed: dict[int, int]) -> list[Peer]:
        """Return senders of whom fewer frames have come than are needed."""
        return [
            peer
            for node, peer in self._neighbours.senders.items()
            if self._arrived(node) < needed[node]
        ]
