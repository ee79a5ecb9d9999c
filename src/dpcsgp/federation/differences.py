"""In which fields two rosters differ: what people ask when their fingerprints do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from dpcsgp.federation.roster import Roster

_MOST_SHOWN: Final = 60


@final
@dataclass(frozen=True)
class Difference:
    """One field in which two rosters differ; None: it is not in that one."""

    field: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.first)} / {_shown(self.second)}"


def differences(first: Roster, second: Roster) -> tuple[Difference, ...]:
    """Return every field in which two rosters differ; none if and only if they are equal.

    Parties are compared by name and edges one by one; the order of the parties is a field of its
    own.
    """
    one, two = _flat(first), _flat(second)
    return tuple(
        Difference(field, one.get(field), two.get(field))
        for field in {**one, **two}
        if one.get(field) != two.get(field)
    )


def _flat(roster: Roster) -> dict[str, Any]:
    """Return all that is agreed on as field -> value."""
    content = roster.content()
    parties, edges = content.pop("parties"), content.pop("edges")
    history = content.pop("history", [])
    return {
        **dict(_leaves(content)),
        **{
            f"history of version {place}, {key}": value
            for place, chapter in enumerate(history, start=1)
            for key, value in chapter.items()
        },
        "order of parties": [party["name"] for party in parties],
        **{f"edge {sender} -> {receiver}": "there" for sender, receiver in edges},
        **{
            f"party {party['name']}, {key}": value
            for party in parties
            for key, value in party.items()
        },
    }


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is None:
        return "(not there)"
    text = repr(value)
    # The end of a certificate tells more than its beginning, which is alike for all.
    return text if len(text) <= _MOST_SHOWN else f"...{text[-_MOST_SHOWN:]}"
