"""Secrets that two nodes share: X25519 between every pair, fresh at every start of either.

A node's key pair and its nonce are drawn at its start. The key of a pair comes from X25519 and
HKDF over the run, both nodes, both public keys and both nonces, so that it is new as soon as one
of the two has started anew, whatever a hostile partner or an old backup sends again. Whoever plays
the messages back is left with another key, and noise that does not cancel.

In a federation the parties' lasting keys, which stand in their cards, enter beside the fresh ones:
a pair's key then needs both, and who steals the lasting ones later knows no noise of the past.

Reference: RFC 7748 (X25519), RFC 5869 (HKDF).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpcsgp.errors import WireError
from dpcsgp.privacy.cancelling import noise_groups
from dpcsgp.randomness import PairStreams, PrivateRandomness

_HEX = re.compile("[0-9a-f]{64}")
_INFO = b"dpcsgp shared noise 1"
_INFO_LONE = b"dpcsgp lone noise 1"


@final
@dataclass(frozen=True)
class PublicHalf:
    """What a node tells the others at its start: a public key and a nonce, 32 bytes each."""

    public: bytes
    nonce: bytes

    def as_json(self) -> list[str]:
        """Return both as text."""
        return [self.public.hex(), self.nonce.hex()]

    @classmethod
    def from_json(cls, node: int, value: Any) -> PublicHalf:
        """Read what a node told; it came over the network."""
        match value:
            case [str(public), str(nonce)] if _HEX.fullmatch(public) and _HEX.fullmatch(nonce):
                return cls(bytes.fromhex(public), bytes.fromhex(nonce))
            case _:
                raise WireError(
                    f"node {node} told no valid key for shared noise; run the same release on all "
                    "machines"
                )


@final
class KeyPairs:
    """The key pairs of the hosted nodes, from their secret streams.

    Streams are fresh at every start, so the key pairs are; with `privacy.seed` they repeat.
    """

    def __init__(self, random: PrivateRandomness) -> None:
        self.seeded = random.reproducible
        self._private: dict[int, X25519PrivateKey] = {}
        self._lone: dict[int, bytes] = {}
        self.halves: dict[int, PublicHalf] = {}
        for row, node in enumerate(random.nodes):
            secret = random.row_bytes("pair key", 0, row, 32).tobytes()
            nonce = random.row_bytes("pair nonce", 0, row, 32).tobytes()
            self._lone[node] = random.row_bytes("lone pairs", 0, row, 32).tobytes()
            self._private[node] = X25519PrivateKey.from_private_bytes(secret)
            public = self._private[node].public_key().public_bytes_raw()
            self.halves[node] = PublicHalf(public, nonce)

    def streams(self, run_id: str, halves: Mapping[int, PublicHalf]) -> PairStreams:
        """Return the streams of all pairs of which one end is hosted here.

        Args:
            run_id: public name of the run.
            halves: what every node of the run told at its start.

        Raises:
            WireError: a node told a public key that gives no secret.
        """
        keys: dict[tuple[int, int], bytes] = {}
        for group in noise_groups(len(halves)):
            for own in (node for node in group if node in self._private):
                # The pair is known by its smaller node; both ends hosted: derived once.
                for other in (node for node in group if node != own):
                    pair = (min(own, other), max(own, other))
                    if pair not in keys:
                        keys[pair] = self.pair_key(run_id, own, other, halves)
        return PairStreams(keys)

    def pair_key(
        self,
        run_id: str,
        own: int,
        other: int,
        halves: Mapping[int, PublicHalf],
        lasting: bytes = b"",
    ) -> bytes:
        """Return the 32 secret bytes of one pair.

        Args:
            run_id: public name of the run, or of the roster.
            own: the node that is hosted here.
            other: its partner.
            halves: what both told at their start.
            lasting: a further secret of the two, from keys that outlive a start.

        Raises:
            WireError: the partner told a public key that gives no secret.
        """
        # The run's name is drawn anew by every run, and seeded runs repeat.
        run_id, lasting = ("seeded", b"") if self.seeded else (run_id, lasting)
        try:
            public = X25519PublicKey.from_public_bytes(halves[other].public)
            secret = self._private[own].exchange(public)
        except ValueError:  # a point of small order
            raise WireError(
                f"node {other} told a public key for shared noise that gives no secret; it is "
                "broken or hostile: leave it out of the run"
            ) from None
        salt = _transcript(run_id, (own, other), halves)
        return HKDF(SHA256(), 32, salt, _INFO).derive(secret + lasting)

    def lone_key(self, own: int, other: int) -> bytes:
        """Return a key for noise that a node adds in place of what it cannot agree on."""
        return HKDF(SHA256(), 32, other.to_bytes(4, "big"), _INFO_LONE).derive(self._lone[own])


def _transcript(run_id: str, pair: Sequence[int], halves: Mapping[int, PublicHalf]) -> bytes:
    """Return the run and both ends, the smaller node first; every part has a fixed length or its
    length before it."""
    name = run_id.encode()
    parts = [len(name).to_bytes(4, "big"), name]
    for node in sorted(pair):
        parts += [node.to_bytes(4, "big"), halves[node].public, halves[node].nonce]
    return b"".join(parts)
