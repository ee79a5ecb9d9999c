"""The roster: who takes part and what all of them agreed on, in one file.

It holds the parties' cards in the order of their nodes, the settings, the edges of the graph, the
shape of the data and a digest of the initial model. What a roster does not hold is each machine's
own business: device, key files, and the seed of private noise, which nobody may share.

A `Roster` that exists is consistent: cards are signed, names and keys differ, every edge can be
dialled by one of its ends, the graph is strongly connected. What takes computing (is gossip stable,
do budgets pay) is asked of `agreement.examine`.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.algorithms.methods import METHODS
from dpcsgp.config import Config, make_config
from dpcsgp.errors import ConfigError, TopologyError
from dpcsgp.federation.cards import Card
from dpcsgp.federation.data_shape import DataShape
from dpcsgp.federation.files import Fields, canonical, parse_table, read_text, toml_lines
from dpcsgp.federation.history import Chapter, check_history, spent_by, take_history
from dpcsgp.federation.roster_checks import (
    check_data,
    check_names,
    check_parties,
    check_settings,
    undialled,
    utc_today,
)
from dpcsgp.federation.words import as_words
from dpcsgp.graphs import Topology, from_edges, metropolis_weights
from dpcsgp.runs.design import build_topology
from dpcsgp.runs.earlier import Earlier
from dpcsgp.runs.facts import Facts
from dpcsgp.runtime.process_agreement import MACHINE_SETTINGS

FORMAT: Final = 1
MOST_PARTIES: Final = 256
# Settings that follow from the cards.
FROM_CARDS: Final = ("privacy.epsilon", "privacy.delta", "graph.num_nodes")
# Left out where it is 0, so that rosters of single examples have the fingerprint they always had.
_OF_PERSONS: Final = ("privacy", "max_rows_per_unit")
LISTED: Final = "roster"  # graph.edges_file of a graph whose edges stand in the roster itself
# Not of a federation: how a plan is tried beforehand.
NOT_SHARED: Final = "simulation"


@final
@dataclass(frozen=True)
class Roster:
    """Who takes part, and what all of them agreed on.

    Attributes:
        id: random name of the federation, the same in all versions of its roster.
        version: 1 for the first roster.
        ends: last day (UTC) on which it holds.
        parties: the cards; a party's place is the number of its node.
        config: the settings, with the cards' promises as budgets.
        data: shape of everybody's examples.
        edges: (sender, receiver) by node, ascending.
        initial_model: digest of the model that all start from.
        history: the versions before this one, oldest first.
    """

    id: str
    version: int
    ends: datetime.date
    parties: tuple[Card, ...]
    config: Config
    data: DataShape
    edges: tuple[tuple[int, int], ...]
    initial_model: str
    history: tuple[Chapter, ...] = ()

    def __post_init__(self) -> None:
        check_parties(self.parties, self.ends)
        self._check_history()
        check_settings(self.config)
        check_data(self.config, self.data)
        promises = [card.promised for card in self.parties]
        budgets = [self.config.privacy.epsilon, self.config.privacy.delta]
        assert budgets == [[p.epsilon for p in promises], [p.delta for p in promises]]
        self._check_edges()

    def _check_edges(self) -> None:
        """Refuse edges that nobody can dial, and a named graph that has other edges."""
        for sender, receiver in undialled(self.parties, self.edges):
            a, b = self.parties[sender].name, self.parties[receiver].name
            raise ConfigError(
                f"edge {a} -> {b}: both only call out, so neither can reach the other; give one of "
                "them an address, or drop the edge"
            )
        assert self.topology is not None  # builds it: refuses a graph that is not connected
        if self.config.graph.name != "edges":
            named = build_topology(self.config)
            if tuple(named.edges) != self.edges:
                raise TopologyError(
                    f"edges: not those of graph.name = {self.config.graph.name!r} with "
                    f"{len(self.parties)} parties; the roster was changed by hand: ask for it again"
                )

    def _check_history(self) -> None:
        """Refuse a history of another version, or one that leaves no step to be made."""
        check_history(self.history, self.version)
        every, steps = self.config.algorithm.gossip_every, self.config.algorithm.steps
        for chapter in self.history:
            if chapter.steps != chapter.rounds * every or chapter.steps >= steps:
                raise ConfigError(
                    f"history: round {chapter.rounds} is step {chapter.rounds * every} of {steps}, "
                    f"stated is step {chapter.steps}; a version takes effect before the last step"
                )

    @property
    def earlier(self) -> Earlier:
        """What was done under earlier versions, by the parties of this one."""
        if not self.history:
            return Earlier()
        spent = tuple(spent_by(self.history, card.name) for card in self.parties)
        return Earlier(self.history[-1].steps, spent)

    @cached_property
    def newcomers(self) -> tuple[str, ...]:
        """Parties that start from models that others hand over: joined now, or restored."""
        if not self.history:
            return ()
        last = self.history[-1]
        return tuple(
            card.name
            for card in self.parties
            if card.name not in last.parties or card.name in last.restored
        )

    @property
    def hands_over(self) -> bool:
        """Whether everybody's own model is the first message of this version."""
        return bool(self.newcomers) or bool(self.history and self.history[-1].hand_over)

    @cached_property
    def topology(self) -> Topology:
        """The graph with its weights, as all parties compute them."""
        graph = from_edges(len(self.parties), self.edges, name=self.config.graph.name)
        return metropolis_weights(graph) if self.config.method.undirected else graph

    @property
    def facts(self) -> Facts:
        """What is public about the data."""
        sizes = tuple(card.promised.num_examples for card in self.parties)
        unit = "person" if self.config.privacy.max_rows_per_unit else "example"
        return Facts(self.data.packed_shape, self.data.num_classes, sizes, unit=unit)

    def node_of(self, name: str) -> int:
        """Return the node of a party, or refuse a name that is not on the roster."""
        names = [card.name for card in self.parties]
        if name not in names:
            raise ConfigError(f"{name} is not on the roster; on it are {', '.join(names)}")
        return names.index(name)

    def expired(self, today: datetime.date | None = None) -> bool:
        """Say whether the last day is over."""
        return (today or utc_today()) > self.ends

    def content(self) -> dict[str, Any]:
        """Return all that is agreed on, as plain values.

        Signatures are left out: a card that is signed again says the same.
        """
        names = [card.name for card in self.parties]
        # A first version has none, so that its fingerprint is what it always was.
        history = {"history": [each.content() for each in self.history]} if self.history else {}
        return {
            "format": FORMAT,
            "id": self.id,
            "version": self.version,
            "ends": self.ends.isoformat(),
            "initial_model": self.initial_model,
            "data": self.data.content(),
            "settings": shared_settings(self.config),
            "edges": [[names[sender], names[receiver]] for sender, receiver in self.edges],
            "parties": [card.content() for card in self.parties],
            **history,
        }

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that is agreed on, hexadecimal: equal for equal agreements only."""
        return hashlib.sha256(b"dpcsgp roster\n" + canonical(self.content())).hexdigest()

    @property
    def words(self) -> str:
        """The fingerprint in words, to be compared on the telephone."""
        return as_words(self.fingerprint)

    def text(self) -> str:
        """Return the roster file: equal rosters have equal texts, but for signatures."""
        content = self.content()
        head = ("format", "id", "version", "initial_model")
        lines = [
            "# Roster of a federation of dpcsgp: look at it with `dpcsgp federation show`.",
            *toml_lines({key: content[key] for key in head}),
            f"ends = {self.ends.isoformat()}",
            "edges = [",
            *(f'  ["{sender}", "{receiver}"],' for sender, receiver in content["edges"]),
            *("]", "", "[data]", *self.data.lines()),
        ]
        for section, values in content["settings"].items():
            lines += ["", f"[settings.{section}]", *toml_lines(values)]
        for chapter in self.history:
            lines += ["", "[[history]]", *chapter.lines()]
        for card in self.parties:
            lines += ["", "[[parties]]", *card.lines()]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, where: str = "roster") -> Roster:
        """Read and check a roster; `where` names it in errors."""
        fields = Fields(parse_table(text, where), where)
        fields.format(FORMAT)
        cards = tuple(
            Card.take(Fields(entry, f"{where}, parties[{node}]"))
            for node, entry in enumerate(fields.listed("parties", MOST_PARTIES))
        )
        check_names(cards)
        version = fields.whole("version", 1, 2**31)
        roster = cls(
            id=fields.text("id", "[0-9a-f]{16}", "16 hexadecimal digits"),
            version=version,
            ends=fields.day("ends"),
            parties=cards,
            config=_take_settings(fields.take("settings"), cards, where),
            data=DataShape.take(fields.table("data")),
            edges=_take_edges(fields, cards),
            initial_model=fields.text("initial_model", "[0-9a-f]{64}", "64 hexadecimal digits"),
            history=take_history(fields, version, where),
        )
        fields.end()
        return roster

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read and check a roster file."""
        return cls.parse(read_text(path, "roster"), f"roster {path}")


def shared_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that a roster holds, by section."""
    left_out = {*MACHINE_SETTINGS, *FROM_CARDS}
    if not config.privacy.max_rows_per_unit:
        left_out.add(".".join(_OF_PERSONS))
    values = config.model_dump(mode="json")
    return {
        section: {key: value for key, value in table.items() if f"{section}.{key}" not in left_out}
        for section, table in values.items()
        if section != NOT_SHARED
    }


def complete_settings(values: Mapping[str, Any], cards: Sequence[Card]) -> Config:
    """Return all settings: those of a plan or a roster, with what follows from the cards."""
    sections = {name: dict(table) for name, table in values.items()}
    # A name would import a module of this machine: not on a stranger's word.
    name = sections.get("algorithm", {}).get("name", "dp-csgp")
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(
            f"algorithm.name = {str(name)[:60]!r}: a federation runs the package's own methods "
            f"only: {', '.join(method for method in METHODS if METHODS[method].sends)}"
        )
    promises = [card.promised for card in cards]
    privacy, graph = sections.setdefault("privacy", {}), sections.setdefault("graph", {})
    privacy["epsilon"] = [promise.epsilon for promise in promises]
    privacy["delta"] = [promise.delta for promise in promises]
    graph["num_nodes"] = len(cards)
    return make_config(sections)


def _take_settings(values: Any, cards: Sequence[Card], where: str) -> Config:
    """Return the settings in a roster, which must be complete and hold nothing of a machine."""
    tables = Fields(values, f"{where}, settings")
    given: dict[str, dict[str, Any]] = {}
    for section, known in shared_settings(Config()).items():
        table = tables.table(section)
        optional = [key for key in (_OF_PERSONS[1],) if section == _OF_PERSONS[0]]
        given[section] = {key: table.take(key) for key in (*known, *filter(table.has, optional))}
        table.end()
    tables.end()
    if given["graph"]["name"] == "edges":
        given["graph"]["edges_file"] = LISTED
    try:
        return complete_settings(given, cards)
    except ConfigError as error:
        raise ConfigError(f"{where}, settings: {error}") from None


def _take_edges(fields: Fields, cards: Sequence[Card]) -> tuple[tuple[int, int], ...]:
    """Return edges by node; they are written by name."""
    node = {card.name: number for number, card in enumerate(cards)}
    edges = []
    for edge in fields.listed("edges", MOST_PARTIES**2):
        pair = isinstance(edge, list) and len(edge) == 2
        if not pair or not all(isinstance(end, str) and end in node for end in edge):
            raise fields.wrong("edges", edge, "[sender, receiver], both on the roster")
        edges.append((node[edge[0]], node[edge[1]]))
    if edges != sorted(set(edges)) or any(sender == receiver for sender, receiver in edges):
        raise fields.wrong("edges", "...", "each edge once, in the order of the parties")
    return tuple(edges)
