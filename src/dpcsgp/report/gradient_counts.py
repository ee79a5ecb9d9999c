"""How often each node or party put a gradient in, where gradients may be late.

A simulation knows it of all nodes. A party knows its own count, and of those it hears directly what
their messages say; of others it knows nothing, and says so.
"""

from __future__ import annotations

from dpcsgp.report.folders import RunResults
from dpcsgp.report.formatting import DASH, as_number, plain_text
from dpcsgp.report.page_tables import Table, TableCell


def counts(run: RunResults) -> dict[str, int]:
    """Return the gradients of every node or party of which they are known, by its name."""
    played = run.summary.get("simulated")
    contributed = played.get("contributed") if isinstance(played, dict) else None
    if isinstance(contributed, list):
        return {f"node {n}": int(c) for n, c in enumerate(contributed) if as_number(c) >= 0}
    entries = run.summary.get("contributions")
    return {
        plain_text(entry.get("party")): int(entry["gradients"])
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and as_number(entry.get("gradients")) >= 0
    }


def possible(run: RunResults) -> object:
    """Return how many gradients a node could have put in: one a round, so far."""
    played = run.summary.get("simulated")
    return played.get("rounds") if isinstance(played, dict) else run.summary.get("steps")


def told(run: RunResults, count: object) -> str:
    """Spell a number of gradients beside those that were possible."""
    if not as_number(count) >= 0:
        return "not told here"
    return f"{plain_text(count)} of {plain_text(possible(run))}"


def count_table(run: RunResults) -> Table | None:
    """Return one row per node of a simulation that played a clock."""
    played = run.summary.get("simulated")
    if not isinstance(played, dict) or not (known := counts(run)):
        return None
    waits = played.get("waiting_share")
    shares = waits if isinstance(waits, list) and len(waits) == len(known) else [None] * len(known)
    rows = tuple(
        tuple(map(TableCell.word, (name, told(run, count), _percent(share))))
        for (name, count), share in zip(known.items(), shares, strict=True)
    )
    return Table(("Node", "Gradients put in", "Time spent waiting"), rows)


def missing(run: RunResults) -> str:
    """Name who put in fewer gradients than were possible; empty: nobody that is known."""
    most = as_number(possible(run))
    short = [(name, count) for name, count in counts(run).items() if count < most]
    return ", ".join(f"{name} {told(run, count)}" for name, count in short)


def _percent(share: object) -> str:
    value = as_number(share)
    return f"{100 * value:.0f} %" if 0 <= value <= 1 else DASH
