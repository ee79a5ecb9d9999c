"""Gossip with messages that come up to k rounds late: edges, floors, and a mean-square law.

With constant delays d_ij the rule of `algorithms.lagged_dp_csgp` is linear. Per coordinate, with
x before the own turn of a round, gain and noise of the compressor, and a drive that training adds:

    e = x - x_hat;   x_hat <- x_hat + gain e + xi,   E xi^2 = noise e^2
    x <- x - r (1 - a_ii) x_hat + r sum_j a_ij x_hat_j of d_ij rounds ago + drive

`LaggedMoments` walks the responses of this system to single impulses. Sums of their squares give
the loop gain (errors make compression noise, which makes errors: below 1 the mean square decays)
and the disagreement under a drive of unit variance per round. With all d_ij = 0 these are the
numbers of `stability.GossipMoments`.

Delays that change from round to round have no such law. Exact messages are stable at any rate and
delay (all terms are averages); what a delay can harm is the error feedback, and there the constant
delays below are the worst that were found: all edges late by k, or all edges of one node.

Legend: N nodes, T rounds walked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, final

import numpy as np

from dpcsgp.graphs.spectrum import stationary

if TYPE_CHECKING:
    from dpcsgp.graphs.topology import Topology

# A node takes its turn in step when its weight would fall below this share of where it belongs.
FLOOR_SHARE: Final = 0.25
MOST_EXAMINED: Final = 64  # nodes; beyond, walks take too long
_MARGIN: Final = 1.5  # a rate that is chosen for lag is stable with so many times as much
_LONGEST_WALK: Final = 1500
_DECAYED: Final = 1e-10  # of the largest energy
_BLOWN_UP: Final = 1e12


def edges_into(topology: Topology, nodes: Iterable[int]) -> list[tuple[int, int]]:
    """Return (node, sender) for every edge that leads to these nodes, self-loops left out."""
    return [
        (node, sender) for node in nodes for sender in topology.senders_to(node) if sender != node
    ]


def weight_floors(topology: Topology) -> list[float]:
    """Return below which push-sum weight each node takes its turn in step."""
    settled_N = topology.num_nodes * stationary(topology)
    return [FLOOR_SHARE * min(1.0, float(weight)) for weight in settled_N]


def least_weights(topology: Topology) -> list[float]:
    """Return below which push-sum weight no frame of a node can be, however late others are.

    With c phi as bound (phi the stationary weights), `weight_floors` keeps a node out of step above
    it. In step it has taken every frame of earlier rounds; those taken late have decayed less, so
    its weight is at least that of `y <- (I + r (A - I)) y`, which keeps c phi. So whoever accepts
    only frames above their senders' bounds sends none below its own, whatever the others do.
    """
    settled_N = topology.num_nodes * stationary(topology)
    share = FLOOR_SHARE / max(1.0, float(settled_N.max()))
    return [share * float(weight) for weight in settled_N]


def is_late(arrived: Iterable[int], round_: int, max_lag: int, rounds: int) -> bool:
    """Tell whether the own frame of a round is late: half of those heard here wait for such frames.

    They have sent their frames of round `round_` + max_lag, or the last of all `rounds` with
    gradients; whoever of them hears this node, too, cannot go on without its frame.

    >>> is_late([5, 9, 3], 2, max_lag=2, rounds=20), is_late([5, 4, 3], 2, max_lag=2, rounds=20)
    (True, False)
    >>> is_late([5, 4, 5], 4, max_lag=2, rounds=5)
    True
    """
    ahead = [count > min(round_ + max_lag, rounds - 1) for count in arrived]
    return bool(ahead) and 2 * sum(ahead) >= len(ahead)


def worst_delays(topology: Topology, max_lag: int) -> Iterator[np.ndarray]:
    """Return the delays (receiver, sender) that decide whether a rate is stable."""
    num_nodes = topology.num_nodes
    yield np.full((num_nodes, num_nodes), max_lag)
    for slow in range(num_nodes if max_lag else 0):
        delays_NN = np.zeros((num_nodes, num_nodes), dtype=int)
        delays_NN[:, slow] = max_lag
        yield delays_NN


@final
@dataclass(frozen=True, eq=False)
class LaggedMoments:
    """Answer mean-square questions about one graph, compressor law, rate and constant delays.

    Attributes:
        topology: the graph.
        gain: of the compressor.
        noise: of the compressor.
        mixing_rate: r.
        delays_NN: rounds by which frames are late, by receiver and sender.
    """

    topology: Topology
    gain: float
    noise: float
    mixing_rate: float
    delays_NN: np.ndarray

    @cached_property
    def is_stable(self) -> bool:
        """Tell whether the mean square decays."""
        return self._noise is not None and _perron(self.noise * self._noise.error_NN) < 1.0

    @cached_property
    def disagreement(self) -> float:
        """Return the mean over nodes of E (z_i - z_bar)^2 under unit noise per round, or inf."""
        drive = self._walk(drives=True) if self.is_stable else None
        if drive is None or self._noise is None:
            return math.inf
        ones_N = np.ones(self.topology.num_nodes)
        loop_NN = np.eye(len(ones_N)) - self.noise * self._noise.error_NN
        error_N = np.linalg.solve(loop_NN, drive.error_NN @ ones_N)
        private_N = drive.private_NN @ ones_N + self.noise * (self._noise.private_NN @ error_N)
        return float(np.mean(private_N / (self.topology.num_nodes * self._settled_N) ** 2))

    @cached_property
    def radius(self) -> float:
        """Return the factor per round of the root mean square disagreement; inf if it grows."""
        if not self.is_stable or self._noise is None:
            return math.inf
        energies_TNN = np.stack(self._noise.error[1:])
        ages_T = np.arange(1, len(energies_TNN) + 1)
        low, high = max(self._noise.ratio, 1e-6), 1.0
        for _ in range(40):
            level = (low + high) / 2
            # Bounded: such large powers only occur far below the root.
            powers_T = np.exp(np.minimum(-math.log(level) * ages_T, 500.0))
            loop_NN = self.noise * np.tensordot(powers_T, energies_TNN, 1)
            low, high = (level, high) if _perron(loop_NN) > 1.0 else (low, level)
        return math.sqrt(high)

    @cached_property
    def _settled_N(self) -> np.ndarray:
        """Return where a unit of mass ends: phi, less what is always under way."""
        phi_N = stationary(self.topology)
        away_NN = self.mixing_rate * self.topology.weights * self.delays_NN
        np.fill_diagonal(away_NN, 0.0)
        return phi_N / (1.0 + float((away_NN @ phi_N).sum()))

    @cached_property
    def _noise(self) -> _Walk | None:
        return self._walk(drives=False)

    def _walk(self, drives: bool) -> _Walk | None:
        """Return the energies of the responses to an impulse at each node; None: no decay."""
        rate, weights_NN = self.mixing_rate, self.topology.weights
        identity_NN = np.eye(self.topology.num_nodes)
        leaves_N1 = rate * (1.0 - np.diag(weights_NN))[:, None]
        off_NN = rate * weights_NN * (1.0 - identity_NN)
        by_lag = [(lag, off_NN * (self.delays_NN == lag)) for lag in sorted({*self.delays_NN.flat})]
        # Columns are impulses: in x for the drive, in x_hat for the compressor's noise.
        x_NN = identity_NN if drives else 0.0 * identity_NN
        hats = [self.gain * x_NN if drives else identity_NN]
        limit_N1 = self._settled_N[:, None] if drives else 0.0
        walk = _Walk([x_NN**2], [0.0 * x_NN])
        for age in range(_LONGEST_WALK):
            x_NN = x_NN - leaves_N1 * hats[age]
            for lag, late_NN in by_lag:
                if age >= lag:
                    x_NN = x_NN + late_NN @ hats[age - lag]
            residual_NN = x_NN - hats[age]
            walk.error.append(residual_NN**2)
            walk.private.append((x_NN - limit_N1) ** 2)
            hats.append(hats[age] + self.gain * residual_NN)
            if walk.ended(2 * by_lag[-1][0] + 8):
                break
        return walk if walk.decays else None


@final
@dataclass(frozen=True, eq=False)
class _Walk:
    """Squared responses by age, of receiver of the effect and node of the impulse."""

    error: list[np.ndarray]
    private: list[np.ndarray]

    def ended(self, least: int) -> bool:
        """Tell whether nothing new is to be expected: all has decayed, or has blown up."""
        size = self._size(-1)
        largest = max(float(self.error[0].max()), float(self.error[1].max()), 1e-30)
        return not size < _BLOWN_UP or (len(self.error) > least and size < _DECAYED * largest)

    @property
    def decays(self) -> bool:
        """Tell whether responses end."""
        return self._size(-1) < _BLOWN_UP and self.ratio < 1.0

    @cached_property
    def ratio(self) -> float:
        """Return the factor per round of squared responses, over the last quarter of the walk."""
        length = len(self.error)
        span = max(length // 4, 1)
        # Largest of two windows: responses may swing.
        late = max(self._size(age) for age in range(length - span, length))
        before = max(self._size(age) for age in range(length - 2 * span, length - span))
        return (late / before) ** (1.0 / span) if before > 0.0 else 0.0

    def _size(self, age: int) -> float:
        return max(float(self.error[age].max()), float(self.private[age].max()))

    def sum_of(self, squares: Sequence[np.ndarray]) -> np.ndarray:
        """Add up squares, and what would follow them at the last ratio."""
        total_NN = np.add.reduce(list(squares))
        return total_NN + squares[-1] * min(self.ratio / (1.0 - self.ratio), 1e9)

    @property
    def error_NN(self) -> np.ndarray:
        """Energy of the errors."""
        return self.sum_of(self.error)

    @property
    def private_NN(self) -> np.ndarray:
        """Energy of x around its limit, from after the first exchange on."""
        return self.sum_of(self.private)


def slower_rate(topology: Topology, gain: float, noise: float, rate: float, max_lag: int) -> float:
    """Return the rate that is good with messages in time and with all of them `max_lag` late.

    How late they will be is not known. In either case a rate costs some disagreement beyond the
    least possible, as a factor; the one whose larger factor is smallest is returned. Delays that
    change are beyond the law, so half as large a rate again has to be stable too.

    Args:
        topology: the graph.
        gain: of the compressor.
        noise: of the compressor.
        rate: the best one in step.
        max_lag: rounds.

    Returns:
        A rate between a tenth of `rate` and `rate`; beyond 64 nodes `rule_of_lag`.
    """
    if not max_lag or topology.num_nodes > MOST_EXAMINED:
        return rule_of_lag(rate, max_lag)
    upper = math.log(rate)

    def cost(log_rate: float, lag: int) -> float:
        """Return the logarithm of the disagreement; very much if a larger rate is not stable."""
        rate, delays_NN = math.exp(log_rate), np.full((topology.num_nodes,) * 2, lag)
        larger = min(_MARGIN * rate, 1.0)
        if lag and not LaggedMoments(topology, gain, noise, larger, delays_NN).is_stable:
            return 700.0 + log_rate  # less is better
        value = LaggedMoments(topology, gain, noise, rate, delays_NN).disagreement
        return math.log(value) if 0.0 < value < math.inf else (700.0 if value > 0.0 else -700.0)

    def lowest(function: Callable[[float], float]) -> float:
        from scipy.optimize import minimize_scalar  # slow to import

        bounds = (upper - math.log(10.0), upper)
        found = minimize_scalar(function, bounds=bounds, method="bounded", options={"xatol": 0.03})
        return min((float(found.x), upper), key=function)

    late = cost(lowest(lambda each: cost(each, max_lag)), max_lag)
    in_time = cost(upper, 0)
    return math.exp(lowest(lambda each: max(cost(each, 0) - in_time, cost(each, max_lag) - late)))


def rule_of_lag(rate: float, max_lag: int) -> float:
    """Return rate / (1 + 0.4 max_lag), a rule of thumb below all rates that were searched.

    >>> rule_of_lag(0.5, 0), rule_of_lag(0.5, 10)
    (0.5, 0.1)
    """
    return rate / (1.0 + 0.4 * max_lag)


@lru_cache(maxsize=512)
def lagged_moments(
    topology: Topology, gain: float, noise: float, rate: float, max_lag: int
) -> LaggedMoments:
    """Return the law with all edges late by `max_lag` rounds, the worst case that was found."""
    delays_NN = np.full((topology.num_nodes,) * 2, max_lag)
    return LaggedMoments(topology, gain, noise, rate, delays_NN)


def _perron(matrix_NN: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrix_NN)).max())
