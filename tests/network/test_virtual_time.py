"""The played clock: lag against jitter, slow nodes, lost messages; nobody waits for ever."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dpcsgp.graphs import Topology, directed_exponential, directed_ring, random_digraph, star
from dpcsgp.network.virtual_time import NO_GRADIENT, Course, Pace, Timeline, play

GRAPHS = (directed_exponential(6), directed_ring(5), star(5), random_digraph(8, 0.3, 1))
JITTER = Pace(1.0, "exponential")


def course(topology: Topology, lag: int, skips: bool = False, rounds: int = 200) -> Course:
    return Course(topology, rounds, 3, lag, skips, mixing_rate=0.3)


def check_rules(timeline: Timeline, played: Course) -> None:
    """Every turn keeps to the rule, whatever was drawn."""
    for turns in timeline.turns:
        assert len(turns) == played.rounds + played.polish_rounds
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(turns))
        for round_, turn in enumerate(turns):
            lag = played.max_lag if round_ < played.rounds else 0
            assert all(round_ - lag <= count <= round_ for count in turn.credits)
            assert (round_ < played.rounds or turn.gradient == NO_GRADIENT) and (
                turn.gradient <= round_
            )
        for earlier, later in itertools.pairwise(turn.credits for turn in turns):
            assert all(a <= b for a, b in zip(earlier, later, strict=True))
        used = [turn.gradient for turn in turns if turn.gradient != NO_GRADIENT]
        assert used == sorted(set(used))


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
def test_lag_three_makes_more_rounds_where_step_times_vary(topology: Topology) -> None:
    in_step = play(course(topology, 0), JITTER, seed=1)
    lagged = play(course(topology, 3), JITTER, seed=1)
    assert lagged.rounds_per_minute >= 1.25 * in_step.rounds_per_minute
    assert lagged.contributed == in_step.contributed == (200,) * topology.num_nodes
    assert sum(lagged.waiting_share) < sum(in_step.waiting_share)
    # Nothing is drawn twice: the nodes computed for as long.
    assert lagged.computing == in_step.computing


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("pace", [Pace(1.0), JITTER], ids=["even", "jitter"])
def test_a_slow_node_that_skips_hardly_slows_the_others(topology: Topology, pace: Pace) -> None:
    slow = replace(pace, slow_nodes=(1,))
    alone = play(course(topology, 3), pace, seed=2).rounds_per_minute
    waits = play(course(topology, 3), slow, seed=2).rounds_per_minute
    skips = play(course(topology, 3, skips=True), slow, seed=2)
    assert waits < 0.2 * alone
    assert skips.rounds_per_minute >= 0.8 * alone
    assert 10 <= skips.contributed[1] <= 50
    assert all(count >= 140 for node, count in enumerate(skips.contributed) if node != 1)


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("lag", [0, 1, 4, 64])
@pytest.mark.parametrize("skips", [False, True])
def test_what_is_lost_is_late_and_nobody_waits_for_ever(
    topology: Topology, lag: int, skips: bool
) -> None:
    bad = Pace(
        1.0, "exponential", (0,), 5.0, message_seconds=0.5, loss=0.3, outage=0.02, outage_seconds=30
    )
    played = course(topology, lag, skips and lag > 0, rounds=80)
    for rate in (0.3, 1.0):
        for seed in range(3):
            check_rules(play(replace(played, mixing_rate=rate), bad, seed), played)


def test_the_same_seed_gives_the_same_course() -> None:
    bad, played = Pace(1.0, "exponential", loss=0.2), course(directed_ring(5), 2)
    assert play(played, bad, 3) == play(played, bad, 3) != play(played, bad, 4)


def test_in_step_without_jitter_a_round_takes_a_step_and_a_message() -> None:
    timeline = play(course(directed_ring(4), 0, rounds=10), Pace(2.0, message_seconds=1.0), 0)
    assert timeline.seconds == pytest.approx(10 * 2.0 + 9 * 1.0)
    # With lag the message travels while the next gradient is computed.
    overlapped = play(course(directed_ring(4), 1, rounds=10), Pace(2.0, message_seconds=1.0), 0)
    assert overlapped.seconds == pytest.approx(10 * 2.0)
    assert max(overlapped.waiting_share) == pytest.approx(0.0)
    assert min(timeline.waiting_share) > 0.3


def test_a_node_that_drains_its_weight_waits_for_what_is_on_its_way() -> None:
    """A floor holds back nodes that would otherwise run ahead by the whole lag."""
    played = replace(course(directed_ring(4), 20), mixing_rate=0.9)
    timeline = play(played, Pace(1.0, slow_nodes=(0,), slow_factor=10.0), 0)
    ahead = max(
        round_ - min(turn.credits)
        for turns in timeline.turns
        for round_, turn in enumerate(turns[: played.rounds])
    )
    assert 0 < ahead < 20
