"""Tell before a run whether compressed gossip contracts, how fast, and how far apart nodes stay.

Gossip with error feedback and mixing rate 1 can diverge: what the compressor leaves out comes back
through the network amplified. In one coordinate this is a linear system with multiplicative noise
(see `second_moments`), so its mean square is known exactly. With K(level) = noise * energy of the
responses from compression noise to later errors,

    radius^2 = max(level at which the spectral radius of K is 1, squared decay without noise),

and the mean square decays if and only if radius < 1. x is restricted to zero sum (its sum never
changes), x_hat is not. This is the square root of the spectral radius of the operator P -> M P M^T
+ noise terms on the (2N, 2N) second moments.

The radius needs `compressor.moments(dim)`: exact for random masks and rotated quantisers, and for
dithers as exact as their variance, which is that of a Gaussian-shaped vector: a coarse dither that
diverges makes its error spiky and then grows more slowly than predicted (gsgd:4/256 on 6 nodes:
predicted 1.17, simulated 1.06). Top-k and sign have no such law (their error depends on the shape
of the vector), so the answer is nan.

Legend: N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
from scipy.sparse.linalg import eigs

from dpcsgp.errors import ConfigError
from dpcsgp.graphs.lag import MOST_EXAMINED, lagged_moments
from dpcsgp.graphs.second_moments import (
    EXPLICIT_NODES,
    GossipRecursion,
    Recursion,
    Response,
    WholeValueRecursion,
    modal_energies,
    stepped_energies,
)
from dpcsgp.graphs.spectrum import blas_threads, eigenvalues, stationary
from dpcsgp.graphs.topology import Topology

if TYPE_CHECKING:
    from dpcsgp.compression.base import Compressor

_DENSE_EIGENVALUE_NODES: Final = 200
# On larger graphs walking the recursion is faster than sums over eigenvectors.
_EXACT_NODES: Final = 150
_POWER_STEPS: Final = 30
_DUST: Final = 1e-7  # a radius that rounding alone can make

# A judgement: nodes that differ by more than a tenth of what they learned hardly share a model.
LARGEST_SPREAD: Final = 0.1
BlockOrder = Literal["round-robin", "random"]


def mixing_radius(
    topology: Topology, compressor: Compressor, mixing_rate: float, dim: int, max_lag: int = 0
) -> float:
    """Return the factor per round of the root mean square disagreement: below 1 it shrinks.

    Args:
        topology: the graph; A = `topology.weights`.
        compressor: gives gain and noise by `compressor.moments(dim)`.
        mixing_rate: step of gossip towards the average, above 0.
        dim: coordinates of the model.
        max_lag: rounds by which all messages are late, the worst case of `network.max_lag`.

    Returns:
        The radius per round (no unit), six digits up to 150 nodes, three beyond; nan where the
        compressor has no second-moment law (top-k, sign), or with lag and more than 64 nodes; with
        lag inf where the mean square grows.

    Raises:
        ConfigError: the mixing rate is not a finite number above 0.
    """
    moments = compressor.moments(dim)
    if moments is None or (max_lag and topology.num_nodes > MOST_EXAMINED):
        return float("nan")
    if max_lag:
        return lagged_moments(topology, moments.gain, moments.noise, mixing_rate, max_lag).radius
    return GossipMoments(topology, moments.gain, moments.noise, mixing_rate).radius


def steady_state_disagreement(
    topology: Topology, compressor: Compressor, mixing_rate: float, dim: int, max_lag: int = 0
) -> float:
    """Return the mean over nodes of E (z_i - z_bar)^2 under unit noise per round.

    z_i = x_i / (n phi_i) is the de-biased model with settled push-sum weights, z_bar = sum x / n,
    both taken after the exchange and before the next noise.

    Args:
        topology: the graph.
        compressor: gives gain and noise by `compressor.moments(dim)`.
        mixing_rate: step of gossip towards the average, above 0.
        dim: coordinates of the model.
        max_lag: rounds by which all messages are late.

    Returns:
        The mean square per coordinate, in units of the variance that each round adds to every
        x_i; inf when the mean square grows, nan where no second-moment law exists.
    """
    moments = compressor.moments(dim)
    if moments is None or (max_lag and topology.num_nodes > MOST_EXAMINED):
        return float("nan")
    law = (moments.gain, moments.noise, mixing_rate)
    if max_lag:
        return lagged_moments(topology, *law, max_lag).disagreement
    return GossipMoments(topology, *law).disagreement


def block_radius(
    topology: Topology,
    compressor: Compressor,
    num_blocks: int,
    dim: int,
    order: BlockOrder = "round-robin",
) -> float:
    """Return the factor per round of gossip on one of K = `num_blocks` blocks.

    With r the factor of one exchange of a block: in turn r^(1 / K), drawn at random
    sqrt(1 - 1 / K + r^2 / K). For exact blocks r = |lambda_2(A)|, below 1 on every strongly
    connected graph; for quantised ones that of the second moments. nan where the compressor has no
    law.
    """
    gossip = _block_moments(topology, compressor, num_blocks, dim)
    if gossip is None:
        return float("nan")
    # The K-th root would turn rounding into a slow decay: 1e-9^(1/10) is 0.13.
    factor = gossip.radius if gossip.radius > _DUST else 0.0
    if order == "random":
        return float(np.sqrt(1.0 - (1.0 - factor**2) / num_blocks))
    return factor ** (1.0 / num_blocks)


def block_disagreement(
    topology: Topology,
    compressor: Compressor,
    num_blocks: int,
    dim: int,
    order: BlockOrder = "round-robin",
) -> float:
    """Return the steady-state disagreement of block gossip under unit noise, mean over rounds.

    A block gathers K rounds of noise between its exchanges: K times the disagreement just after
    one, and on average (K - 1) / 2 rounds of unmixed noise, K - 1 if blocks are drawn at random.
    What a quantiser adds for the value that all nodes share is `block_spread`.
    """
    gossip = _block_moments(topology, compressor, num_blocks, dim)
    if gossip is None:
        return float("nan")
    # Fresh unit noise, not mixed yet: mean over i of E (w_i / (n phi_i) - sum w / n)^2, that is
    # 1 / (n phi_i)^2 - 2 / (n^2 phi_i) + 1 / n.
    num_nodes = topology.num_nodes
    scale_N = num_nodes * stationary(topology)
    unmixed = float(np.mean((1.0 / scale_N - 2.0 / num_nodes) / scale_N)) + 1.0 / num_nodes
    waiting = num_blocks - 1 if order == "random" else (num_blocks - 1) / 2
    return num_blocks * gossip.disagreement + waiting * unmixed


def block_spread(topology: Topology, compressor: Compressor, num_blocks: int, dim: int) -> float:
    """Return how far apart quantised blocks keep the nodes, as a share of the common displacement.

    The quantiser sees full values, not differences, so its error follows their size and does not
    fade; zero for exact blocks.
    """
    gossip = _block_moments(topology, compressor, num_blocks, dim)
    return gossip.persistent_spread if gossip else float("nan")


def _block_moments(
    topology: Topology, compressor: Compressor, num_blocks: int, dim: int
) -> GossipMoments | None:
    """Return the mean-square law of one exchange of a block; None: the compressor has none."""
    if not 1 <= num_blocks <= dim:
        raise ConfigError(
            f"algorithm.num_blocks = {num_blocks}: expected from 1 to {dim}, the number of "
            "coordinates of the model"
        )
    moments = compressor.moments(-(-dim // num_blocks))
    return (
        GossipMoments(topology, moments.gain, moments.noise, 1.0, whole_values=True)
        if moments
        else None
    )


def second_eigenvalue(topology: Topology) -> float:
    """Return |lambda_2(A)|, the decay per round of exact push-sum; 0 for a single node."""
    values_N = eigenvalues(topology)
    others = np.delete(values_N, int(np.argmin(np.abs(values_N - 1.0))))
    return float(np.abs(others).max(initial=0.0))


@final
@dataclass(frozen=True, eq=False)
class GossipMoments:
    """Answer mean-square questions about one graph, one compressor law and one mixing rate.

    `whole_values` stands for block gossip: the compressor sees x itself and not the difference to a
    public copy.
    """

    topology: Topology
    gain: float
    noise: float
    mixing_rate: float
    whole_values: bool = False

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mixing_rate) and self.mixing_rate > 0):
            raise ConfigError(
                f"algorithm.mixing_rate = {self.mixing_rate}: expected a number above 0, at most 1"
            )
        if not (0 < self.gain < 2 and 0 <= self.noise < np.inf):
            raise ConfigError(
                f"compressor gain = {self.gain}, noise = {self.noise}: expected 0 < gain < 2, "
                "noise >= 0"
            )

    @cached_property
    def is_stable(self) -> bool:
        """Tell whether the mean square decays: the mean does, and K(1) is a contraction."""
        with blas_threads(self.topology.num_nodes):
            # Where a rate is safe on every graph, the eigenvalues need not be computed.
            safe = self._recursion.surely_contracts
            return (safe or self.linear_radius < 1.0) and self._loop_gain(1.0) < 1.0

    @cached_property
    def radius(self) -> float:
        """Return the square root of the spectral radius of the second-moment operator."""
        with blas_threads(self.topology.num_nodes):
            # one node has nobody to disturb
            silent = self.noise == 0.0 or not self._first_noise_to_error.any()
            return self.linear_radius if silent else self._noisy_radius()

    @cached_property
    def disagreement(self) -> float:
        """Return the stationary mean square of z_i - z_bar under unit noise, inf if there is none.

        With v the second moments of the errors and D their energy under the drive,
        v = D 1 + K v; the private vectors gather the drive and the compression noise it causes.
        """
        if not self.is_stable:
            return float("inf")
        rule, ones_N = self._recursion, np.ones(self.topology.num_nodes)
        with blas_threads(self.topology.num_nodes):
            # What the drive does to x by itself.
            private_N = self._slow_energy(rule.drive_to_private) @ ones_N
            if self.noise > 0.0:
                # The loop: errors make compression noise, which makes errors. Solve for v.
                source_N = self._energy(rule.drive_to_error) @ ones_N
                loop_NN = self.noise * self._energy(rule.noise_to_error)
                error_N = np.linalg.solve(np.eye(len(ones_N)) - loop_NN, source_N)
                # Compression noise of variance noise * v_j at node j moves x too.
                private_N = private_N + self.noise * (
                    self._slow_energy(rule.noise_to_private) @ error_N
                )
            # From x to the de-biased z = x / (n phi).
            scale_N = self.topology.num_nodes * stationary(self.topology)
            return float(np.mean(private_N / scale_N**2))

    @cached_property
    def persistent_spread(self) -> float:
        """Return the root mean square of z_i - z_bar that a quantiser of x keeps up for z_bar = 1.

        The second moments v of what it sees obey v = (n phi)^2 + K v: the shared value n phi_i of
        node i, and what its own noise leaves behind.
        """
        if not self.whole_values or self.noise == 0.0:
            return 0.0
        if not self.is_stable:
            return float("inf")
        squares_N = (self.topology.num_nodes * stationary(self.topology)) ** 2
        with blas_threads(self.topology.num_nodes):
            loop_NN = self.noise * self._energy(self._recursion.noise_to_error)
            seen_N = np.linalg.solve(np.eye(len(squares_N)) - loop_NN, squares_N)
            kept_N = self.noise * (self._slow_energy(self._recursion.noise_to_private) @ seen_N)
        return float(np.sqrt(np.mean(kept_N / squares_N)))

    @cached_property
    def linear_radius(self) -> float:
        """Return the decay per round of the mean, as if the compressor only scaled by its gain."""
        return self._recursion.linear_radius(eigenvalues(self.topology))

    @property
    def _recursion(self) -> Recursion:
        return (
            WholeValueRecursion(self.gain)
            if self.whole_values
            else GossipRecursion(self.gain, self.mixing_rate)
        )

    @cached_property
    def _closed_form(self) -> bool:
        return (
            self.topology.num_nodes <= EXPLICIT_NODES and modal_energies(self.topology) is not None
        )

    def _energy(self, response: Response, level: float = 1.0) -> np.ndarray:
        """Return the (N, N) energy of a response in the errors, where slow modes hardly count."""
        modal = modal_energies(self.topology) if self._closed_form else None
        return (modal or stepped_energies(self.topology, 1e-5)).of(response, self._recursion, level)

    def _slow_energy(self, response: Response, level: float = 1.0) -> Any:
        """Return an energy in which slow modes count, by eigenvectors if possible.

        Only `energy @ vector` is promised.
        """
        modal = modal_energies(self.topology)
        return (modal or stepped_energies(self.topology, 1e-9)).of(response, self._recursion, level)

    def _loop_gain(self, level: float) -> float:
        """Return the spectral radius of K(level)."""
        if self.noise == 0.0:
            return 0.0
        return self.noise * _perron_root(self._energy(self._recursion.noise_to_error, level))

    def _noisy_radius(self) -> float:
        """Return the square root of the level at which the spectral radius of K is 1."""
        # Two lower bounds on that level: K has a pole at the squared decay without noise, and the
        # first term of its series alone gives noise / level * p_1^2.
        floor = max(self.linear_radius**2, self.noise * _perron_root(self._first_noise_to_error**2))
        # Sums over eigenvectors deserve a tight root; a walk, good to 1e-5, does not.
        num_nodes = self.topology.num_nodes
        exact = num_nodes <= _EXACT_NODES and (
            num_nodes <= EXPLICIT_NODES or modal_energies(self.topology) is not None
        )
        energy = self._slow_energy if exact else self._energy

        def loop_gain(level: float) -> float:
            return self.noise * _perron_root(energy(self._recursion.noise_to_error, level))

        return float(np.sqrt(_level_of_unit_gain(loop_gain, floor, 1e-9 if exact else 1e-4)))

    @property
    def _first_noise_to_error(self) -> np.ndarray:
        """Return the first response p_1(A - I) of the noise in the errors."""
        identity_NN = np.eye(self.topology.num_nodes)
        constant, slope = self._recursion.noise_to_error.first
        return constant * identity_NN + slope * (self.topology.weights - identity_NN)


def _level_of_unit_gain(gain: Callable[[float], float], floor: float, tolerance: float) -> float:
    """Return the level above `floor` at which a falling gain is 1.

    1 / gain is 0 at the pole and nearly straight above it, so secants meet 1 in a few steps.
    level * gain falls too, which bounds the answer from above. Where the pole is so weak that no
    secant finds it, the bracket closes on it.
    """
    # The first secant starts at the pole, where 1 / gain - 1 = -1.
    low, high, level, last = floor, np.inf, 1.0 if floor < 1.0 else 1.02 * floor, (floor, -1.0)
    for _ in range(100):
        found = gain(level)
        value = 1.0 / found - 1.0
        # Narrow the bracket: the root lies below level, or between level and level * gain.
        low, high = (low, level) if value >= 0.0 else (level, min(high, level * found))
        # A secant step; outside of the bracket, a step into its lower part, near the pole.
        slope = (value - last[1]) / (level - last[0])
        guess = level - value / slope if slope > 0.0 else low
        if not low < guess < high:
            guess = low + 0.1 * (high - low)
        if min(abs(guess - level), high - low) <= tolerance * level:
            return guess
        level, last = guess, (level, value)
    return level


def _perron_root(matrix: Any) -> float:
    """Return the largest eigenvalue of a non-negative matrix or operator (Perron-Frobenius)."""
    num_nodes = matrix.shape[0]
    if isinstance(matrix, np.ndarray) and num_nodes <= _DENSE_EIGENVALUE_NODES:
        return float(np.abs(np.linalg.eigvals(matrix)).max())
    # Power iteration; the root lies between the smallest and the largest ratio (Collatz-Wielandt).
    vector_N = np.ones(num_nodes)
    for _ in range(_POWER_STEPS):
        image_N = np.maximum(matrix @ vector_N, 1e-300)
        ratio_N = image_N / vector_N
        if ratio_N.max() - ratio_N.min() <= 1e-6 * ratio_N.max():
            return float(ratio_N.mean())
        vector_N = image_N / image_N.mean()
    # A small gap: Arnoldi, from where the power iteration has come to.
    found = eigs(matrix, k=1, which="LR", v0=vector_N, return_eigenvectors=False)
    return float(np.max(np.real(np.asarray(found))))
