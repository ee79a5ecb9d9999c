"""From a plan and cards to the first roster of a federation; all that can be refused is refused."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from dpcsgp.config import Config, per_node
from dpcsgp.errors import ConfigError
from dpcsgp.federation.agreement import (
    Agreement,
    declared_shape,
    examine,
    initial_module,
    model_digest,
)
from dpcsgp.federation.cards import Card
from dpcsgp.federation.data_shape import DataShape
from dpcsgp.federation.files import Fields, parse_table, read_text
from dpcsgp.federation.roster import (
    LISTED,
    MOST_PARTIES,
    NOT_SHARED,
    Roster,
    complete_settings,
)
from dpcsgp.federation.roster_checks import (
    OWN_DATA,
    check_parties,
    check_settings,
    undialled,
    utc_today,
)
from dpcsgp.graphs import star
from dpcsgp.runs.design import build_topology
from dpcsgp.runs.user_settings import described_model
from dpcsgp.runtime.process_agreement import MACHINE_SETTINGS

YEAR: Final = datetime.timedelta(days=365)
LONGEST: Final = datetime.timedelta(days=365 * 20)


@final
@dataclass(frozen=True)
class Plan:
    """A plan file: settings as written, and the shape of the data if they are the parties' own."""

    values: dict[str, Any]
    data: DataShape | None

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan: settings as `dpcsgp run` takes them, and a table [data] for own data."""
        values = parse_table(read_text(path, "plan"), f"plan {path}")
        shape = values.pop("data", None)
        for section, table in values.items():
            Fields(table, f"plan {path}, [{section}]")  # refuses what is no table
        data = None if shape is None else DataShape.take(Fields(shape, f"plan {path}, data"))
        return cls(values, data)

    def with_model(self, model: nn.Module) -> Plan:
        """Name a model of the parties' own."""
        task = {**self.values.get("task", {}), "model": described_model(model)}
        return replace(self, values={**self.values, "task": task})

    def notes(self, cards: Sequence[Card]) -> list[str]:
        """Say which values of the plan the cards replace, and what nobody will compare."""
        privacy = self.values.get("privacy", {})
        unnamed = [
            "[data] has no columns: those of the parties will be compared by number only, and a "
            "table in another order would be trained on as it is; list their names "
            "(`dpcsgp federation columns FILE.csv` writes the lines)"
        ]
        replaced = [
            f"privacy.{key} = {privacy[key]} of the plan is replaced by what each card promises"
            for key in ("epsilon", "delta")
            if key in privacy
            and per_node(privacy[key], len(cards))
            != tuple(getattr(card.promised, key) for card in cards)
        ]
        return replaced + (unnamed if self.data is not None and self.data.lacks_columns else [])


def found(
    plan: Plan,
    cards: Sequence[Card],
    ends: datetime.date | None = None,
    model: nn.Module | None = None,
) -> Agreement:
    """Make the first roster of a federation, and compute what it means.

    Args:
        plan: the settings.
        cards: of all parties, in the order of their nodes.
        ends: last day; None: a year from now.
        model: the parties' own, at its start; None: the one that the plan names.

    Raises:
        ConfigError: something cannot work; the message names it and a remedy.
    """
    ends = ends or utc_today() + YEAR
    if not utc_today() <= ends <= utc_today() + LONGEST:
        raise ConfigError(f"--ends {ends}: expected a day from today to 20 years from now")
    if len(cards) > MOST_PARTIES:
        raise ConfigError(f"{len(cards)} cards: a roster takes at most {MOST_PARTIES}")
    check_parties(cards, ends)
    # Settings, shape of the data, the model they give, and the edges that the graph has.
    config = _settings(plan if model is None else plan.with_model(model), cards)
    check_settings(config)
    data = plan.data or declared_shape(config)
    edges = tuple(build_topology(config).edges)
    if config.graph.name == "edges":
        config = _with_graph(config, "edges")
    digest = model_digest(initial_module(config, data, model))
    draft = _Draft(secrets.token_hex(8), ends, config, data, digest, model)
    if closed := undialled(cards, edges):
        raise ConfigError(_explain(draft, cards, edges, closed))
    return examine(draft.roster(cards, edges), model)


@final
@dataclass(frozen=True)
class _Draft:
    """A roster without its graph."""

    id: str
    ends: datetime.date
    config: Config
    data: DataShape
    initial_model: str
    model: nn.Module | None

    def roster(self, cards: Sequence[Card], edges: Iterable[tuple[int, int]]) -> Roster:
        return Roster(
            self.id, 1, self.ends, tuple(cards), self.config, self.data, tuple(edges),
            self.initial_model,
        )  # fmt: skip


def _settings(plan: Plan, cards: Sequence[Card]) -> Config:
    """Return the settings of the federation; refuse what contradicts the cards or gives secrets."""
    values, own = plan.values, plan.values.get("task", {}).get("name") == "own"
    stated = values.get("graph", {}).get("num_nodes", len(cards))
    if stated != len(cards):
        raise ConfigError(
            f"graph.num_nodes = {stated}: there are {len(cards)} cards; give one card per node, "
            "or leave the setting out"
        )
    if values.get("privacy", {}).get("seed") is not None:
        raise ConfigError(
            "privacy.seed: whoever knows the seed can subtract the noise, and everybody reads the "
            "roster; leave it out"
        )
    if own != (plan.data is not None):
        raise ConfigError(
            '[data] with input_shape and num_classes goes with task.name = "own", and only with it;'
            " built-in data sets have a shape of their own"
        )
    # Of a machine nothing enters the roster, but for the file that the edges are read from.
    kept = {
        section: {
            key: value
            for key, value in table.items()
            if f"{section}.{key}" not in MACHINE_SETTINGS or key == "edges_file"
        }
        for section, table in values.items()
        if section != NOT_SHARED
    }
    if own:
        kept["task"] = {**OWN_DATA, **kept["task"]}
    return complete_settings(kept, cards)


def _with_graph(config: Config, name: str, order: Sequence[int] | None = None) -> Config:
    """Return the settings with another graph, and perhaps another order of the nodes."""
    graph = config.graph.model_copy(
        update={"name": name, "edges_file": LISTED if name == "edges" else ""}
    )
    # What is stated per node moves with the nodes.
    privacy = config.privacy.model_copy(
        update={
            key: [value[node] for node in order or range(len(value))]
            for key, value in config.privacy.model_dump().items()
            if isinstance(value, list)
        }
    )
    return config.model_copy(update={"graph": graph, "privacy": privacy})


def _explain(
    draft: _Draft,
    cards: Sequence[Card],
    edges: Sequence[tuple[int, int]],
    closed: Sequence[tuple[int, int]],
) -> str:
    """Name the edges that nobody can dial, and propose a graph that works."""
    names = [card.name for card in cards]
    listed = ", ".join(f"{names[sender]} -> {names[receiver]}" for sender, receiver in closed)
    problem = (
        f"graph.name = {draft.config.graph.name!r}: both ends of these edges only call out, so "
        f"nobody can dial: {listed}"
    )
    if all(card.address is None for card in cards):
        return f"{problem}. No party can be called: at least one needs an address"
    kept = [edge for edge in edges if edge not in set(closed)]
    # Dropping the edges changes least; it must leave a graph that works.
    if _works(replace(draft, config=_with_graph(draft.config, "edges")), cards, kept):
        lines = "\n".join(f"{sender} {receiver}" for sender, receiver in kept)
        return (
            f'{problem}. Without them the graph works: set graph.name = "edges" and '
            'graph.edges_file = "edges.txt" in the plan, with these lines in edges.txt:\n' + lines
        )
    # A star around a party that can be called has no other edges.
    middle = next(node for node, card in enumerate(cards) if card.address is not None)
    order = [middle, *(node for node in range(len(cards)) if node != middle)]
    around = replace(draft, config=_with_graph(draft.config, "star", order))
    if _works(around, [cards[node] for node in order], star(len(cards)).edges):
        return (
            f'{problem}. A star works: set graph.name = "star" in the plan and give the card of '
            f"{names[middle]}, who can be called, first"
        )
    return f"{problem}. Give more parties an address"


def _works(draft: _Draft, cards: Sequence[Card], edges: Sequence[tuple[int, int]]) -> bool:
    """Say whether a roster with this graph would be taken."""
    try:
        examine(draft.roster(cards, edges), draft.model)
    except ConfigError:
        return False
    return True
