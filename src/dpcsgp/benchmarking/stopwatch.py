"""Time competing ways of doing one thing in turn; state the outcome as ratios with limits.

All ways are run once to warm up, then round after round in turn, so that whatever slows the machine
down slows all of them. A ratio is the median over the rounds of (time of ours / time of the peer in
the same round), with the quartiles as its spread. Both the wall clock and the processor time of
this process are taken; on a machine that is busy with other work the processor time decides,
because the wall clock then measures the others.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

Clock = Literal["wall", "cpu"]
_BUSY_SHARE = 0.5  # other work on more than this share of the cores makes the wall clock useless
_SETTLED_SECONDS = 0.3  # a way that settles is repeated for so long


@final
@dataclass(frozen=True)
class Times:
    """Seconds of one way of doing the thing, one entry per round."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    def median(self, clock: Clock) -> float:
        """Return the middle time."""
        return statistics.median(getattr(self, clock))


@final
@dataclass(frozen=True)
class Ratio:
    """One line of the outcome: `value` = ours / peer, and the limit it is held to.

    `limit` None means that the line is for information; `at_least` turns the sense of the limit
    round.
    """

    group: str
    name: str
    peer: str
    value: float  # median over the rounds
    low: float  # the spread over the rounds: quartiles, unless the note says otherwise
    high: float
    ours: float  # in `unit`: seconds or bytes
    peers: float
    unit: str = "s"
    clock: Clock | None = None
    value_wall: float | None = None
    value_cpu: float | None = None
    limit: float | None = None
    at_least: bool = False
    note: str = ""

    @classmethod
    def single(
        cls, group: str, name: str, peer: str, value: float, ours: float, peers: float, **rest: Any
    ) -> Ratio:
        """Return a ratio that was measured once and so has no spread."""
        return cls(group, name, peer, value, value, value, ours, peers, **rest)

    @property
    def passed(self) -> bool | None:
        """Say whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "passed": self.passed}


def measure(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1, settle: bool = False
) -> dict[str, Times]:
    """Run all ways in turn, `rounds` times after the warm-up, without the garbage collector.

    With `settle`, every way first runs once in its turn, then for a third of a second and at least
    once; the median of these counts. After a peer that took seconds, caches and threads are cold,
    which would burden whoever is fast.
    """
    for _ in range(warm_up):
        for way in ways.values():
            way()
    # all ways once per round, garbage collected in between and never while the clock runs
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                wall, cpu = _settled(way) if settle else _once(way)
                walls[name].append(wall)
                cpus[name].append(cpu)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: Times(tuple(walls[name]), tuple(cpus[name])) for name in ways}


def _once(way: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one call by the wall clock and by the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    own = way()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    # work done in another process brings its own times
    return own if isinstance(own, tuple) else spent


def _settled(way: Callable[[], object]) -> tuple[float, float]:
    """Return the medians of several calls, after one that warms caches and threads up."""
    way()
    seen, until = [_once(way)], time.perf_counter() + _SETTLED_SECONDS
    while time.perf_counter() < until:
        seen.append(_once(way))
    return statistics.median(wall for wall, _ in seen), statistics.median(cpu for _, cpu in seen)


def deciding_clock() -> Clock:
    """Return "cpu" if other work keeps the cores busy, else "wall"."""
    try:
        return "cpu" if os.getloadavg()[0] > _BUSY_SHARE * (os.cpu_count() or 1) + 1 else "wall"
    except OSError:
        return "wall"


def compare(
    group: str,
    times: Mapping[str, Times],
    name: str,
    peer: str,
    *,
    clock: Clock,
    limit: float | None = None,
    at_least: bool = False,
    note: str = "",
) -> Ratio:
    """Divide our times by the peer's, or the peer's by ours for a speed-up (`at_least`)."""
    over, under = (peer, name) if at_least else (name, peer)
    # round by round, so that what slowed the machine down in a round cancels out
    values = {each: _ratios(times[over], times[under], each) for each in ("wall", "cpu")}
    low, middle, high = _quartiles(values[clock])
    return Ratio(
        group=group,
        name=name,
        peer=peer,
        value=middle,
        low=low,
        high=high,
        ours=times[name].median(clock),
        peers=times[peer].median(clock),
        clock=clock,
        value_wall=_quartiles(values["wall"])[1],
        value_cpu=_quartiles(values["cpu"])[1],
        limit=limit,
        at_least=at_least,
        note=note,
    )


def _ratios(over: Times, under: Times, clock: str) -> list[float]:
    pairs = zip(getattr(over, clock), getattr(under, clock), strict=True)
    return [above / max(below, 1e-9) for above, below in pairs]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
