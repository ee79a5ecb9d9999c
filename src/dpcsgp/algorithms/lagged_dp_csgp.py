"""DP-CSGP for nodes that are not in step: `network.max_lag` = k above 0.

A node sends its frame of round t while those it hears have sent at least t - k; what is late moves
its mass when it comes. Before the own frame of round t, frames of rounds below t are taken, each
once and in order:

    a message:  copy_j += q_j;  x += gamma a_ij copy_j;  y += gamma a_ij y_j
    own turn:   q = Q(x - x_hat);  x_hat += q;  send (q, y)
                x -= gamma (1 - a_ii) x_hat;  y -= gamma (1 - a_ii) y

What is there when the frame leaves is taken at once, up to round t: the next gradient is computed
from it. Messages that come while it is computed wait for the next frame.

With k = 0 this is the rule of `dp_csgp`, up to rounding. `copy_j` is the sender's x_hat, bit for
bit, so what it gives away and what is added here are the same numbers: x and y are conserved for
every order and delay, if what is under way is counted.

Who sends without hearing drains its weight y. A node whose y would fall below a floor takes this
turn in step: it waits for all frames of rounds below t. That cannot lock anybody up: of the nodes
with the fewest rounds each has all it can wait for, sent by nodes with at least as many.

Legend: N hosted nodes, E edges that lead to them (rows in order, senders ascending), S senders of
frames, D coordinates, K numbers beside the payload, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor

from dpcsgp.algorithms.base import GossipSGD, Network, Schedule, displacement, rate_at
from dpcsgp.algorithms.error_feedback import residual_ratio
from dpcsgp.compression import Compressor, frames
from dpcsgp.errors import WireError
from dpcsgp.graphs import Topology
from dpcsgp.graphs.lag import edges_into, least_weights, weight_floors
from dpcsgp.randomness import PublicRandomness

_ROUNDING: Final = 1e-6  # relative, for weights that were added in many orders


class LaggedNetwork(Network, Protocol):
    """A network whose frames may come late."""

    def credits(self, round_: int, in_step: Sequence[bool]) -> Sequence[int]:
        """Wait as long as the rule asks; say how many frames of each edge may be taken.

        Args:
            round_: number of the own frame that comes next.
            in_step: for each hosted node, whether it needs all frames of earlier rounds.

        Returns:
            For each edge a number up to `round_`, at least `round_` - max_lag.
        """
        ...

    def ahead(self, round_: int) -> Sequence[int]:
        """Say how many frames of each edge are taken right after the own frame of a round.

        Asked before that frame is sent, after `credits`; at most `round_` + 1. Does not wait.
        """
        ...

    def frames_of(self, round_: int, senders: Sequence[int]) -> Tensor:
        """Return frames (S, B) of a round that some edge may take."""
        ...

    def send(self, frames_NB: Tensor) -> None:
        """Send the hosted nodes' frames; do not wait for anybody's."""
        ...


class LaggedState(NamedTuple):
    """One row per hosted node or edge, but one `anchor_D` for all.

    `behind_E` counts the rounds of which an edge has brought nothing yet, `given_N1` the gradients
    that a node has put into x, `heard_E1` what its sender said of that last.
    """

    x_ND: Tensor
    x_hat_ND: Tensor
    copies_ED: Tensor
    y_N1: Tensor
    behind_E: Tensor
    given_N1: Tensor
    heard_E1: Tensor
    anchor_D: Tensor
    step: int = 0
    round: int = 0


class LaggedEdge(NamedTuple):
    """An edge that leads to a hosted node."""

    row: int  # of the hosted node
    sender: int
    weight: float  # gamma a_ij
    least: float = 0.0  # push-sum weight of any frame of the sender


@final
@dataclass(frozen=True)
class LaggedDPCSGP(GossipSGD[LaggedState]):
    """Push-sum gossip with error feedback, where messages may be late.

    Attributes:
        compressor: of the differences.
        learning_rate: of a step.
        mixing_rate: gamma.
        max_lag: k; 0 for polish rounds, in which nobody computes and all go in step.
        counts: whether frames say how many gradients their sender has put in.
        num_nodes: of the graph; no push-sum weight can be larger.
        edges: those that lead to hosted nodes; see `hosting`.
        leaves: gamma (1 - a_ii) of each hosted node.
        floors: below which weight a node takes its turn in step.
    """

    model_fields: ClassVar[tuple[str, ...]] = ("x_ND", "y_N1")

    compressor: Compressor
    learning_rate: Schedule
    mixing_rate: float
    max_lag: int
    counts: bool = False
    num_nodes: int = 0
    edges: tuple[LaggedEdge, ...] = ()
    leaves: tuple[float, ...] = ()
    floors: tuple[float, ...] = ()

    def hosting(self, topology: Topology, nodes: Sequence[int]) -> LaggedDPCSGP:
        """Return the method for these nodes of a graph."""
        rate, weights = self.mixing_rate, topology.weights
        row_of = {node: row for row, node in enumerate(nodes)}
        floors, least = weight_floors(topology), least_weights(topology)
        return replace(
            self,
            num_nodes=topology.num_nodes,
            edges=tuple(
                LaggedEdge(row_of[node], sender, rate * float(weights[node, sender]), least[sender])
                for node, sender in edges_into(topology, nodes)
            ),
            leaves=tuple(rate * float(1.0 - weights[node, node]) for node in nodes),
            floors=tuple(floors[node] for node in nodes),
        )

    def init(self, x_ND: Tensor, anchor_D: Tensor | None = None) -> LaggedState:
        """Start with `x = x_ND - anchor`, all copies 0, `y = 1` and nothing under way."""
        x_ND, anchor_D = displacement(x_ND, anchor_D)
        num_nodes, num_edges = len(x_ND), len(self.edges)
        return LaggedState(
            x_ND,
            torch.zeros_like(x_ND),
            x_ND.new_zeros(num_edges, x_ND.shape[1]),
            torch.ones(num_nodes, 1, dtype=torch.float64),
            torch.zeros(num_edges, dtype=torch.int64),
            torch.zeros(num_nodes, 1, dtype=torch.float64),
            torch.zeros(num_edges, 1, dtype=torch.float64),
            anchor_D,
        )

    def counted(self, state: LaggedState, before: LaggedState) -> LaggedState:
        """Return a new start that still counts the gradients of the state before it."""
        return state._replace(given_N1=before.given_N1, heard_E1=before.heard_E1)

    def told(self, state: LaggedState, x_SD: Tensor, network: Network) -> LaggedState:
        """Return a start at which everybody was told the senders' x in full: copies are equal."""
        copies = [x_SD[network.senders.index(edge.sender)] for edge in self.edges]
        copies_ED = torch.stack(copies) if copies else state.copies_ED
        return state._replace(x_hat_ND=x_SD[list(network.own_rows)], copies_ED=copies_ED)

    def model(self, state: LaggedState) -> Tensor:
        """Return `z = x0 + x / y`."""
        return state.anchor_D + state.x_ND / state.y_N1.to(state.x_ND.dtype)

    def average(self, state: LaggedState) -> Tensor:
        """Return `x0 + sum_i x_i / sum_i y_i` of what is not under way."""
        return state.anchor_D + (state.x_ND.sum(0, dtype=torch.float64) / state.y_N1.sum()).to(
            state.x_ND.dtype
        )

    def descend(self, state: LaggedState, grad_ND: Tensor) -> LaggedState:
        """Return the state after a step of every hosted node."""
        return self.descend_some(state, grad_ND, [True] * len(grad_ND))

    def descend_some(
        self, state: LaggedState, grad_ND: Tensor, ready: Sequence[bool]
    ) -> LaggedState:
        """Return the state after a step of those nodes whose gradient is ready."""
        rate = rate_at(self.learning_rate, state.step)
        ready_N1 = torch.tensor(ready, dtype=torch.float64)[:, None]
        moved_ND = torch.sub(state.x_ND, grad_ND, alpha=rate)
        x_ND = torch.where(ready_N1.bool(), moved_ND, state.x_ND)
        return state._replace(x_ND=x_ND, given_N1=state.given_N1 + ready_N1, step=state.step + 1)

    def gossip(self, state: LaggedState, network: Network, random: PublicRandomness) -> LaggedState:
        """Return the state after one round: take what has come, the own turn, and what is there."""
        taken = self._take(state, network, random, [self.max_lag == 0] * len(state.x_ND))
        low = [
            float(y) * (1.0 - leaves) < floor
            for y, leaves, floor in zip(taken.y_N1, self.leaves, self.floors, strict=True)
        ]
        if any(low):
            # From the state before: sums in two parts would round otherwise than those of a start
            # after a crash, which takes all at once, and the frame would be another.
            taken = self._take(state, network, random, low)
        # What is there by now goes into the next gradient; a network may write it down in `send`.
        ahead = _lagged(network).ahead(state.round)
        after = self._own_turn(taken, network, random)
        return self._taken(after, ahead, network, random)

    def settle(self, state: LaggedState, network: Network, random: PublicRandomness) -> LaggedState:
        """Return the state when nothing is under way to the hosted nodes any more."""
        return self._take(state, network, random, [True] * len(state.x_ND))

    def _take(
        self,
        state: LaggedState,
        network: Network,
        random: PublicRandomness,
        in_step: Sequence[bool],
    ) -> LaggedState:
        """Wait as long as the rule asks; take what has come."""
        credits = _lagged(network).credits(state.round, in_step)
        return self._taken(state, credits, network, random)

    def _taken(
        self,
        state: LaggedState,
        credits: Sequence[int],
        network: Network,
        random: PublicRandomness,
    ) -> LaggedState:
        """Let frames that may be taken move their mass: round after round, sender after sender."""
        had = [state.round - int(behind) for behind in state.behind_E]
        if not any(count > before for count, before in zip(credits, had, strict=True)):
            return state
        # Out of place: a state that was handed out never changes.
        taken = state._replace(
            x_ND=state.x_ND.clone(),
            copies_ED=state.copies_ED.clone(),
            y_N1=state.y_N1.clone(),
            heard_E1=state.heard_E1.clone(),
        )
        for round_ in range(min(had), max(credits)):
            due = [e for e, edge in enumerate(self.edges) if had[e] <= round_ < credits[e]]
            if due:
                self._take_round(taken, round_, due, _lagged(network), random)
        behind = [
            state.round - max(count, before) for count, before in zip(credits, had, strict=True)
        ]
        return taken._replace(behind_E=torch.tensor(behind, dtype=torch.int64))

    def _take_round(
        self,
        state: LaggedState,
        round_: int,
        due: Sequence[int],
        network: LaggedNetwork,
        random: PublicRandomness,
    ) -> None:
        """Add the frames of one round on some edges to x, y and the copies, in place."""
        dim = state.x_ND.shape[1]
        senders = sorted({self.edges[edge].sender for edge in due})
        weights_SK, q_SB = frames.split(
            network.frames_of(round_, senders),
            senders,
            round_,
            self.compressor.num_bytes(dim),
            num_weights=self._numbers,
            key=network.key,
        )
        q_SD = self.compressor.decode(q_SB, dim, random.of(senders), round_)
        for edge in due:
            row, sender, weight, _ = self.edges[edge]
            place = senders.index(sender)
            y, count = float(weights_SK[place, 0]), float(weights_SK[place, -1]) - 1.0
            # Whatever a sender says is judged before it is used.
            fault = self._weight_fault(y, self.edges[edge].least)
            if fault is None and self.counts:
                fault = _count_fault(count, float(state.heard_E1[edge]))
            if fault is not None:
                raise WireError(f"frame from sender {sender} in round {round_}: {fault}", sender)
            state.copies_ED[edge] += q_SD[place]
            state.x_ND[row].add_(state.copies_ED[edge], alpha=weight)
            state.y_N1[row] += weight * y
            state.heard_E1[edge] = count if self.counts else 0.0
        heard = dict(zip(senders, weights_SK[:, 0].tolist(), strict=True))
        for row in {self.edges[edge].row for edge in due}:
            self._check_own_weight(row, float(state.y_N1[row]), round_, heard)

    def _weight_fault(self, y: float, least: float) -> str | None:
        """Say why no node that keeps to the rule can send this weight, or None."""
        if y > self.num_nodes * (1 + _ROUNDING):
            return (
                f"push-sum weight {y:g}, but all {self.num_nodes} nodes together have "
                f"{self.num_nodes}"
            )
        if y < least * (1 - _ROUNDING):
            return f"push-sum weight {y:g}, but on this graph it cannot fall below {least:.4g}"
        return None

    def _check_own_weight(self, row: int, y: float, round_: int, heard: dict[int, float]) -> None:
        """Stop before the own frame is one that others refuse, and blame this node for."""
        if y <= self.num_nodes * (1 + _ROUNDING):
            return
        mine = [edge.sender for edge in self.edges if edge.row == row and edge.sender in heard]
        told = ", ".join(f"{heard[sender]:.4g} of sender {sender}" for sender in mine)
        raise WireError(
            f"frames of round {round_} make the own push-sum weight {y:.4g}, but all "
            f"{self.num_nodes} nodes together have {self.num_nodes}: one of those heard ({told}), "
            "or one that they hear, does not keep to the rule; which one cannot be told here"
        )

    def _own_turn(
        self, state: LaggedState, network: Network, random: PublicRandomness
    ) -> LaggedState:
        """Send `Q(x - x_hat)` and the weight; keep what the receivers do not get."""
        q_NB = self.compressor.encode(state.x_ND - state.x_hat_ND, random, state.round)
        numbers = [state.y_N1, state.given_N1 + 1.0] if self.counts else [state.y_N1]
        sent = frames.join(network.nodes, state.round, torch.cat(numbers, 1), q_NB, network.key)
        # The own message as receivers decode it.
        q_ND = self.compressor.decode(
            q_NB, state.x_ND.shape[1], random.of(network.nodes), state.round
        )
        x_hat_ND, x_ND = state.x_hat_ND + q_ND, state.x_ND.clone()
        for x_D, x_hat_D, leaves in zip(x_ND, x_hat_ND, self.leaves, strict=True):
            x_D.add_(x_hat_D, alpha=-leaves)
        leaves_N1 = torch.tensor(self.leaves, dtype=torch.float64)[:, None]
        # Only now is the new state known to be sound.
        _lagged(network).send(sent)
        return state._replace(
            x_ND=x_ND,
            x_hat_ND=x_hat_ND,
            y_N1=state.y_N1 - leaves_N1 * state.y_N1,
            behind_E=state.behind_E + 1,
            round=state.round + 1,
        )

    @property
    def _numbers(self) -> int:
        """Numbers in a frame beside its payload."""
        return 2 if self.counts else 1

    def residual_ratio(self, state: LaggedState) -> float:
        """Return the mean over nodes of `|x - x_hat| / |x|`."""
        return residual_ratio(state.x_ND, state.x_hat_ND)

    def wire_bytes(self, dim: int, rounds: int) -> int:
        """Count frames: compressed difference, one or two numbers, header and tag."""
        return rounds * frames.frame_bytes(self.compressor.num_bytes(dim), self._numbers)

    def paper_bits(self, dim: int, rounds: int) -> int:
        """Count compressed differences by the paper's formula."""
        return rounds * self.compressor.paper_bits(dim)


def _count_fault(count: float, before: float) -> str | None:
    """Say why a frame cannot bring this number of gradients after the one before, or None."""
    if count - before in (0.0, 1.0):
        return None
    return (
        f"{count:.17g} gradients put in, after {before:g} in the frame before: a frame brings one "
        "or none"
    )


def _lagged(network: Network) -> LaggedNetwork:
    """Return the network as one whose frames may be late; any other is a mistake of the caller."""
    assert hasattr(network, "credits"), "network.max_lag > 0 needs a network that takes frames late"
    return network  # type: ignore[return-value]
