"""The keys of the noise that a party shares with the others, from cards and notices.

The key of a pair comes from three things: both parties' lasting keys (in their cards), both fresh
keys (in their notices, see `notices`), and the roster's fingerprint. A party uses its own fresh key
from the first step on that it draws, and of its partner the newest notice that counts in the step.
So the two ends agree in every step from `valid_from` on; in the few steps between a restart and
`valid_from` the others still use the old key of the one that was restarted, and what it shares does
not cancel. The same happens where a hostile party withholds notices or tells different ones.

A stream never meets two sums of this party: its own fresh key is in every key, is in no file, and
serves every step once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.notices import Notice, known_everywhere_from
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.privacy.cancelling import noise_groups
from dpcsgp.privacy.pair_keys import KeyPairs
from dpcsgp.randomness import PairStreams

_LOG = logging.getLogger(__name__)


@final
class PartyPairs:
    """The partners of one party, as its private step sees them (`privacy.pair_noise.Partners`).

    Args:
        party: its folder, with its keys.
        roster: what all agreed on.
        board: everybody's notices.
        tell: called when there is a notice to pass on.
        max_lag: by how many rounds senders may be behind.
    """

    def __init__(
        self,
        party: PartyFolder,
        roster: Roster,
        board: NoticeBoard,
        tell: Callable[[], None],
        max_lag: int = 0,
    ) -> None:
        self._party, self._roster, self._board, self._tell = party, roster, board, tell
        self._max_lag = max_lag
        self._node = roster.node_of(party.name)
        groups = noise_groups(len(roster.parties))
        group = next(group for group in groups if self._node in group)
        self.partners = [node for node in group if node != self._node]
        self._keys: KeyPairs | None = None
        self._lasting: dict[int, bytes] = {}
        self._derived: dict[int, tuple[Notice | None, bytes]] = {}  # per partner: the last one used

    def announce(self, keys: KeyPairs, first_step: int) -> None:
        """Tell all others of this start; `first_step` is the first that it draws."""
        assert self._keys is None, "one object serves one start"
        self._keys = keys
        self._lasting = {node: self._lasting_secret(node) for node in self.partners}
        every = self._roster.config.algorithm.gossip_every
        valid_from = known_everywhere_from(
            self._roster.topology, self._node, first_step, every, self._max_lag
        )
        self._board.announce(self._party.key(), keys.halves[self._node], valid_from, keys.seeded)
        self._tell()

    def missing(self, step: int) -> list[int]:
        """Return the partners that have given no notice yet that counts in a step."""
        return [node for node in self.partners if self._board.valid_at(node, step) is None]

    def streams(self, step: int) -> PairStreams:
        """Return the streams of all pairs of this party in a step."""
        return PairStreams(
            {
                (min(self._node, other), max(self._node, other)): self._key(other, step)
                for other in self.partners
            }
        )

    def _key(self, other: int, step: int) -> bytes:
        notice = self._board.valid_at(other, step)
        used, key = self._derived.get(other, (None, b""))
        if not key or used != notice:
            key = self._derive(other, notice)
            self._derived[other] = (notice, key)
        return key

    def _derive(self, other: int, notice: Notice | None) -> bytes:
        assert self._keys is not None, "nobody announced this start"
        if notice is None:  # nothing to agree on: the same noise, which nobody subtracts
            return self._keys.lone_key(self._node, other)
        if notice.seeded != self._keys.seeded:
            _LOG.warning(
                "of %s and this party one runs with a seed: what they share does not cancel",
                self._roster.parties[other].name,
            )
        halves = {self._node: self._keys.halves[self._node], other: notice.half}
        return self._keys.pair_key(
            f"roster {self._roster.fingerprint}", self._node, other, halves, self._lasting[other]
        )

    def _lasting_secret(self, other: int) -> bytes:
        public = bytes.fromhex(self._roster.parties[other].noise_key)
        return self._party.noise_key().exchange(X25519PublicKey.from_public_bytes(public))

    def __repr__(self) -> str:  # keys must never reach a log or a traceback
        return f"PartyPairs(node={self._node})"
