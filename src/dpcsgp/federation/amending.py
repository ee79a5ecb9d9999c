"""From a roster to its next version: parties leave, join or come back, settings change.

`amend` makes a new version and computes what it means, as `founding.found` does for the first one.
`check_succession` is for those who were there: whoever took part in the version before computes
from its own copy what the new one says about it, so that nobody can understate what was released.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from torch import nn

from dpcsgp.config import Config, change_config
from dpcsgp.errors import ConfigError
from dpcsgp.federation.agreement import Agreement, examine
from dpcsgp.federation.cards import Card
from dpcsgp.federation.differences import Difference
from dpcsgp.federation.history import Chapter
from dpcsgp.federation.roster import (
    FROM_CARDS,
    LISTED,
    Roster,
    complete_settings,
    shared_settings,
)
from dpcsgp.federation.roster_checks import check_parties, check_settings
from dpcsgp.runs.design import build_topology
from dpcsgp.runtime.process_agreement import MACHINE_SETTINGS

_MOST_UNKNOWN: Final = 0.05  # share of a model, by the law of gossip, when the plan ends

# What the states, ledgers and counts of all versions have in common.
FIXED: Final = (
    "task.",
    "run.seed",
    "algorithm.name",
    "algorithm.gossip_every",
    "algorithm.num_blocks",
    "privacy.sampling",
    # A promise against more colluders would not hold for what was released before.
    "privacy.max_colluders",
    # Nor would one to whole persons, if examples were promised it before.
    "privacy.max_rows_per_unit",
)


@final
@dataclass(frozen=True)
class Amendment:
    """What is to change.

    Attributes:
        at_round: the new version takes effect after so many rounds, counted from the very first.
        leave: parties that leave; they make the rounds before with all others.
        gone: parties that will never be heard again; nobody waits for them.
        join: cards of new parties.
        replace: new cards of parties that stay.
        rejoin: parties that lost what they had released, for example by an old backup.
        settings: as `section.key=value`.
        ends: last day; None: as before.
    """

    at_round: int
    leave: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    join: tuple[Card, ...] = ()
    replace: tuple[Card, ...] = ()
    rejoin: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    ends: datetime.date | None = None


def amend(old: Roster, wanted: Amendment, model: nn.Module | None = None) -> Agreement:
    """Make the next version of a roster, and compute what it means.

    Args:
        old: the version that is in force.
        wanted: what is to change.
        model: the parties' own, at its start; None: the one that the roster names.

    Raises:
        ConfigError: something cannot work; the message names it and a remedy.
    """
    cards, ends = _cards(old, wanted), wanted.ends or old.ends
    check_parties(cards, ends)
    _check_round(old, wanted.at_round)
    config = _settings(old, cards, wanted.settings)
    check_settings(config)
    edges = _edges(old, cards, config)
    if config.graph.name == "edges":
        config = change_config(config, {"graph.edges_file": LISTED})
    before = examine(old, model)
    new = Roster(
        old.id, old.version + 1, ends, tuple(cards), config, old.data, edges, old.initial_model,
        (*old.history, _chapter(before, wanted.at_round, _is_cut(old, wanted), wanted.rejoin)),
    )  # fmt: skip
    check_succession(before, new)
    found = examine(new, model)
    if not new.hands_over and _ends_apart(found, wanted.at_round):
        last = replace(new.history[-1], hand_over=True)
        found = examine(replace(new, history=(*new.history[:-1], last)), model)
    return found


def _ends_apart(new: Agreement, at_round: int) -> bool:
    """Say whether too few rounds are left for copies that begin at zero.

    What receivers do not know of a model yet shrinks by the mixing radius in every round. Models
    that are handed over cost as much as many rounds, so they are only where it matters.
    """
    radius, config = new.design.mixing_radius, new.roster.config
    if config.compression.spec == "none":  # the first message says it all
        return False
    left = new.design.rounds + config.algorithm.polish_rounds - at_round
    return radius is not None and radius**left > _MOST_UNKNOWN


def _is_cut(old: Roster, wanted: Amendment) -> bool:
    """Say whether some party can make no more rounds of the old version.

    One with another key cannot: the others know it by its old certificate.
    """
    known = {card.name: card.certificate_pem for card in old.parties}
    rekeyed = any(card.certificate_pem != known[card.name] for card in wanted.replace)
    return bool(wanted.gone or wanted.rejoin or rekeyed)


def _chapter(old: Agreement, rounds: int, cut: bool, restored: tuple[str, ...]) -> Chapter:
    """Return what a new version says about the one before it."""
    roster, mechanism = old.roster, old.design.mechanism
    return Chapter(
        fingerprint=roster.fingerprint,
        rounds=rounds,
        steps=rounds * roster.config.algorithm.gossip_every,
        cut=cut,
        restored=restored,
        parties=tuple(card.name for card in roster.parties),
        releases=tuple(mechanism.event(node) for node in range(len(roster.parties))),
    )


def check_succession(old: Agreement, new: Roster) -> None:
    """Refuse a roster that is not the next version of another, or tells its history otherwise.

    Raises:
        ConfigError: names every field that is not as it must be.
    """
    before = old.roster
    if (new.id, new.version) != (before.id, before.version + 1) or not new.history:
        raise ConfigError(
            f"version {new.version} of federation {new.id} does not follow version "
            f"{before.version} of federation {before.id}, which this party has; ask for the "
            "versions in between"
        )
    last = new.history[-1]
    right_one = replace(
        _chapter(old, last.rounds, last.cut, last.restored), hand_over=last.hand_over
    )
    expected = [each.content() for each in (*before.history, right_one)]
    faults = [
        Difference(f"history of version {place}, {key}", right[key], told.get(key))
        for place, (right, told) in enumerate(
            zip(expected, (each.content() for each in new.history), strict=True), start=1
        )
        for key in right
        if right[key] != told.get(key)
    ]
    faults += _fixed_faults(before, new)
    if faults:
        raise ConfigError(
            f"version {new.version} does not fit version {before.version}, which this party has: "
            f"{'; '.join(map(str, faults))} (right / stated); have it made with `dpcsgp federation "
            "amend`"
        )


def _fixed_faults(old: Roster, new: Roster) -> list[Difference]:
    """Return what no version may change."""
    one, two = _fixed(old), _fixed(new)
    faults = [
        Difference(key, one.get(key), two.get(key))
        for key in {**one, **two}
        if one.get(key) != two.get(key)
    ]
    deltas = {card.name: card.promised.delta for card in old.parties}
    # The header of a ledger names the delta at which its eps is told.
    faults += [
        Difference(f"party {card.name}, delta", deltas[card.name], card.promised.delta)
        for card in new.parties
        if card.promised.delta != deltas.get(card.name, card.promised.delta)
    ]
    shares = old.config.task.name != "own"
    if shares and [c.name for c in old.parties] != [c.name for c in new.parties]:
        raise ConfigError(
            f'task.name = "{old.config.task.name}": every party has its share of that data set by '
            "its place among all, so nobody can leave or join: examples would change hands; "
            'have a federation made with task.name = "own"'
        )
    return faults


def _fixed(roster: Roster) -> dict[str, Any]:
    flat = {
        f"{section}.{key}": value
        for section, table in shared_settings(roster.config).items()
        for key, value in table.items()
    }
    kept = {f"settings.{key}": value for key, value in flat.items() if key.startswith(FIXED)}
    return {**kept, "data": roster.data.content(), "initial_model": roster.initial_model}


def _cards(old: Roster, wanted: Amendment) -> list[Card]:
    """Return the cards of the new version: those that stay in their order, then new ones."""
    names = [card.name for card in old.parties]
    out = (*wanted.leave, *wanted.gone)
    for option, given in (
        ("--leave", wanted.leave),
        ("--gone", wanted.gone),
        ("--rejoin", wanted.rejoin),
        ("--replace", [card.name for card in wanted.replace]),
    ):
        for name in given:
            if name not in names or list(given).count(name) > 1:
                raise ConfigError(
                    f"{option} {name}: expected a party of the roster, once; on it are "
                    f"{', '.join(names)}"
                )
    if both := {*wanted.leave} & {*wanted.gone}:
        raise ConfigError(
            f"--leave and --gone {', '.join(sorted(both))}: a party leaves with its last rounds, "
            "or is gone and nobody waits for them; give one of the two"
        )
    if both := {*out} & {*wanted.rejoin, *(card.name for card in wanted.replace)}:
        raise ConfigError(f"{', '.join(sorted(both))}: a party leaves or stays, not both")
    if known := {*names} & {card.name for card in wanted.join}:
        raise ConfigError(
            f"--join {', '.join(sorted(known))}: on the roster already; --replace takes the new "
            "card of a party that stays"
        )
    replaced = {card.name: card for card in wanted.replace}
    stay = [replaced.get(card.name, card) for card in old.parties if card.name not in out]
    return [*stay, *wanted.join]


def _check_round(old: Roster, at_round: int) -> None:
    first, last = old.history[-1].rounds if old.history else 0, last_round(old)
    if not first <= at_round <= last:
        raise ConfigError(
            f"--at-round {at_round}: expected a round from {first}, where version {old.version} "
            f"began, to {last}, before the last step"
        )


def last_round(old: Roster) -> int:
    """Return the last round at which another version can follow: before the last step."""
    algorithm = old.config.algorithm
    return (algorithm.steps - 1) // algorithm.gossip_every


def _settings(old: Roster, cards: Sequence[Card], changes: Sequence[str]) -> Config:
    """Return the old settings with changes; per-node lists follow those who stay."""
    for change in changes:
        name = change.partition("=")[0].strip()
        if name.startswith(FIXED) or name in FROM_CARDS:
            where = "is on the cards" if name in FROM_CARDS else "is the same in all versions"
            raise ConfigError(f"--set {change}: {name} {where}; found a new federation for another")
        if name in MACHINE_SETTINGS and name != "graph.edges_file":
            raise ConfigError(f"--set {change}: {name} is each machine's own business")
    values = shared_settings(old.config)
    lists = [key for key, value in values["privacy"].items() if isinstance(value, list)]
    given = [change.partition("=")[0].strip().removeprefix("privacy.") for change in changes]
    for key in lists:
        by_name = dict(zip((c.name for c in old.parties), values["privacy"][key], strict=True))
        if any(card.name not in by_name for card in cards) and key not in given:
            raise ConfigError(
                f"privacy.{key} has one value per party: give it anew with --set privacy.{key}="
                "[...], in the order of those who stay and then of those who join"
            )
        values["privacy"][key] = [by_name.get(card.name, 1) for card in cards]
    values["graph"]["edges_file"] = old.config.graph.edges_file
    return change_config(complete_settings(values, cards), changes)


def _edges(old: Roster, cards: Sequence[Card], config: Config) -> tuple[tuple[int, int], ...]:
    """Return the edges by node: of the named graph, of a file, or those between who stay."""
    if config.graph.name != "edges" or config.graph.edges_file != LISTED:
        return tuple(build_topology(config).edges)
    place = {card.name: node for node, card in enumerate(cards)}
    named = [(old.parties[s].name, old.parties[r].name) for s, r in old.edges]
    return tuple(sorted((place[s], place[r]) for s, r in named if s in place and r in place))
