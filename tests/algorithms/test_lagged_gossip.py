"""Gossip with late messages: mass is conserved in every order, lag 0 is the rule in step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dpcsgp.algorithms import DPCSGP
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.compression import frames, parse_compressor
from dpcsgp.errors import WireError
from dpcsgp.graphs import Topology, directed_exponential, directed_ring, random_digraph, star
from dpcsgp.graphs.lag import edges_into, least_weights
from dpcsgp.network import Simulator
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import NO_GRADIENT, Course, Pace, Timeline, Turn, play
from dpcsgp.randomness import PublicRandomness

DIM, GRAPHS = 200, (directed_exponential(6), directed_ring(4), star(5), random_digraph(6, 0.3, 1))


class AnyOrder(Simulator):
    """Delivers as a seeded chance has it, within the lag; keeps every frame."""

    def __init__(self, topology: Topology, lag: int, seed: int) -> None:
        super().__init__(topology)
        self.lag, self.chance, self.kept = lag, random.Random(seed), []
        self.edges = edges_into(topology, self.nodes)
        self.had = [0] * len(self.edges)
        self.heard: list[list[int]] = []

    def credits(self, round_: int, in_step: Sequence[bool]) -> list[int]:
        for edge, (node, _) in enumerate(self.edges):
            least = round_ if in_step[node] else max(round_ - self.lag, 0)
            # Mostly as late as can be, then all at once: the worst for the weights.
            wanted = least if self.chance.random() < 0.7 else self.chance.randint(least, round_)
            self.had[edge] = max(self.had[edge], wanted)
        return list(self.had)

    def ahead(self, round_: int) -> list[int]:
        if self.lag:
            self.had = [self.chance.choice([had, round_ + 1]) for had in self.had]
        self.heard.append(list(self.had))
        return self.heard[-1]

    def frames_of(self, round_: int, senders: Sequence[int]) -> Tensor:
        return self.kept[round_][list(senders)]

    def send(self, frames_NB: Tensor) -> None:
        self.kept.append(frames_NB)
        self.traffic.count(frames_NB.shape[1])


def lagged(topology: Topology, lag: int, spec: str = "rot:1", rate: float = 0.2) -> LaggedDPCSGP:
    method = LaggedDPCSGP(parse_compressor(spec), 0.1, rate, lag)
    return method.hosting(topology, range(topology.num_nodes))


def train(method: Any, network: Any, steps: int, between: Any = lambda state: None) -> Any:
    """Train on made-up quadratic losses; return the last state.

    Without lag everything is taken before a gradient is computed, as in step.
    """
    nodes = network.nodes
    targets_ND = torch.randn(len(nodes), DIM, generator=torch.Generator().manual_seed(1))
    state, public = method.init(torch.zeros(len(nodes), DIM)), PublicRandomness(0, nodes)
    for _ in range(steps):
        if getattr(method, "max_lag", None) == 0:
            state = method.settle(state, network, public)
        state = method.descend(state, method.model(state) - targets_ND)
        state = method.gossip(state, network, public)
        between(state)
    return state


def under_way(method: LaggedDPCSGP, state: Any, network: AnyOrder) -> tuple[Tensor, float]:
    """Return the mass of x and y in frames that were sent and not taken."""
    x_D, y = torch.zeros(DIM, dtype=torch.float64), 0.0
    public = PublicRandomness(0, network.nodes)
    for edge, (_, sender, weight, _) in enumerate(method.edges):
        copy_D = state.copies_ED[edge].clone()
        for round_ in range(state.round - int(state.behind_E[edge]), state.round):
            size = method.compressor.num_bytes(DIM)
            y_S1, q_SB = frames.split(network.frames_of(round_, [sender]), [sender], round_, size)
            q_SD = method.compressor.decode(q_SB, DIM, public.of([sender]), round_)
            copy_D += q_SD[0]
            x_D += weight * copy_D.double()
            y += weight * float(y_S1)
    return x_D, y


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("lag", [1, 5])
def test_mass_is_conserved_in_any_order(topology: Topology, lag: int) -> None:
    method, network = lagged(topology, lag, rate=0.1), AnyOrder(topology, lag, seed=lag)
    start = torch.randn(topology.num_nodes, DIM, generator=torch.Generator().manual_seed(2))
    state, public = method.init(start), PublicRandomness(0, network.nodes)
    total_D = start.sum(0, dtype=torch.float64)
    for _ in range(60):
        state = method.gossip(state, network, public)
        x_D, y = under_way(method, state, network)
        assert float(state.y_N1.sum()) + y == pytest.approx(topology.num_nodes, rel=1e-12)
        found_D = state.x_ND.sum(0, dtype=torch.float64) + x_D
        assert torch.allclose(found_D, total_D, atol=2e-5)
    # Copies are the senders' own, to the last bit.
    state = method.settle(state, network, public)
    for edge, (_, sender, *_) in enumerate(method.edges):
        assert torch.equal(state.copies_ED[edge], state.x_hat_ND[sender])
    assert float(state.y_N1.sum()) == pytest.approx(topology.num_nodes, rel=1e-12)


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("spec", ["rot:1", "none"])
def test_lag_zero_is_the_rule_in_step(topology: Topology, spec: str) -> None:
    expected = train(DPCSGP(parse_compressor(spec), 0.1, 0.3), Simulator(topology), 20)
    method = lagged(topology, 0, spec, rate=0.3)
    network = AnyOrder(topology, 0, seed=0)
    found = method.settle(train(method, network, 20), network, PublicRandomness(0, network.nodes))
    for name in ("x_ND", "x_hat_ND", "y_N1"):
        # Rounding may turn single bits of a coarse quantiser.
        gap = (getattr(found, name) - getattr(expected, name)).abs().max()
        assert gap < (1e-5 if spec == "none" else 0.1), name


def test_nodes_agree_in_spite_of_lag() -> None:
    topology = directed_exponential(6)
    method, network = lagged(topology, 3, rate=0.28), AnyOrder(topology, 3, seed=4)
    state = train(method, network, 300)
    models_ND = method.model(state)
    targets_ND = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))
    assert (models_ND - targets_ND.mean(0)).norm() < 0.5 * (targets_ND - targets_ND.mean(0)).norm()


def test_weights_stay_above_a_floor_where_one_node_is_slow() -> None:
    """Three times slower, lag 8, rate 0.467 on a ring: without a floor y falls to 1e-3."""
    topology, lowest = directed_ring(10), []
    course = Course(topology, 200, 0, 8, False, 0.467)
    timeline = play(course, Pace(1.0, "exponential", (3,), 3.0), seed=0)
    network = LateSimulator(topology, timeline, 8)
    method = lagged(topology, 8, "none", rate=0.467)
    train(method, network, 200, lambda state: lowest.append(float(state.y_N1.min())))
    assert min(lowest) > 0.05


def test_a_weight_above_all_mass_is_refused() -> None:
    class Hostile(AnyOrder):
        def frames_of(self, round_: int, senders: Sequence[int]) -> Tensor:
            sent = super().frames_of(round_, senders)
            size = lagged(self.topology, 1).compressor.num_bytes(DIM)
            y, q = frames.split(sent, senders, round_, size)
            return frames.join(senders, round_, torch.full_like(y, 1e300), q)

    topology = directed_ring(4)
    with pytest.raises(
        WireError, match=r"push-sum weight 1e\+300, but all 4 nodes together have 4"
    ):
        train(lagged(topology, 1), Hostile(topology, 1, 0), 4)


class Lying(AnyOrder):
    """One node tells another push-sum weight from round 3 on."""

    def __init__(self, topology: Topology, lag: int, liar: int, weight: float) -> None:
        super().__init__(topology, lag, 0)
        self.liar, self.told = liar, weight

    def send(self, frames_NB: Tensor) -> None:
        if self.traffic.rounds >= 3:
            round_, size = self.traffic.rounds, lagged(self.topology, 1).compressor.num_bytes(DIM)
            y_N1, q_NB = frames.split(frames_NB, self.nodes, round_, size)
            y_N1[self.liar] = self.told
            frames_NB = frames.join(self.nodes, round_, y_N1, q_NB)
        super().send(frames_NB)


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf, -1.0, 1e-9, 0.2, 6.1, 1e300])
def test_of_two_senders_the_one_that_lies_is_named(weight: float) -> None:
    topology = directed_exponential(6)
    with pytest.raises(WireError, match="frame from sender 4 in round 3: push-sum weight") as found:
        train(lagged(topology, 2), Lying(topology, 2, 4, weight), 12)
    assert found.value.sender == 4


def test_a_lie_that_only_adds_up_blames_nobody_and_is_not_passed_on() -> None:
    """Each weight alone is possible; who would send too much stops and says what it heard."""
    topology = random_digraph(6, 0.3, 1)
    network = Lying(topology, 2, 4, 6.0)
    with pytest.raises(WireError, match=r"6 of sender 4.* which one cannot be told here") as found:
        train(lagged(topology, 2, rate=0.5), network, 60)
    assert found.value.sender is None


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize(("lag", "rate"), [(1, 1.0), (3, 0.5), (8, 0.9)])
def test_no_honest_weight_is_refused(topology: Topology, lag: int, rate: float) -> None:
    """The bound is a theorem, so it is tried at its worst: far too high rates, late floods."""
    least = torch.tensor(least_weights(topology))[:, None]
    for seed in range(5):
        network, seen = AnyOrder(topology, lag, seed), []
        method = lagged(topology, lag, "none", rate)
        train(method, network, 60)
        for round_, frames_NB in enumerate(network.kept):
            size = method.compressor.num_bytes(DIM)
            y_N1, _ = frames.split(frames_NB, network.nodes, round_, size)
            seen.append(y_N1 / least)
        assert float(torch.cat(seen).min()) >= 0.999999


def test_a_state_that_was_handed_out_does_not_change() -> None:
    topology, seen = directed_ring(4), []

    def look(state: Any) -> None:
        seen.append((state, [value.clone() for value in state if isinstance(value, Tensor)]))

    train(lagged(topology, 2), AnyOrder(topology, 2, 1), 12, look)
    for state, tensors in seen:
        now = [value for value in state if isinstance(value, Tensor)]
        assert all(torch.equal(before, after) for before, after in zip(tensors, now, strict=True))


def test_a_turn_without_a_gradient_moves_nothing_and_is_counted() -> None:
    topology = directed_ring(3)
    turns = tuple(
        tuple(Turn(float(t), (t,), NO_GRADIENT if node == 1 and t % 2 else t) for t in range(4))
        for node in range(3)
    )
    timeline = Timeline(turns, (1.0,) * 3, 4)
    assert timeline.contributed == (4, 2, 4)
    method = lagged(topology, 1)
    state = method.init(torch.zeros(3, DIM))
    moved = method.descend_some(state, torch.ones(3, DIM), [True, False, True])
    assert torch.equal(moved.x_ND[1], state.x_ND[1]) and bool((moved.x_ND[0] != 0).all())
    assert moved.given_N1.flatten().tolist() == [1.0, 0.0, 1.0] and moved.step == 1


class Recorded(AnyOrder):
    """Plays what another network let be taken before each frame, as a party does after a crash."""

    def __init__(
        self, topology: Topology, taken: Sequence[list[int]], heard: Sequence[list[int]]
    ) -> None:
        super().__init__(topology, 0, 0)
        self.taken, self.right_after = taken, heard

    def credits(self, round_: int, in_step: Sequence[bool]) -> list[int]:
        return self.taken[round_]

    def ahead(self, round_: int) -> list[int]:
        return list(self.right_after[round_])


def test_frames_depend_on_what_was_taken_and_not_on_how_it_came() -> None:
    """A turn in step hears twice before one frame; a party that starts again hears all at once."""
    topology, taken, num_in_step = directed_exponential(6), [], 0

    class Noted(AnyOrder):
        def credits(self, round_: int, in_step: Sequence[bool]) -> list[int]:
            nonlocal num_in_step
            num_in_step += any(in_step)
            return super().credits(round_, in_step)

        def ahead(self, round_: int) -> list[int]:
            taken.append(list(self.had))
            return super().ahead(round_)

    method, network = lagged(topology, 5, rate=0.5), Noted(topology, 5, seed=1)
    train(method, network, 60)
    again = Recorded(topology, taken, network.heard)
    train(method, again, 60)
    assert num_in_step > 5
    for round_, (one, two) in enumerate(zip(network.kept, again.kept, strict=True)):
        assert torch.equal(one, two), round_
