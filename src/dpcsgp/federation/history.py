"""What a roster remembers of the versions before it: who took part, until when, at what price.

A roster of version n has n - 1 chapters. The last one says at which round the roster takes effect:
all counts are of the whole plan, so rounds and gradient steps go on from one version to the next.
What a party has released under a version is at most one release per step of its chapter, of the
kind stated here; budgets of later versions pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from dpcsgp.errors import ConfigError
from dpcsgp.federation.files import Fields, toml_lines
from dpcsgp.federation.identity import NAME_EXPECTED, NAME_PATTERN
from dpcsgp.privacy import ReleaseEvent

MOST_VERSIONS: Final = 1000
_MOST_ROUNDS: Final = 10**6
_HEX: Final = "[0-9a-f]{64}"


@final
@dataclass(frozen=True)
class Chapter:
    """One earlier version of a roster.

    Attributes:
        fingerprint: of that version.
        rounds: the next version takes effect after so many rounds, counted from the very first.
        steps: gradient steps in these rounds.
        cut: whether each party goes on from wherever it stood, because some party can make no
            more rounds; False: all rounds are completed first.
        restored: parties that lost what they had released; their ledgers are brought up.
        parties: names in the order of the nodes.
        releases: what a step cost each of them.
        hand_over: whether the next version begins with everybody's model to everybody who hears
            it, though nobody joins. Rosters that do not say so were begun without.
    """

    fingerprint: str
    rounds: int
    steps: int
    cut: bool
    restored: tuple[str, ...]
    parties: tuple[str, ...]
    releases: tuple[ReleaseEvent, ...]
    hand_over: bool = False

    def content(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        about: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "rounds": self.rounds,
            "steps": self.steps,
            "cut": self.cut,
            "restored": list(self.restored),
            "parties": list(self.parties),
            "sampling": self.releases[0].sampling,
            "sampling_rates": [event.sampling_rate for event in self.releases],
            "noise_multipliers": [event.noise_multiplier for event in self.releases],
        }
        shared = self.releases[0].max_colluders
        if shared is not None:
            rows = [list(event.by_colluders) for event in self.releases]
            about |= {"max_colluders": shared, "by_colluders": rows}
        if self.hand_over:  # left out otherwise: fingerprints of older rosters stay
            about["hand_over"] = True
        return about

    def lines(self) -> list[str]:
        """Return the fields as lines of TOML."""
        return toml_lines(self.content())

    @classmethod
    def take(cls, fields: Fields) -> Chapter:
        """Take all fields of a table, and refuse what is left over."""
        head = (
            fields.text("fingerprint", _HEX, "64 hexadecimal digits"),
            fields.whole("rounds", 0, _MOST_ROUNDS),
            fields.whole("steps", 0, _MOST_ROUNDS),
            fields.flag("cut"),
        )
        restored, parties = _take_names(fields, "restored"), _take_names(fields, "parties")
        releases = _take_releases(fields)
        hand_over = fields.flag("hand_over") if fields.has("hand_over") else False
        fields.end()
        chapter = cls(*head, restored, parties, releases, hand_over)
        if len(releases) != len(parties) or not parties or not {*restored} <= {*parties}:
            raise fields.wrong("parties", list(parties), "one entry per party in every list")
        return chapter


def _take_names(fields: Fields, key: str) -> tuple[str, ...]:
    values = fields.take(key)
    if not isinstance(values, list) or len(values) != len(set(map(str, values))):
        raise fields.wrong(key, values, "a list of names, each once")
    names = Fields({str(place): value for place, value in enumerate(values)}, key)
    return tuple(
        names.text(str(place), NAME_PATTERN, NAME_EXPECTED) for place in range(len(values))
    )


def _take_releases(fields: Fields) -> tuple[ReleaseEvent, ...]:
    """Take what a step cost each party."""
    sampling = fields.text("sampling", "poisson|uniform", "poisson or uniform")
    rates, noises = fields.take("sampling_rates"), fields.take("noise_multipliers")
    shared = fields.has("max_colluders")
    colluders = fields.whole("max_colluders", 0, _MOST_ROUNDS) if shared else None
    rows = fields.take("by_colluders") if shared else [[] for _ in noises]
    try:
        return tuple(
            ReleaseEvent.from_json([sampling, rate, noise, colluders, row])
            for rate, noise, row in zip(rates, noises, rows, strict=True)
        )
    except (ConfigError, ValueError, TypeError) as error:
        raise fields.wrong("noise_multipliers", noises, f"numbers that fit ({error})") from None


def take_history(fields: Fields, version: int, where: str) -> tuple[Chapter, ...]:
    """Take the chapters of a roster of this version, oldest first.

    Raises:
        ConfigError: there are more or fewer than the version says, or they contradict each other.
    """
    if version == 1:
        return ()
    entries = fields.listed("history", MOST_VERSIONS)
    chapters = tuple(
        Chapter.take(Fields(entry, f"{where}, history[{place}]"))
        for place, entry in enumerate(entries)
    )
    check_history(chapters, version)
    return chapters


def check_history(chapters: Sequence[Chapter], version: int) -> None:
    """Refuse chapters that are not those of a roster of this version."""
    if len(chapters) != version - 1:
        raise ConfigError(
            f"version = {version}: the history has {len(chapters)} earlier versions; the roster "
            "was changed by hand: ask for it again"
        )
    counts = [(0, 0), *((chapter.rounds, chapter.steps) for chapter in chapters)]
    if counts != sorted(counts) or len({c.fingerprint for c in chapters}) != len(chapters):
        raise ConfigError(
            "history: rounds and steps must not go back, and no version comes twice; the roster "
            "was changed by hand: ask for it again"
        )


def released_by(chapters: Sequence[Chapter], name: str) -> dict[int, ReleaseEvent]:
    """Return what a party may have released by now: step -> kind, over all versions it was in."""
    found: dict[int, ReleaseEvent] = {}
    first = 0
    for chapter in chapters:
        if name in chapter.parties:
            event = chapter.releases[chapter.parties.index(name)]
            found |= dict.fromkeys(range(first, chapter.steps), event)
        first = chapter.steps
    return found


def spent_by(chapters: Sequence[Chapter], name: str) -> tuple[tuple[ReleaseEvent, int], ...]:
    """Return what a party may have released by now: each kind with its count, oldest first."""
    counts: dict[ReleaseEvent, int] = {}
    first = 0
    for chapter in chapters:
        if name in chapter.parties and chapter.steps > first:
            event = chapter.releases[chapter.parties.index(name)]
            counts[event] = counts.get(event, 0) + chapter.steps - first
        first = chapter.steps
    return tuple(counts.items())


def changes_of_parties(
    before: Sequence[str], after: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """Return who left and who joined from one version to the next."""
    return {
        "left": tuple(name for name in before if name not in after),
        "joined": tuple(name for name in after if name not in before),
    }
