"""From one version of a roster to the next, as one party sees it: what it checks and still serves.

Whoever took part in the version before has its file, and computes from it what the new version says
about it. A new party has no such file: it relies on those who have, for without their consent to
the same roster nothing runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from dpcsgp.errors import ConfigError
from dpcsgp.federation.agreement import Agreement, examine
from dpcsgp.federation.amending import check_succession, last_round
from dpcsgp.federation.archive import Archive, Ended
from dpcsgp.federation.contributions import distances
from dpcsgp.federation.history import spent_by
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.peers import Peer
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.run_place import (
    JOURNAL,
    NOTICES,
    has_begun,
    home_of,
    kept_steps,
    known_place,
    previous_roster,
    released_steps,
    roster_in,
    turns_in,
)
from dpcsgp.federation.words import as_words
from dpcsgp.privacy import ReleaseEvent, composed_epsilon, releases_within
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.runs.design import RunDesign

_ROUNDING: Final = 1e-9  # relative, of an eps


def refuse_wrong_history(
    party: PartyFolder, roster: Roster, out: Path | None = None, model: nn.Module | None = None
) -> Roster | None:
    """Hold what a roster says about the version before against this party's own copy of it.

    Args:
        party: the party's folder.
        roster: the version that is to be run.
        out: its results folder, if it was moved.
        model: at its start, where it is not one of the package's.

    Returns:
        The version before; None where this party was not in it, or has lost it.

    Raises:
        ConfigError: the history is not as it was, or the party's own copy is missing.
    """
    place = known_place(party, roster, out)
    if roster.history and place is not None:
        check_own_history(place, roster, party.name)
    if not roster.history or party.name not in roster.history[-1].parties:
        return None
    before = previous_roster(party, roster, out)
    if before is not None:
        check_succession(examine(before, model), roster)
    elif party.name not in roster.history[-1].restored:
        words = as_words(roster.history[-1].fingerprint)
        raise ConfigError(
            f"{party.name} was in version {roster.version - 1} ({words}), and its run of it is not "
            f"in {party.path}. If that version has not begun here yet, or only now: run it "
            "(`dpcsgp party run OLD.toml`) until `dpcsgp party status` shows it, then come back to "
            "this one. If it has, restore that folder: without its ledger nobody knows what was "
            "released. Only if there is no copy left, have the roster amended with --rejoin "
            f"{party.name}: that books every step that the ledger lacks as spent"
        )
    return before


def peers_of(roster: Roster) -> list[Peer]:
    """Return all parties as others see them."""
    return [
        Peer(node, card.name, card.certificate_pem.encode(), card.address)
        for node, card in enumerate(roster.parties)
    ]


def archives_of(
    party: PartyFolder, rounds: Rounds, results: Path, model: nn.Module | None
) -> list[Archive]:
    """Return the versions before that were completed here, the newest first."""
    found: list[Archive] = []
    after = rounds.roster
    while after.history and not after.history[-1].cut:
        before = previous_roster(party, after, results)
        if before is None or not (home_of(results, before) / JOURNAL).exists():
            break
        design, home = examine(before, model).design, home_of(results, before)
        counts, node = Rounds(before, design, after), before.node_of(party.name)
        found.append(
            Archive(
                node=node,
                peers=peers_of(before),
                topology=before.topology,
                roster_digest=bytes.fromhex(before.fingerprint),
                folder=home / JOURNAL,
                size_of_round=counts.size_of_frame,
                ended=Ended(moved_on(after), counts.end - counts.shift),
                notices=notice_board(home, before, node, design),
            )
        )
        after = before
    return found


def notice_board(home: Path, roster: Roster, node: int, design: RunDesign) -> NoticeBoard | None:
    """Return where the notices of starts under a version are kept; None: noise is independent."""
    if design.mechanism.shared is None:
        return None
    return NoticeBoard(home / NOTICES, roster, node)


def over_here(roster: Roster) -> dict[str, str]:
    """Return what to say to those who come with an older version, by its fingerprint."""
    return {chapter.fingerprint: moved_on(roster) for chapter in roster.history}


def moved_on(roster: Roster) -> str:
    """Say that a version of the roster has taken effect."""
    return (
        f"version {roster.version} of the roster ({roster.words}) took effect at round "
        f"{roster.history[-1].rounds}; get it from the other parties, approve it and run it"
    )


def refuse_later_frames(network: PartyNetwork, rounds: Rounds) -> None:
    """Refuse to cut a version off before a round of which a frame has come.

    Its sender has released more than the roster would say of it.
    """
    for name, known in network.status().items():
        if (received := rounds.made(known.received)) > rounds.end:
            assert rounds.until is not None
            raise ConfigError(
                f"{name} has sent the frames of {received} rounds, and version "
                f"{rounds.until.version} begins after round {rounds.end}; "
                + _from_round(rounds.roster, received)
            )
    _refuse_forgotten_frames(network, rounds)


def _refuse_forgotten_frames(network: PartyNetwork, rounds: Rounds) -> None:
    """Refuse to cut a version off before a round that a restored party may have sent and lost.

    Only parties that are gone may hold those frames. But nobody is further ahead of a party than
    that one's frames take to reach it: one round for every edge, and the lag.
    """
    old, until = rounds.roster, rounds.until
    assert until is not None
    own = old.parties[network.nodes[0]].name
    restored = until.history[-1].restored
    if own in restored or own not in [card.name for card in until.parties]:
        return
    for name in restored:
        edges = distances(old.topology, old.node_of(name))[network.nodes[0]]
        most = rounds.made(network.written + edges * (1 + network.max_lag))
        if most > rounds.end:
            raise ConfigError(
                f"{name} may have sent the frames of {most} rounds before it lost them, and "
                f"version {until.version} begins after round {rounds.end}; "
                + _from_round(rounds.roster, most)
            )


def told_before(results: Path, roster: Roster) -> list[dict[str, Any]]:
    """Return who contributed in earlier versions, as the last summary tells it."""
    path = results / "summary.json"
    told = json.loads(path.read_bytes()).get("versions", []) if path.exists() else []
    return [entry for entry in told if entry["version"] < roster.version]


def check_own_history(path: Path, roster: Roster, name: str) -> None:
    """Refuse a roster that says less of this party than its ledger, or that takes effect too late.

    Args:
        path: the party's results folder.
        roster: the version that is to begin.
        name: of the party.

    Raises:
        ConfigError: names what the roster says and what was released.
    """
    if has_begun(path, roster):
        return  # it has begun, and its releases are beside those of the history
    last = roster.history[-1]
    stated = list(spent_by(roster.history, name))
    for file in (path / "ledger").glob("node-*.jsonl"):
        ledger = read_ledger(file)
        # A release of a later step may be under way already: it is kept, and used as it is.
        ahead = {step for step, _ in ledger.places if step >= last.steps}
        if gone := ahead - kept_steps(path):
            raise ConfigError(
                f"{name} has made step {max(gone) + 1} already, and version {roster.version} "
                f"begins after step {last.steps} (round {last.rounds}); "
                + _remedy_in(path, roster, name, max(gone))
            )
        if ahead:
            stated.append((_event_of(roster, name), len(ahead)))
        delta, spent = ledger.header.delta or 1e-5, ledger.releases()
        said = composed_epsilon(_with_under_way(stated, spent), delta)
        if (found := composed_epsilon(spent, delta)) > said * (1 + _ROUNDING):
            raise ConfigError(
                f"version {roster.version} says that {name} has spent eps {said:.4g} by round "
                f"{last.rounds}; its ledger says {found:.4g}. The history is understated: have the "
                "roster made with `dpcsgp federation amend`"
            )


def told_ahead(path: Path, agreement: Agreement, name: str) -> str:
    """Say what a party has released of a version that it has not begun yet; "": nothing.

    It did not know of the version, so these steps have the price of the one before.
    """
    roster, last = agreement.roster, agreement.roster.history[-1]
    ahead = {step for step in released_steps(path) if step >= last.steps}
    if not ahead or has_begun(path, roster):
        return ""
    node = roster.node_of(name)
    promise, mechanism = roster.parties[node].promised, agreement.design.mechanism
    files = (path / "ledger").glob("node-*.jsonl")
    spent = tuple(each for file in files for each in read_ledger(file).releases())
    found = composed_epsilon(spent, promise.delta)
    text = (
        f"{name} has released {len(ahead)} steps of this version already, at the price of the one "
        f"before: its ledger has eps {found:.4g} so far"
    )
    left = roster.config.algorithm.steps - last.steps - len(ahead)
    if mechanism.shared is not None:
        return text
    pays = releases_within(mechanism.event(node), promise.epsilon, promise.delta, spent)
    if pays is None or pays >= left:
        return text
    return (
        f"{text}. The promise pays for {pays} of the {left} steps that are left: after them "
        f"{name} goes on without new gradients"
    )


def _with_under_way(
    stated: Sequence[tuple[ReleaseEvent, int]], spent: Sequence[tuple[ReleaseEvent, int]]
) -> list[tuple[ReleaseEvent, int]]:
    """Let releases that were under way when a version began count at the price of the one before.

    That version has used them for its own steps: all together are not more than stated.
    """
    counts: Counter[ReleaseEvent] = Counter()
    for event, count in stated:
        counts[event] += count
    if sum(count for _, count in spent) <= counts.total():
        for event, count in spent:
            if event in counts:
                counts[event] = max(counts[event], count)
    return list(counts.items())


def _remedy_in(path: Path, roster: Roster, name: str, step: int) -> str:
    """Say which round will do for a party that has made a step too many."""
    before = roster_in(path, roster.history[-1].fingerprint)
    if before is None:
        return "have it amended with a later --at-round"
    first = before.history[-1].rounds if before.history else 0
    # Where gradients may be late, rounds without one go further than the ledger.
    made = max(step // before.config.algorithm.gossip_every + 1, first + turns_in(path, before))
    return remedy_of_round(before, before.node_of(name), made)


def steps_ahead(roster: Roster, node: int) -> int:
    """Return how many steps of a version a party may make after it has ended for all others.

    With lag it goes on for a while before it waits for those who have heard of the next version. It
    must be able to come back: checkpoints, releases and frames of so many steps stay.
    """
    lag = roster.config.network.max_lag
    if not lag:  # in step it waits in the round itself
        return 0
    farthest = max(distances(roster.topology, node).values())
    return farthest * (1 + lag) * roster.config.algorithm.gossip_every


def remedy_of_round(before: Roster, node: int, made: int) -> str:
    """Say from which round on a version can follow, where a party has made so many rounds.

    Whoever hears it, directly or through others, waits for its frames: nobody is further ahead than
    one round for every edge, and the lag.
    """
    nodes = range(len(before.parties))
    farthest = max(distances(before.topology, other)[node] for other in nodes)
    enough, last = made + farthest * (1 + before.config.network.max_lag), last_round(before)
    if enough > last >= made:
        return (
            f"have it amended with an --at-round from {made} to {last} that nobody has passed "
            "(`dpcsgp party status` of each); after that there is none to amend at"
        )
    sure = ": nobody can have passed that round before this party goes on"
    return _from_round(before, enough) + (sure if enough <= last else "")


def _from_round(before: Roster, first: int) -> str:
    """Say how to have a version followed from a round on; or that its plan has no such round."""
    if first <= (last := last_round(before)):
        return f"have it amended with --at-round {first} or later"
    return (
        f"version {before.version} can be followed by another one up to round {last}, before its "
        "last step, and this party has passed that: there is no later --at-round. Let it end as "
        "planned; what is to come after it is a new federation (`dpcsgp federation new`), whose "
        "promises add up with this one's"
    )


def _event_of(roster: Roster, name: str) -> ReleaseEvent:
    """Return what a step cost this party in the newest version before that it was in."""
    chapter = next(each for each in reversed(roster.history) if name in each.parties)
    return chapter.releases[chapter.parties.index(name)]
