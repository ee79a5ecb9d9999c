"""The status of a running party, in a small file: public facts only, for `dpcsgp party status`.

A thread writes it every second. Whoever reads it sees how old it is, so a party that was killed is
told apart from one that waits.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.status_file import FORMAT, waited_for
from dpcsgp.records.metrics import plain
from dpcsgp.runs.wording import Standing, first_metric

_PAUSE: Final = 1.0
_SHORT_WAIT: Final = 3.0  # not worth a line
_SAY_SECONDS: Final = 60.0  # between log lines about rounds
_LINES: Final = 20
_LINE_LENGTH: Final = 500
_MOST_POINTS: Final = 200  # of the curve

log = logging.getLogger(__name__)


class LastLines(logging.Handler):
    """Keeps the last log lines of the package: they hold public facts only.

    Of several lines of one kind in a row, such as "saved", the last one stays.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=_LINES)
        self._kind: object = None
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        if self.lines and record.levelno == logging.INFO and record.msg == self._kind:
            self.lines.pop()
        self._kind = record.msg
        self.lines.append(self.format(record)[:_LINE_LENGTH])


@final
@dataclass
class StatusKeeper:
    """Writes the status file, and tells whoever shows progress of waits.

    Attributes:
        path: the file.
        roster: what is run.
        network: the party's network.
        node: the party's node.
        rounds: the rounds of this version of the roster.
        phase: what the party is doing.
        standing: where it stands; None before the first step.
        releases: noised gradients in the ledger.
        epsilon: of these when this start began: what is told before the first step.
        rows: evaluations on public test data, oldest first.
        page: address of the page that shows this; empty: none.
        latest: the facts as they were told last: for whoever serves them, never changed.
        on_wait: told of waits that are not short.
    """

    path: Path
    roster: Roster
    network: PartyNetwork
    node: int
    rounds: Rounds
    phase: str = "starting"
    standing: Standing | None = None
    releases: int = 0
    epsilon: float = 0.0
    rows: Sequence[Mapping[str, Any]] = ()
    page: str = ""
    latest: Mapping[str, Any] = field(default_factory=dict)
    on_wait: Callable[[tuple[str, ...]], None] = lambda names: None
    _waits: tuple[tuple[str, ...], float] = ((), 0.0)
    _started: float = field(default_factory=time.time)
    _logged_wait: tuple[str, ...] = ()
    _said: tuple[int, float] = (0, 0.0)  # the round in the last log line, and when
    _lines: LastLines = field(default_factory=LastLines)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        logger = logging.getLogger("dpcsgp")
        self._level = logger.level
        logger.addHandler(self._lines)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        self._write()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        logger = logging.getLogger("dpcsgp")
        logger.removeHandler(self._lines)
        logger.setLevel(self._level)
        self._waits = ((), 0.0)
        if kind is not None:
            self.phase = "failed"
        self._write()

    def facts(self) -> dict[str, Any]:
        """Return what is known now."""
        waiting, since = self._waits
        promise, standing = self.roster.parties[self.node].promised, self.standing
        return {
            "format": FORMAT,
            "party": self.roster.parties[self.node].name,
            "node": self.node,
            "federation": self.roster.id,
            "version": self.roster.version,
            "words": self.roster.words,
            "pid": os.getpid(),
            "started": self._started,
            "updated": time.time(),
            "phase": self.phase,
            "round": self.rounds.made(self.network.traffic.rounds),
            "rounds": self.rounds.end,
            "step": standing.step if standing else 0,
            "steps": self.roster.config.algorithm.steps,
            "metric": standing.metric if standing else "",
            "score": standing.score if standing else None,
            "scored_at": standing.scored_at if standing else 0,
            "curve": thinned(score_curve(self.rows), _MOST_POINTS),
            "releases": self.releases,
            "epsilon": standing.epsilon if standing else self.epsilon,
            "epsilon_budget": promise.epsilon,
            "max_colluders": self.roster.config.privacy.max_colluders,
            "delta": promise.delta,
            "bytes_per_edge": self.network.traffic.bytes_per_edge,
            "max_lag": self.network.max_lag,
            "waiting_share": self.network.waiting_share,
            "waiting_for": list(waiting),
            "waiting_seconds": time.monotonic() - since if waiting else 0.0,
            "peers": self._peers(),
            "page": self.page,
            "log": list(self._lines.lines),
        }

    def _peers(self) -> list[dict[str, Any]]:
        """Return one entry per neighbour, by node."""
        topology, done = self.roster.topology, self.network.traffic.rounds
        entries, (waited, _) = [], self._waits
        for name, known in self.network.status().items():
            node = self.roster.node_of(name)
            sends = node in topology.senders_to(self.node)
            behind = done - (known.received if sends else known.acknowledged)
            entries.append(
                {
                    "name": name,
                    "node": node,
                    "sends": sends,
                    "hears": node in topology.receivers_from(self.node),
                    "connected": known.lines > 0,
                    "last_heard": known.last_heard,
                    "received": known.received if sends else None,
                    "acknowledged": known.acknowledged,
                    # who is waited for is behind by the round under way
                    "lag": max(behind, int(name in waited)),
                    "bytes_in": known.bytes_in,
                    "bytes_out": known.bytes_out,
                    "problem": known.problem,
                    "waits_for": list(known.waits_for),
                }
            )
        return entries

    def _run(self) -> None:
        while not self._end.wait(_PAUSE):
            self._look()
            self._say_round()
            self._write()

    def _say_round(self) -> None:
        """Log the round now and then: after every tenth of the plan, and once a minute."""
        done, (said, when) = self.rounds.made(self.network.traffic.rounds), self._said
        tenths = 10 * done // max(self.rounds.end, 1) - 10 * said // max(self.rounds.end, 1)
        if done > said and (tenths or time.monotonic() - when > _SAY_SECONDS):
            self._said = done, time.monotonic()
            log.info("round %d of %d is done", done, self.rounds.end)

    def _look(self) -> None:
        """Take note of a wait and how long it has lasted; tell of one that is not short."""
        names, (before, since) = self.network.waiting_for, self._waits
        if names != before:
            # Fewer are missing: the same wait goes on.
            goes_on = names and before and set(names) <= set(before)
            self._waits = (names, since if goes_on else time.monotonic())
        elif names and time.monotonic() - since > _SHORT_WAIT:
            self.on_wait(self._described(names))
            self._say_wait(names)
        if not names:
            self._say_wait(())

    def _described(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Say of whoever is waited for whom that party waits for in turn."""
        known = self.network.status()
        return tuple(
            waited_for(name, known[name].waits_for if name in known else ()) for name in names
        )

    def _say_wait(self, names: tuple[str, ...]) -> None:
        """Log a wait when it begins and when it is over, not whenever a neighbour says more."""
        if names != self._logged_wait:
            shown = ", ".join(self._described(names))
            log.info("waiting for %s", shown) if names else log.info("nobody is missing")
            self._logged_wait = names

    def _write(self) -> None:
        """Replace the file; no sync, a status that is lost in a crash was of no use."""
        draft = self.path.with_name(f".{self.path.name}.tmp")
        self.latest = plain(self.facts())
        try:
            draft.write_text(json.dumps(self.latest), encoding="utf-8")
            os.replace(draft, self.path)
        except OSError as error:
            log.warning("the status file cannot be written: %s", error.strerror)


def score_curve(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the steps of a recorder's rows and the first metric there: public test data only."""
    scored = [(row["step"], first_metric(row)[1]) for row in rows]
    return [(step, sum(values) / len(values)) for step, values in scored if values]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most so many points, evenly chosen; the last one is always there.

    >>> thinned([(0, 0.0), (1, 0.5), (2, 0.75), (3, 0.875)], 2)
    [(1, 0.5), (3, 0.875)]
    """
    stride = -(-len(points) // most) or 1
    return list(points[::-stride])[::-1]
