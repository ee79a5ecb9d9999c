"""When nodes would send and what they would have heard by then: a simulation of events.

Step times, lost messages and cuts are drawn from a public seed; nothing depends on data, so the
whole course is known before training, and nothing sleeps. Push-sum weights are played along: a
node whose weight would fall below its floor waits as the algorithm makes it wait.

A round that a node ends at time s is sent then; a lost message is sent again, so it is late and
never lost; frames of one sender arrive in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from dpcsgp.graphs import Topology
from dpcsgp.graphs.lag import is_late, weight_floors
from dpcsgp.randomness import numpy_generator

NO_GRADIENT: Final = -1


@final
@dataclass(frozen=True)
class Pace:
    """How fast nodes and lines are; the keys of the section [simulation]."""

    step_seconds: float = 1.0
    jitter: str = "none"
    slow_nodes: Sequence[int] = ()
    slow_factor: float = 10.0
    message_seconds: float = 0.0
    loss: float = 0.0
    resend_seconds: float = 1.0
    outage: float = 0.0
    outage_seconds: float = 60.0


@final
@dataclass(frozen=True)
class Course:
    """What is played.

    Attributes:
        topology: who hears whom.
        rounds: exchanges with gradients.
        polish_rounds: exchanges after them, without.
        max_lag: rounds that a node may be ahead of those it hears.
        skips: whether who is late gossips without a gradient.
        mixing_rate: gamma; push-sum weights follow from it.
        gossip_every: gradients before an exchange.
    """

    topology: Topology
    rounds: int
    polish_rounds: int = 0
    max_lag: int = 0
    skips: bool = False
    mixing_rate: float = 1.0
    gossip_every: int = 1


@final
@dataclass(frozen=True)
class Turn:
    """One frame of one node.

    Attributes:
        seconds: when it was sent.
        credits: how many frames of each sender, ascending, had moved their mass before.
        gradient: the round before which the gradient in it was begun; `NO_GRADIENT`: none is.
        ahead: how many frames of each sender were there when it was sent, its own round included;
            empty: no more than before.
    """

    seconds: float
    credits: tuple[int, ...]
    gradient: int
    ahead: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Timeline:
    """The whole course: turns by node and round, and seconds that nodes spent on gradients."""

    turns: tuple[tuple[Turn, ...], ...]
    computing: tuple[float, ...]
    rounds: int  # with gradients

    @property
    def seconds(self) -> float:
        """When the last node sent its last frame with a gradient."""
        return max((each[self.rounds - 1].seconds for each in self.turns if self.rounds), default=0)

    @property
    def rounds_per_minute(self) -> float:
        """Rounds with gradients in a virtual minute."""
        return 60.0 * self.rounds / self.seconds if self.seconds else float("inf")

    @property
    def contributed(self) -> tuple[int, ...]:
        """In how many rounds each node put in a gradient."""
        return self.contributed_before(self.rounds)

    def contributed_before(self, round_: int) -> tuple[int, ...]:
        """In how many of the first rounds each node put in a gradient."""
        until = min(round_, self.rounds)
        return tuple(
            sum(turn.gradient != NO_GRADIENT for turn in turns[:until]) for turns in self.turns
        )

    @property
    def waiting_share(self) -> tuple[float, ...]:
        """Share of its time that each node did not compute, until its last gradient was sent."""
        return tuple(
            1.0 - min(computing / turns[self.rounds - 1].seconds, 1.0) if self.seconds else 0.0
            for computing, turns in zip(self.computing, self.turns, strict=True)
        )


def play(course: Course, pace: Pace, seed: int) -> Timeline:
    """Return the course of all nodes, the same for the same seed."""
    return _Player(course, pace, seed).play()


@dataclass
class _Node:
    """Where a node stands."""

    senders: tuple[int, ...]
    arrived: dict[int, int]  # frames of each sender that are here
    taken: dict[int, int]  # of these, those that have moved their mass
    line: dict[int, float] = field(default_factory=dict)  # last arrival at each receiver
    turns: list[Turn] = field(default_factory=list)
    began: int = NO_GRADIENT  # round before which the present gradient was begun
    done: float | None = None  # when it is ready
    weight: float = 1.0
    sent_weights: list[float] = field(default_factory=list)
    cut_until: float = 0.0
    computing: float = 0.0


class _Player:
    def __init__(self, course: Course, pace: Pace, seed: int) -> None:
        self.course, self.pace, topology = course, pace, course.topology
        self.weights = course.mixing_rate * topology.weights
        self.floors = weight_floors(topology)
        self.nodes = []
        for node in range(topology.num_nodes):
            senders = tuple(j for j in topology.senders_to(node) if j != node)
            self.nodes.append(_Node(senders, dict.fromkeys(senders, 0), dict.fromkeys(senders, 0)))
        # A stream per node: the same step times whatever the lag is.
        self.steps = [numpy_generator(seed, f"step times {n}") for n in range(len(self.nodes))]
        self.lines = [numpy_generator(seed, f"lines {n}") for n in range(len(self.nodes))]
        self.events: list[tuple[float, int, int, int]] = []  # seconds, number, node, sender
        self.count = 0

    def play(self) -> Timeline:
        for node in range(len(self.nodes)):
            self._go_on(node, 0.0)
        while self.events:
            now, _, node, sender = heapq.heappop(self.events)
            if sender >= 0:
                self.nodes[node].arrived[sender] += 1
            self._go_on(node, now)
        turns = tuple(tuple(node.turns) for node in self.nodes)
        total = self.course.rounds + self.course.polish_rounds
        assert all(len(each) == total for each in turns), "nobody can wait for ever"
        computing = tuple(node.computing for node in self.nodes)
        return Timeline(turns, computing, self.course.rounds)

    def _go_on(self, index: int, now: float) -> None:
        """Let a node begin gradients and send frames as far as it can at this moment."""
        while True:
            self._begin(index, now)
            if not self._may_send(index, now):
                return
            self._send(index, now)

    def _begin(self, index: int, now: float) -> None:
        """Begin a gradient where none is under way; in step only once everything is here."""
        node, course = self.nodes[index], self.course
        round_ = len(node.turns)
        if node.done is not None or round_ >= course.rounds:
            return
        if not course.max_lag and any(have < round_ for have in node.arrived.values()):
            return
        seconds = sum(self._step_seconds(index) for _ in range(course.gossip_every))
        node.began, node.done = round_, now + seconds
        node.computing += seconds
        self._event(node.done, index, -1)

    def _may_send(self, index: int, now: float) -> bool:
        node, course = self.nodes[index], self.course
        round_, lag = len(node.turns), course.max_lag
        if round_ >= course.rounds + course.polish_rounds:
            return False
        allowed = 0 if round_ >= course.rounds else lag  # without gradients nobody is slow
        if any(have < round_ - allowed for have in node.arrived.values()):
            return False
        late = course.skips and is_late(node.arrived.values(), round_, lag, course.rounds)
        if round_ < course.rounds and not (late or self._ready(node, now)):
            return False
        self._take(index, round_)
        low = node.weight * (1.0 - self._leaves(index)) < self.floors[index]
        return not low or all(count == round_ for count in node.taken.values())

    @staticmethod
    def _ready(node: _Node, now: float) -> bool:
        return node.done is not None and node.done <= now

    def _take(self, index: int, round_: int) -> None:
        """Take all frames that are here, of rounds before the own one."""
        node = self.nodes[index]
        for sender in node.senders:
            until = min(node.arrived[sender], round_)
            for number in range(node.taken[sender], until):
                sent = self.nodes[sender].sent_weights[number]
                node.weight += self.weights[index, sender] * sent
            node.taken[sender] = max(node.taken[sender], until)

    def _send(self, index: int, now: float) -> None:
        node, course = self.nodes[index], self.course
        round_ = len(node.turns)
        used = NO_GRADIENT
        if round_ < course.rounds and self._ready(node, now):
            used, node.done = node.began, None
        ahead = tuple(min(node.arrived[j], round_ + 1) for j in node.senders)
        node.turns.append(Turn(now, tuple(node.taken[j] for j in node.senders), used, ahead))
        node.sent_weights.append(node.weight)
        node.weight -= self._leaves(index) * node.weight
        self._dispatch(index, now)

    def _dispatch(self, index: int, now: float) -> None:
        """Put a frame on all lines; what is lost is sent again, what is cut off waits."""
        node, pace, chance = self.nodes[index], self.pace, self.lines[index]
        if pace.outage and chance.random() < pace.outage:
            node.cut_until = max(node.cut_until, now) + pace.outage_seconds
        for receiver in self.course.topology.receivers_from(index):
            if receiver == index:
                continue
            lost = int(chance.geometric(1.0 - pace.loss)) - 1 if pace.loss else 0
            travel = pace.message_seconds + lost * pace.resend_seconds
            arrival = max(now, node.cut_until) + travel
            node.line[receiver] = max(node.line.get(receiver, 0.0), arrival)
            self._event(node.line[receiver], receiver, index)

    def _step_seconds(self, index: int) -> float:
        pace = self.pace
        mean = pace.step_seconds * (pace.slow_factor if index in pace.slow_nodes else 1.0)
        # Drawn in any case, so that a slow node does not change the times of others.
        drawn = float(self.steps[index].standard_exponential())
        return mean * (drawn if pace.jitter == "exponential" else 1.0)

    def _leaves(self, index: int) -> float:
        return float(self.course.mixing_rate - self.weights[index, index])

    def _event(self, seconds: float, node: int, sender: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (seconds, self.count, node, sender))


def constant_credits(course: Course, behind: np.ndarray) -> Timeline:
    """Return a timeline in which every edge is late by a constant number of rounds.

    Args:
        course: what is played; its max_lag bounds the delays.
        behind: (N, N) integers, of receiver and sender.
    """
    total = course.rounds + course.polish_rounds
    turns = tuple(
        tuple(
            Turn(
                float(round_ + 1),
                tuple(
                    round_ if round_ >= course.rounds else max(0, round_ - int(behind[node, j]))
                    for j in course.topology.senders_to(node)
                    if j != node
                ),
                round_ if round_ < course.rounds else NO_GRADIENT,
            )
            for round_ in range(total)
        )
        for node in range(course.topology.num_nodes)
    )
    return Timeline(turns, (0.0,) * course.topology.num_nodes, course.rounds)
