"""Tables about a federation: who takes part, what one party promises, where two rosters differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpcsgp.federation.agreement import Agreement, PartyCost
from dpcsgp.federation.consent import Consent
from dpcsgp.federation.differences import Difference, differences
from dpcsgp.federation.firewall import Connection
from dpcsgp.federation.history import changes_of_parties
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.words import as_words
from dpcsgp.records.names import shown_model

# Of fields of a card: nobody reads them, and people compare the words of the whole.
_KEYS: Final = (", certificate", ", noise_key", ", fingerprint")


def overview(agreement: Agreement) -> Group:
    """Show who takes part, what is trained, and what the doctor says."""
    return Group(
        *_over(agreement.roster),
        _facts("the federation", _shared(agreement)),
        _parties(agreement),
        *_history(agreement.roster),
        _verdict(agreement),
        fingerprint(agreement.roster),
    )


def firewall_table(connections: Sequence[Connection]) -> Group:
    """Show which connections a roster needs, one row each."""
    title = "connections to let through (TCP with TLS, open for the whole run)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("from", "to", "host", "port", "what the caller does"):
        table.add_column(name, overflow="fold")
    for each in connections:
        row = (each.caller, each.called, each.host, f"{each.port}", each.carries)
        table.add_row(*map(escape, row))
    return Group(table, Text("Answers come back on the same connection; nothing else is needed."))


def own_part(agreement: Agreement, name: str, others: Sequence[Consent]) -> Group:
    """Show one party what it promises, what it costs, and who hears it.

    `others`: its consents to other federations, one of each: versions share one promise.
    """
    node = agreement.roster.node_of(name)
    cost = agreement.costs[node]
    parts: list[RenderableType] = [
        _facts("the federation", _shared(agreement)),
        _facts(f"what {name} promises, and what it costs", _promise(agreement, cost, node)),
        _verdict(agreement),
    ]
    if others:
        total = sum(consent.promise.epsilon for consent in others)
        parts.append(
            Text(
                f"approved before: {len(others)} other federations, eps {total:g} in all. Where "
                "they use the same examples, promises add up."
            )
        )
    return Group(*parts, fingerprint(agreement.roster))


def changed_fields(before: Roster, after: Roster) -> str:
    """Say what an amended roster changes: in one line, then field by field."""
    found = differences(before, after)
    head = f"{len(found)} fields change from version {before.version} (before / after):"
    return "\n".join([_in_short(before, after, found), head, *map(_field_line, found)])


def _in_short(before: Roster, after: Roster, found: Sequence[Difference]) -> str:
    """Say in one line who leaves and joins, when, and what else is another."""
    last = after.history[-1]
    names = [card.name for card in after.parties]
    moves = changes_of_parties(last.parties, names)
    cards = {card.name: card for card in before.parties}
    other = [c.name for c in after.parties if c.name in cards and c != cards[c.name]]
    parts = [
        *(f"{name} {'is left behind' if last.cut else 'leaves'}" for name in moves["left"]),
        *(f"{name} joins" for name in moves["joined"]),
        *(f"{name} comes back, what its ledger lacks counts as spent" for name in last.restored),
        *(f"{name} has another card" for name in other),
    ]
    text = " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    rest = [
        each.field.removeprefix("settings.")
        for each in found
        if each.field.startswith("settings.") or each.field == "ends"
    ]
    others = f"; also changed: {', '.join(rest)}" if rest else ""
    return f"{text or 'the same parties go on'} at round {last.rounds}{others}"


def _field_line(found: Difference) -> str:
    """Show a field before and after; of certificates and keys only that they changed."""
    if not found.field.endswith(_KEYS):
        return str(found)
    if found.first is None or found.second is None:
        words = ("there" if value is not None else "(not there)" for value in vars(found).values())
        return f"{found.field}: {' / '.join([*words][1:])}"
    return f"{found.field}: (changed)"


def fingerprint(roster: Roster) -> Text:
    """Show the words by which people compare rosters."""
    return Text("fingerprint: ", style="bold") + Text(roster.words, style="not bold")


def difference_lines(found: Sequence[Difference]) -> str:
    """Say in which fields two rosters differ, one per line."""
    if not found:
        return "the rosters are equal"
    return "\n".join([f"{len(found)} fields differ (first / second):", *map(str, found)])


def _facts(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _shared(agreement: Agreement) -> dict[str, str]:
    """Say what all have in common."""
    roster, algorithm = agreement.roster, agreement.roster.config.algorithm
    config = roster.config
    over = " (over)" if roster.expired() else ""
    return {
        "roster": f"{roster.id}, version {roster.version}, ends {roster.ends}{over}",
        "task": f"{config.task.name}: {roster.data}",
        **({"privacy": f"of {_units(roster)}"} if config.privacy.max_rows_per_unit else {}),
        "model": f"{shown_model(config.task.model)}, {agreement.design.dim:,} coordinates",
        "method": f"{algorithm.name}, compression {config.compression.spec}, "
        f"{algorithm.steps} steps + {algorithm.polish_rounds} polish rounds"
        + (f", from step {roster.earlier.steps} on" if roster.history else ""),
        "graph": f"{roster.topology.name}, {len(roster.parties)} parties, "
        f"{len(roster.edges)} edges",
        "traffic": f"{_size(agreement.bytes_per_edge)} per edge "
        + (f"from round {roster.history[-1].rounds} on" if roster.history else "for the whole run"),
    }


def _over(roster: Roster) -> list[Text]:
    """Say of a roster that has ended that it has; nothing of any other."""
    if not roster.expired():
        return []
    text = (
        f"this roster ended on {roster.ends}: nobody can approve or run it any more; have it made "
        "or amended with a later --ends"
    )
    return [Text(text, style="bold red")]


def _history(roster: Roster) -> list[Table]:
    """Show when the versions took effect, and who left and joined; nothing for a first version."""
    if not roster.history:
        return []
    title = "versions"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("version", "from round", "left", "joined", "ledger lost", "fingerprint"):
        table.add_column(name, overflow="fold")
    table.add_row("1", "0", "", "", "", as_words(roster.history[0].fingerprint))
    names = [*(each.parties for each in roster.history), [card.name for card in roster.parties]]
    prints = [*(each.fingerprint for each in roster.history), roster.fingerprint]
    for place, chapter in enumerate(roster.history, start=1):
        moves = changes_of_parties(names[place - 1], names[place])
        cut = " (cut off)" if chapter.cut else ""
        table.add_row(
            f"{place + 1}",
            f"{chapter.rounds}{cut}",
            ", ".join(moves["left"]),
            ", ".join(moves["joined"]),
            ", ".join(chapter.restored),
            as_words(prints[place]),
        )
    return [table]


def _parties(agreement: Agreement) -> Table:
    """One row per party, in the order of the nodes."""
    table = Table(title="parties", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    whose = f"{agreement.roster.facts.unit}s"
    for name in ("name", "reached at", whose, "eps", "delta", "noise", "sends to"):
        table.add_column(name, overflow="fold")
    for cost in agreement.costs:
        table.add_row(
            cost.name,
            cost.address or "(calls out only)",
            f"{cost.num_examples}",
            f"{cost.epsilon:g}",
            f"{cost.delta:g}",
            f"{cost.noise_multiplier:.3g}",
            ", ".join(cost.heard_by),
        )
    return table


def _promise(agreement: Agreement, cost: PartyCost, node: int) -> dict[str, str]:
    config, before = agreement.roster.config, agreement.roster.earlier
    made = sum(count for _, count in before.releases[node]) if before.releases else 0
    spent = {"spent by then": f"at most eps {cost.epsilon_before:.4g} in {made} releases"}
    return {
        "promise": f"eps {cost.epsilon:g}, delta {cost.delta:g} for {cost.num_examples} "
        f"declared {_units(agreement.roster)}",
        **(spent if made else {}),
        "spent by the plan": f"verified eps {cost.epsilon_of_plan:.4g} in "
        f"{config.algorithm.steps - before.steps + made} releases",
        "holds": _trust(config.privacy.max_colluders, cost.epsilon_all_collude),
        "noise": f"multiplier {cost.noise_multiplier:.4g}, expected batch "
        f"{cost.expected_batch_size}, clip norm {config.privacy.clip_norm:g}",
        "heard directly by": ", ".join(cost.heard_by),
        "hears": ", ".join(cost.hears),
        "sends": f"{_size(cost.bytes_sent)} in all, {_size(agreement.bytes_per_edge)} per edge",
        "receives": f"{_size(cost.bytes_received)} in all",
        "is reached at": cost.address or "nowhere: it only calls out",
        "until": f"{agreement.roster.ends}",
    }


def _units(roster: Roster) -> str:
    """Say to whom privacy is promised."""
    most = roster.config.privacy.max_rows_per_unit
    if not most:
        return "examples"
    return f"persons with all their rows, at most {most} of which count in one step"


def _trust(colluders: str | int, epsilon_all_collude: float) -> str:
    if colluders == "all":
        return "even if all others tell each other everything"
    return (
        f"as long as at most {colluders} of the others tell each other what they know; "
        f"eps {epsilon_all_collude:.4g} if all of them do"
    )


def _verdict(agreement: Agreement) -> Text:
    doctor = agreement.doctor
    word, style = ("healthy", "bold green") if doctor.healthy else ("unhealthy", "bold red")
    return Text(f"gossip is {word}: ", style=style) + Text(doctor.verdict, style="default")


def _size(count: int) -> str:
    return f"{count / 1e6:.3f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
