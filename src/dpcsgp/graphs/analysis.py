"""The constants of the convergence theory of DP-CSGP on a given graph, and what it then asks for.

| symbol | here | meaning |
|---|---|---|
| A | `topology.weights` | column-stochastic weights; with a mixing rate r: I + r (A - I) |
| phi | `stationary` | A phi = phi, sum 1: the limit of push-sum weights over n |
| lambda, C | `decay_*`, `constant_*` | \\|A^k - phi 1^T\\| <= C lambda^k for all k >= 0 |
| beta | `smallest_mass` | smallest entry of A^k 1 over all k >= 1 |
| gamma | `distance_to_identity` | \\|A - I\\| in the spectral norm |
| omega | `largest_omega_*` | compression error: E\\|Q(v) - v\\|^2 <= omega^2 \\|v\\|^2 |
| T, eta, J | `steps`, `learning_rate`, `required_examples` | steps, step size, examples per node |

Theorem 1 asks for omega <= [10 (1 + gamma^2) (1 + 4 C^2 / (1 - lambda)^2)]^(-1/2), J >= c2 sqrt(d
log(1/delta)) n^(5/2) / eps, T = J^2 eps^2 / (c2^2 d log(1/delta)) and eta = 1 / (J eps / (c2 sqrt(n
d log(1/delta))) + L); Proposition 1, which is to make that private, for eps < c1 T / J^2. The
constants c1 and c2 exist but are not given. Reference: arXiv 2512.13583.

lambda and C are not unique. For either norm (the text leaves open which is meant) the pair is
chosen that permits the largest omega; where A is normal that is lambda = |lambda_2(A)|.

Legend: N nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from dpcsgp.errors import ConfigError
from dpcsgp.graphs.spectrum import blas_threads, eigenvalues, stationary
from dpcsgp.graphs.topology import Topology

if TYPE_CHECKING:
    from dpcsgp.compression.base import Compressor

_DENSE_NORM_NODES: Final = 200
_POWER_WORK: Final = 2e11  # multiplications spent on powers of A: 200 powers of 1000 nodes
_MAX_POWERS: Final = 400
_MAX_ROUNDS: Final = 20_000


@final
@dataclass(frozen=True, eq=False)
class GraphConstants:
    """Hold the constants of one graph and mixing rate; letters as in the table above."""

    second_eigenvalue: float
    decay_spectral: float
    constant_spectral: float
    decay_frobenius: float
    constant_frobenius: float
    smallest_mass: float
    distance_to_identity: float
    stationary: np.ndarray

    @property
    def largest_omega_spectral(self) -> float:
        """Return the largest omega that Theorem 1 permits with C in the spectral norm."""
        return _largest_omega(
            self.distance_to_identity, self.constant_spectral, self.decay_spectral
        )

    @property
    def largest_omega_frobenius(self) -> float:
        """Return the largest omega that Theorem 1 permits with C in the Frobenius norm."""
        return _largest_omega(
            self.distance_to_identity, self.constant_frobenius, self.decay_frobenius
        )


@final
@dataclass(frozen=True)
class Condition:
    """State one condition of the theory, whether it holds, and that in plain words."""

    name: str
    holds: bool
    sentence: str


@final
@dataclass(frozen=True, eq=False)
class TheoremReport:
    """Hold what Theorem 1 and Proposition 1 ask for, beside what is given."""

    constants: GraphConstants
    omega: float
    steps: float
    learning_rate: float
    required_examples: float
    epsilon_floor: float
    conditions: tuple[Condition, ...]

    @property
    def holds(self) -> bool:
        """Tell whether every condition holds."""
        return all(condition.holds for condition in self.conditions)


def graph_constants(topology: Topology, mixing_rate: float = 1.0) -> GraphConstants:
    """Compute lambda, C (both norms), beta, gamma and phi of I + mixing_rate (A - I).

    Args:
        topology: the graph, A = `topology.weights`.
        mixing_rate: damping in (0, 1]; 1 is the paper.

    Returns:
        The constants (no units), named as in the table at the top of this file.

    Raises:
        ConfigError: the mixing rate is outside (0, 1].

    >>> from dpcsgp.graphs import directed_exponential
    >>> constants = graph_constants(directed_exponential(10))
    >>> round(constants.decay_spectral, 3), round(constants.distance_to_identity, 3)
    (0.6, 1.186)
    >>> round(constants.largest_omega_spectral, 3), round(constants.largest_omega_frobenius, 4)
    (0.04, 0.0136)
    """
    if not 0.0 < mixing_rate <= 1.0:
        raise ConfigError(
            f"algorithm.mixing_rate = {mixing_rate}: expected a number above 0, at most 1"
        )
    identity_NN = np.eye(topology.num_nodes)
    weights_NN = identity_NN + mixing_rate * (topology.weights - identity_NN)
    phi_N = stationary(topology)
    # Eigenvalues 1 + r (lambda - 1); the one nearest to 1 belongs to phi.
    values_N = 1.0 + mixing_rate * (eigenvalues(topology) - 1.0)
    others_N = np.delete(values_N, int(np.argmin(np.abs(values_N - 1.0))))
    second = float(np.abs(others_N).max(initial=0.0))
    with blas_threads(topology.num_nodes):
        spectral_K, frobenius_K = _power_norms(weights_NN, phi_N, second)
        gamma = _spectral_norm(weights_NN - identity_NN)
    decay_spectral, constant_spectral = _best_pair(spectral_K, spectral_K, second)
    decay_frobenius, constant_frobenius = _best_pair(frobenius_K, spectral_K, second)
    return GraphConstants(
        second_eigenvalue=second,
        decay_spectral=decay_spectral,
        constant_spectral=constant_spectral,
        decay_frobenius=decay_frobenius,
        constant_frobenius=constant_frobenius,
        smallest_mass=_smallest_mass(topology, weights_NN, phi_N),
        distance_to_identity=gamma,
        stationary=phi_N,
    )


def theorem_report(
    topology: Topology,
    compressor: Compressor,
    dim: int,
    *,
    epsilon: float,
    delta: float,
    examples_per_node: int,
    c1: float = 1.0,
    c2: float = 1.0,
    smoothness: float = 1.0,
    mixing_rate: float = 1.0,
) -> TheoremReport:
    """Compare a setting with the conditions of Theorem 1 and Proposition 1.

    Args:
        topology: the graph.
        compressor: gives omega by `compressor.omega_squared(dim)`.
        dim: coordinates of the model, d.
        epsilon: privacy budget of a node.
        delta: its failure probability.
        examples_per_node: J.
        c1: constant of Proposition 1; the paper gives no value.
        c2: constant of Theorem 1; the paper gives no value.
        smoothness: Lipschitz constant L of the gradient.
        mixing_rate: damping in (0, 1]; 1 is the paper.

    Raises:
        ConfigError: a number is out of range.
    """
    for name, value in (
        ("epsilon", epsilon),
        ("c1", c1),
        ("c2", c2),
        ("examples_per_node", examples_per_node),
    ):
        if not value > 0:
            raise ConfigError(f"privacy.{name} = {value}: expected a number above 0")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"privacy.delta = {delta}: expected a number between 0 and 1")
    constants = graph_constants(topology, mixing_rate)
    # T = J^2 eps^2 / floor turns eps < c1 T / J^2 into eps > floor / c1
    floor = c2**2 * dim * math.log(1.0 / delta)
    report = TheoremReport(
        constants=constants,
        omega=math.sqrt(compressor.omega_squared(dim)),
        steps=(examples_per_node * epsilon) ** 2 / floor,
        learning_rate=1.0
        / (examples_per_node * epsilon / math.sqrt(topology.num_nodes * floor) + smoothness),
        required_examples=math.sqrt(floor) * topology.num_nodes**2.5 / epsilon,
        epsilon_floor=floor / c1,
        conditions=(),
    )
    conditions = _conditions(report, epsilon, examples_per_node)
    return TheoremReport(**{**report.__dict__, "conditions": conditions})


def _conditions(report: TheoremReport, epsilon: float, examples: int) -> tuple[Condition, ...]:
    """Judge every condition."""
    limits = report.constants
    enough, long_enough = examples >= report.required_examples, report.steps >= 1.0
    private = epsilon > report.epsilon_floor
    verdicts = [
        Condition(
            f"compression error, {norm} norm",
            report.omega <= limit,
            f"Theorem 1 permits omega up to {limit:.4g} on this graph with C in the {norm} norm; "
            f"the compressor has {report.omega:.4g}: "
            f"{'satisfied' if report.omega <= limit else 'not satisfied'}.",
        )
        for norm, limit in (
            ("spectral", limits.largest_omega_spectral),
            ("Frobenius", limits.largest_omega_frobenius),
        )
    ]
    verdicts += [
        Condition(
            "examples per node",
            enough,
            f"Theorem 1 needs at least {report.required_examples:,.0f} examples per node; there "
            f"are {examples:,}: {'satisfied' if enough else 'not satisfied'}.",
        ),
        Condition(
            "number of steps",
            long_enough,
            f"Theorem 1 prescribes {report.steps:.3g} steps with learning rate "
            f"{report.learning_rate:.3g}"
            f"{'.' if long_enough else ': less than one step, so it says nothing here.'}",
        ),
        Condition(
            "privacy",
            private,
            f"With that number of steps Proposition 1 needs eps above {report.epsilon_floor:.3g} "
            f"(c1 and c2 as given); eps is {epsilon:g}: "
            f"{'satisfied' if private else 'it does not apply'}.",
        ),
    ]
    return tuple(verdicts)


def _largest_omega(gamma: float, constant: float, decay: float) -> float:
    if decay >= 1.0:
        return 0.0  # no pair was found within the powers computed
    return (10.0 * (1.0 + gamma**2) * (1.0 + 4.0 * constant**2 / (1.0 - decay) ** 2)) ** -0.5


def _power_norms(
    weights_NN: np.ndarray, phi_N: np.ndarray, second: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spectral and Frobenius norms of A^k - phi 1^T for k = 0, 1, ...

    If |A^m - phi 1^T| <= lambda^m in the spectral norm, later powers cannot raise C beyond the
    first m of them: the walk ends there.
    """
    num_nodes = len(phi_N)
    # A phi = phi and 1^T A = 1^T, so A^k - phi 1^T = (A - phi 1^T)^k from k = 1 on.
    step_NN = weights_NN - phi_N[:, None]
    power_NN = np.eye(num_nodes) - phi_N[:, None]
    limit = int(min(_MAX_POWERS, max(8, _POWER_WORK / num_nodes**3)))
    spectral, frobenius = [_spectral_norm(power_NN)], [float(np.linalg.norm(power_NN))]
    for k in range(1, limit + 1):
        power_NN = step_NN @ power_NN
        spectral.append(_spectral_norm(power_NN))
        frobenius.append(float(np.linalg.norm(power_NN)))
        if spectral[-1] <= max(second * (1.0 + 1e-9), 1e-12) ** k:
            break
    return np.array(spectral), np.array(frobenius)


def _best_pair(norm_K: np.ndarray, spectral_K: np.ndarray, second: float) -> tuple[float, float]:
    """Return (lambda, C) with the smallest C / (1 - lambda) that the computed powers prove."""
    # Decays from |lambda_2| up to 1, finest near |lambda_2|, where the best pair usually lies.
    best = (1.0, math.inf)
    powers_K = np.arange(len(norm_K))
    for decay in second + (1.0 - second) * np.concatenate([[0.0], np.geomspace(1e-6, 0.999, 400)]):
        decay = max(float(decay), 1e-12)
        bound_K = (decay * (1.0 + 1e-9)) ** powers_K
        # The first m >= 1 with |A^m - phi 1^T| <= lambda^m proves the pair; C is taken below m.
        proven = np.flatnonzero(spectral_K[1:] <= bound_K[1:])
        if len(proven) and decay < 1.0:
            constant = float((norm_K[: proven[0] + 1] / bound_K[: proven[0] + 1]).max())
            if constant / (1.0 - decay) < best[1] / max(1.0 - best[0], 1e-300):
                best = (decay, constant)
    return best


def _spectral_norm(matrix_NN: np.ndarray) -> float:
    if len(matrix_NN) <= _DENSE_NORM_NODES:
        return float(np.linalg.norm(matrix_NN, 2))
    # Large graphs: the largest singular value by Lanczos, from a fixed start so that runs repeat.
    start_N = np.random.default_rng(0).standard_normal(len(matrix_NN))
    return float(
        np.max(np.asarray(svds(matrix_NN, k=1, return_singular_vectors=False, v0=start_N)))
    )


def _smallest_mass(topology: Topology, weights_NN: np.ndarray, phi_N: np.ndarray) -> float:
    """Return the smallest push-sum weight that any node ever has."""
    # Doubly stochastic: every weight stays 1. Otherwise walk A^k 1 until it is n phi.
    if topology.is_doubly_stochastic:
        return 1.0
    limit_N = topology.num_nodes * phi_N
    weights = sparse.csr_matrix(weights_NN)
    mass_N, smallest = np.ones(topology.num_nodes), float(limit_N.min())
    for _ in range(_MAX_ROUNDS):
        mass_N = weights @ mass_N
        smallest = min(smallest, float(mass_N.min()))
        if np.abs(mass_N - limit_N).max() <= 1e-9 * limit_N.min():
            break
    return smallest
