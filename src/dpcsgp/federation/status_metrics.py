"""The public facts of a running party as Prometheus metrics: `/metrics` of its page.

A registry of its own per answer, with nothing of the process in it: what is shown are the facts of
the status file and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dpcsgp.federation.status_file import PHASES

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
_PREFIX: Final = "dpcsgp_party_"

# Name, help, key of the facts.
_GAUGES: Final = (
    ("round", "Exchanges that are done.", "round"),
    ("rounds_planned", "Exchanges of the whole plan, polishing included.", "rounds"),
    ("step", "Gradient steps that are done.", "step"),
    ("steps_planned", "Gradient steps of the plan.", "steps"),
    ("epsilon_spent", "Verified eps of all releases so far.", "epsilon"),
    ("epsilon_budget", "Eps that the party promised.", "epsilon_budget"),
    ("delta", "Delta that the party promised.", "delta"),
    ("waiting_seconds", "How long the present wait has lasted; 0: none.", "waiting_seconds"),
    ("waiting_share", "Share of this start's time that was spent waiting.", "waiting_share"),
    ("start_time_seconds", "When this start began, seconds since the epoch.", "started"),
)
_COUNTERS: Final = (
    ("releases", "Noised gradients in the ledger.", "releases"),
    ("edge_bytes", "Bytes of frames that one edge carried, earlier starts included.", "edge_bytes"),
)
_PEER_GAUGES: Final = (
    ("peer_connected", "1: a line with this peer is open.", "connected"),
    ("peer_lag_rounds", "Rounds by which this peer is behind.", "lag"),
)
_PEER_COUNTERS: Final = (
    ("peer_received_bytes", "Bytes that came from this peer since this start.", "bytes_in"),
    ("peer_sent_bytes", "Bytes that went to this peer since this start.", "bytes_out"),
)


def metrics_text(facts: Mapping[str, Any], now: float) -> bytes:
    """Return all metrics in the text format of Prometheus; none before there are facts."""
    registry = CollectorRegistry(auto_describe=False)
    if facts:
        registry.register(_Facts(facts, now))
    return generate_latest(registry)


class _Facts(Collector):
    """Turns facts into metrics; every one carries the party's name."""

    def __init__(self, facts: Mapping[str, Any], now: float) -> None:
        self._facts = {**facts, "edge_bytes": facts["bytes_per_edge"]}
        self._now = now

    def describe(self) -> list[Metric]:
        """Name nothing beforehand: there is nothing to clash with."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric once."""
        facts = self._facts
        yield self._gauge("info", "What is run.", {self._about(): 1.0}, ("federation", "version"))
        for name, text, key in _GAUGES:
            yield self._gauge(name, text, {(): float(facts[key])})
        for name, text, key in _COUNTERS:
            yield self._counter(name, text, {(): float(facts[key])})
        phases = {(phase,): float(phase == facts["phase"]) for phase in (*PHASES, facts["phase"])}
        yield self._gauge("phase", "1 for what the party is doing.", phases, ("phase",))
        if facts["metric"]:
            values = {(facts["metric"],): float(facts["score"])}
            yield self._gauge(
                "score", "Last result on the party's public test data.", values, ("metric",)
            )
        yield from self._peers()

    def _peers(self) -> Iterator[Metric]:
        peers = self._facts["peers"]
        for name, text, key in _PEER_GAUGES:
            values = {(peer["name"],): float(peer[key]) for peer in peers}
            yield self._gauge(name, text, values, ("peer",))
        for name, text, key in _PEER_COUNTERS:
            values = {(peer["name"],): float(peer[key]) for peer in peers}
            yield self._counter(name, text, values, ("peer",))
        # Never heard is infinitely long ago: an alarm for long silence covers it.
        silent = {
            (peer["name"],): math.inf
            if peer["last_heard"] is None
            else max(self._now - peer["last_heard"], 0.0)
            for peer in peers
        }
        text = "Seconds since anything came from this peer; infinite: never."
        yield self._gauge("peer_silent_seconds", text, silent, ("peer",))
        waited = self._facts["waiting_for"]
        flags = {(peer["name"],): float(peer["name"] in waited) for peer in peers}
        yield self._gauge("waiting_for", "1: this peer is waited for.", flags, ("peer",))

    def _about(self) -> tuple[str, ...]:
        return self._facts["federation"], str(self._facts["version"])

    def _gauge(
        self,
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=("party", *labels))
        for label, value in values.items():
            family.add_metric((self._facts["party"], *label), value)
        return family

    def _counter(
        self,
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=("party", *labels))
        for label, value in values.items():
            family.add_metric((self._facts["party"], *label), value)
        return family
