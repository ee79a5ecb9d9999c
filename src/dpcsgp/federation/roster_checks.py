"""Checks of a roster: parties that can be told apart and reached, settings that can run."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.federation.cards import Card
from dpcsgp.federation.data_shape import CROSS_ENTROPY, DataShape

# Settings of a task whose data are the parties' own.
OWN_DATA: Final = {"features": "none", "partition": "own"}
_MOST_STEPS: Final = 10**6
_BOUNDED: Final = (
    "algorithm.steps",
    "algorithm.polish_rounds",
    "algorithm.num_blocks",
    "privacy.replay_reserve",
)


def utc_today() -> datetime.date:
    """Return the day by which end dates are judged."""
    return datetime.datetime.now(datetime.UTC).date()


def check_settings(config: Config) -> None:
    """Refuse settings that make no federation."""
    if not config.method.sends:
        raise ConfigError(
            f'algorithm.name = "{config.algorithm.name}": nothing is sent, so there is nothing to '
            'do together; choose "dp-csgp"'
        )
    for key, value in OWN_DATA.items() if config.task.name == "own" else ():
        if (given := getattr(config.task, key)) != value:
            raise ConfigError(
                f'task.{key} = {given!r}: for task.name = "own" every party brings its data ready '
                f"for the model; leave task.{key} out"
            )
    if config.privacy.max_rows_per_unit and config.task.name != "own":
        raise ConfigError(
            f"privacy.max_rows_per_unit = {config.privacy.max_rows_per_unit}: the data set "
            f'"{config.task.name}" does not say whose a row is; leave it out, or have a roster '
            'made with task.name = "own", for which every party gives --unit'
        )
    if not config.run.checkpoint_every:
        raise ConfigError(
            "run.checkpoint_every = 0: a party that was stopped goes on from its last checkpoint; "
            "choose 1 or more"
        )
    for field, value in config.flat().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field} = {value}: expected a finite number")
    # Costs are computed from these: a hostile roster must not keep a machine busy for ever.
    for field in _BOUNDED:
        if (value := config.flat()[field]) > _MOST_STEPS:
            raise ConfigError(f"{field} = {value}: expected at most {_MOST_STEPS:,}")


def check_data(config: Config, data: DataShape) -> None:
    """Refuse settings that contradict what the examples look like."""
    weights = config.task.class_weights
    if weights and data.loss != CROSS_ENTROPY:
        raise ConfigError(
            f'task.class_weights = {list(weights)} with data.loss = "{data.loss}": only '
            '"cross_entropy" has weights of classes; leave them out'
        )


def check_parties(cards: Sequence[Card], ends: datetime.date) -> None:
    """Refuse parties that cannot be told apart, and certificates that do not last until the end."""
    if len(cards) < 2:
        raise ConfigError(f"{len(cards)} card: a federation needs at least 2 parties")
    check_names(cards)
    _refuse_repeated(cards, "certificate", (card.certificate_pem for card in cards))
    keys = (card.certificate.public_key() for card in cards)
    _refuse_repeated(cards, "key of the certificate", keys)
    _refuse_repeated(cards, "noise_key", (card.noise_key for card in cards))
    _refuse_repeated(cards, "address", (card.address for card in cards))
    for card in cards:
        first, last = card.valid
        if not first <= utc_today() or last < ends:
            raise ConfigError(
                f"card of {card.name}: its certificate is valid from {first} to {last}, the "
                f"federation ends on {ends}; {card.name} makes a new party, or choose another end"
            )


def check_names(cards: Sequence[Card]) -> None:
    """Refuse two parties of one name."""
    _refuse_repeated(cards, "name", (card.name for card in cards))


def _refuse_repeated(cards: Sequence[Card], field: str, values: Iterable[Any]) -> None:
    seen: list[tuple[Any, Card]] = []
    for card, value in zip(cards, values, strict=True):
        other = next((owner for known, owner in seen if known == value), None)
        if other is not None and value is not None:
            raise ConfigError(
                f"cards of {other.name} and {card.name} have the same {field}: every party has its "
                "own; was a card given twice?"
            )
        seen.append((value, card))


def undialled(cards: Sequence[Card], edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges whose two ends both only call out."""
    closed = {node for node, card in enumerate(cards) if card.address is None}
    return [edge for edge in edges if closed.issuperset(edge)]
