"""Parties that share noise, without a network: real keys, cards, roster and notices on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from made_parties import PLAN, cards_of, make_parties, plan_of

from dpcsgp.federation.founding import found
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_pairs import PartyPairs
from dpcsgp.federation.roster import Roster
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.privacy.shared_noise import SharedNoise
from dpcsgp.randomness import PrivateRandomness

STEPS, DIM = 40, 50
SHARED_PLAN = PLAN.replace("steps = 5", f"steps = {STEPS}") + "[privacy]\nmax_colluders = 1\n"


@dataclass
class Member:
    """One party; `start` is a start of its process, `path` its notices on disk."""

    roster: Roster
    law: SharedNoise
    party: PartyFolder
    path: Path
    board: NoticeBoard = field(init=False)
    noise: PairNoise = field(init=False)
    end: int = 0

    @property
    def node(self) -> int:
        return self.roster.node_of(self.party.name)

    def start(
        self,
        first_step: int = 0,
        paid: int = 0,
        spent: Sequence[tuple[ReleaseEvent, int]] = (),
        seed: int | None = None,
    ) -> Member:
        """Start, or start anew: nothing but the file is left of the start before."""
        self.board = NoticeBoard(self.path, self.roster, self.node)
        nodes = [self.node]
        random = PrivateRandomness.fresh(nodes)
        if seed is not None:
            random = PrivateRandomness.seeded(seed, nodes)
        promises = [(card.promised.epsilon, card.promised.delta) for card in self.roster.parties]
        pairs = PartyPairs(self.party, self.roster, self.board, lambda: None)
        self.noise = PairNoise(self.law, nodes, random, "a run", promises, pairs)
        told = {self.node: list(spent)}
        (self.end,) = self.noise.join(first_step, STEPS, told, lambda name, value: [value], [paid])
        return self

    def counts(self, step: int) -> np.ndarray:
        return self.noise.counts(step, DIM)[0]


def members(root: Path, names: str = "abcd", plan: str = SHARED_PLAN) -> list[Member]:
    """Make parties on a directed ring; none has started."""
    parties = make_parties(root, names=names)
    agreement = found(plan_of(root, plan), cards_of(parties))
    law = agreement.design.mechanism.shared
    assert law is not None and law.shared > 0
    by_node = sorted(parties, key=lambda party: agreement.roster.node_of(party.name))
    return [Member(agreement.roster, law, party, party.path / "notices.json") for party in by_node]


def flood(all_members: Iterable[Member]) -> None:
    """Pass on all notices, from everybody to everybody."""
    known = list(all_members)
    for teller in known:
        for hearer in known:
            for body in teller.board.after(0)[1]:
                hearer.board.accept(body)


def left_over(all_members: Sequence[Member], step: int) -> np.ndarray:
    """Return what does not cancel in the sum of all shared noise of a step."""
    return np.sum([member.counts(step) for member in all_members], axis=0)
