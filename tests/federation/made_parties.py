"""Parties made for tests: folders, cards, a plan and a roster, with real keys."""

from __future__ import annotations

from pathlib import Path

from dpcsgp.federation.agreement import Agreement
from dpcsgp.federation.cards import Card, Promise
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.party_folder import PartyFolder

PROMISE = Promise(90, 2.0, 1e-3)
PLAN = """
[task]
name = "own"
model = "logistic"

[data]
input_shape = [4]
num_classes = 3

[algorithm]
steps = 5

[graph]
name = "directed_ring"
"""


def make_parties(root: Path, closed: str = "", names: str = "abc") -> list[PartyFolder]:
    """Make one party per letter; those in `closed` only call out."""
    return [
        PartyFolder.create(
            root / letter,
            f"lab-{letter}",
            None if letter in closed else f"{letter}.example:7400",
            PROMISE,
        )
        for letter in names
    ]


def cards_of(parties: list[PartyFolder]) -> list[Card]:
    return [party.card for party in parties]


def plan_of(root: Path, text: str = PLAN) -> Plan:
    path = root / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return Plan.load(path)


def federation(root: Path, closed: str = "", names: str = "abc") -> Agreement:
    return found(plan_of(root), cards_of(make_parties(root, closed, names)))
