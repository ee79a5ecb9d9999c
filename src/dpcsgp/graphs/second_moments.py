"""Second moments of error-feedback gossip, as energies of impulse responses.

One coordinate of gossip with a compressor that keeps `gain` of what it is given and adds
independent noise:

    error      e = x - x_hat
    message    q = gain e + xi,  E xi = 0,  E xi_i^2 = noise E e_i^2, independent between nodes
    public     x_hat' = x_hat + q
    private    x' = x + rate (A - I) x_hat'

Write B = A - I. On the pair (x, x_hat) one round without noise is the block matrix

    M = [ I + rate gain B    rate (1 - gain) B ]      trace = 2 - gain + rate gain B
        [ gain I             (1 - gain) I      ]      det   = 1 - gain

whose entries are polynomials in B and commute. So by Cayley and Hamilton (M^2 = trace M - det)
every impulse response p_k(B) of this linear system obeys one two-term recursion,

    p_(k+1) = (2 - gain + rate gain B) p_k - (1 - gain) p_(k-1).

The second moments need only the energies of those responses,

    energy(level)[i, j] = sum over k >= 1 of level^-k (p_k(B)[i, j])^2,

an (N, N) matrix: no (2N)^2 x (2N)^2 operator is ever built. `ModalEnergies` sums in closed form
over the eigenvectors of A; `SteppedEnergies` walks the recursion, which needs no eigenvectors and
therefore also serves graphs that have none. Reference: the input-output test for mean-square
stability with multiplicative noise (Willems and Blankenship, 1971).

Legend: N nodes. mu is an eigenvalue of B; the *shared* mode is mu = 0, the one in which all nodes
agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import LinearOperator

from dpcsgp.graphs.spectrum import stationary, symmetrized
from dpcsgp.graphs.topology import Topology

Polynomial = tuple[float, ...]  # coefficients of B^0, B^1, ...

# Of the matrix of eigenvectors: squared and times 1e-16 it still leaves six digits.
_LARGEST_CONDITION: Final = 1e5
EXPLICIT_NODES: Final = 64  # the closed form as a matrix takes N^4 operations, as an operator N^3
_SINGLE_PRECISION_NODES: Final = 400


@final
@dataclass(frozen=True)
class Response:
    """One impulse response by its first two polynomials p_1 and p_2.

    `zero_sum` removes the part that all nodes share.
    """

    first: Polynomial
    second: Polynomial
    zero_sum: bool = False


@final
@dataclass(frozen=True)
class GossipRecursion:
    """State the recursion of one compressor gain and one mixing rate.

    Below g = gain, c = rate, and one round is e' = x' - x_hat' with x' = x + c B x_hat'.
    """

    gain: float
    rate: float

    @property
    def noise_to_error(self) -> Response:
        """Return how compression noise comes back in later errors."""
        g, c = self.gain, self.rate
        # A unit xi enters x_hat' and, through gossip, x': e_1 = (c B - 1) xi. Then one round of M.
        return Response((-1.0, c), (g - 1.0, 2.0 * c * (1.0 - g), c * c * g))

    @property
    def noise_to_private(self) -> Response:
        """Return how compression noise moves the private vectors."""
        g, c = self.gain, self.rate
        # x_1 = c B xi, x_hat_1 = xi; x_2 = (1 + c g B) x_1 + c (1 - g) B x_hat_1.
        return Response((0.0, c), (0.0, c * (2.0 - g), c * c * g), zero_sum=True)

    @property
    def drive_to_error(self) -> Response:
        """Return how a unit added to x shows in the errors, from the moment it is added."""
        g, c = self.gain, self.rate
        # e_1 = 1; then x_hat' = g, x' = 1 + c g B, so e_2 = 1 - g + c g B.
        return Response((1.0,), (1.0 - g, c * g))

    @property
    def drive_to_private(self) -> Response:
        """Return how a unit added to a private vector spreads, measured after each exchange."""
        g, c = self.gain, self.rate
        # x_1 = 1 + c g B, x_hat_1 = g; x_2 = (1 + c g B) x_1 + c (1 - g) B x_hat_1.
        return Response((1.0, c * g), (1.0, c * g * (3.0 - g), (c * g) ** 2), zero_sum=True)

    @property
    def surely_contracts(self) -> bool:
        """Tell whether the mean decays on every graph.

        Every eigenvalue mu of A - I lies in the disc |mu + 1| <= 1. A mode is stable for rate * mu
        inside an ellipse that touches 0 with curvature radius gain / (2 - gain): up to that rate no
        graph needs its eigenvalues.
        """
        return self.rate <= self.gain / (2.0 - self.gain)

    def linear_radius(self, eigenvalues_N: np.ndarray) -> float:
        """Return the decay per round without noise: the largest |r| over all modes.

        r solves r^2 - (2 - gain + rate gain mu) r + 1 - gain = 0.
        """
        shared = int(np.argmin(np.abs(eigenvalues_N - 1.0)))
        mu_N = np.delete(eigenvalues_N, shared) - 1.0
        half_N = 0.5 * (2.0 - self.gain + self.rate * self.gain * mu_N)
        # The shared mode has the roots 1 and 1 - gain; 1 is the conserved sum and does not count.
        root_N = np.sqrt(half_N.astype(complex) ** 2 - (1.0 - self.gain))
        roots = np.concatenate([half_N + root_N, half_N - root_N, [1.0 - self.gain]])
        return float(np.abs(roots).max())


@final
@dataclass(frozen=True)
class WholeValueRecursion:
    """State the recursion of block gossip, whose quantiser sees x itself.

    x' = x + B q with q = kept x + xi. Nothing is fed back, so one term suffices:
    p_(k+1) = (1 + kept B) p_k, the recursion above for gain 1 and rate `kept`. The value that the
    quantiser sees next takes the place of the error; of both only the zero-sum part is followed.
    """

    kept: float
    gain: float = 1.0

    @property
    def rate(self) -> float:
        """Return how far one exchange goes on average."""
        return self.kept

    @property
    def noise_to_error(self) -> Response:
        """Return how compression noise comes back in the values of later exchanges."""
        return Response((0.0, 1.0), (0.0, 1.0, self.kept), zero_sum=True)

    @property
    def noise_to_private(self) -> Response:
        """Return how compression noise moves the private vectors: they are the values."""
        return self.noise_to_error

    @property
    def drive_to_error(self) -> Response:
        """Return how a unit added to x shows in the values, from the moment it is added."""
        return Response((1.0,), (1.0, self.kept), zero_sum=True)

    @property
    def drive_to_private(self) -> Response:
        """Return how a unit added to a private vector spreads, measured after each exchange."""
        return Response((1.0, self.kept), (1.0, 2.0 * self.kept, self.kept**2), zero_sum=True)

    @property
    def surely_contracts(self) -> bool:
        """Tell whether the mean decays on every graph."""
        # |1 + kept mu| < 1 holds inside the disc |mu + 1| <= 1, where all eigenvalues lie.
        return self.kept <= 1.0

    def linear_radius(self, eigenvalues_N: np.ndarray) -> float:
        """Return the decay per exchange without noise: the largest |1 + kept mu|."""
        shared = int(np.argmin(np.abs(eigenvalues_N - 1.0)))
        mu_N = np.delete(eigenvalues_N, shared) - 1.0
        return float(np.abs(1.0 + self.kept * mu_N).max(initial=0.0))


Recursion = GossipRecursion | WholeValueRecursion


@final
@dataclass(frozen=True, eq=False)
class ModalEnergies:
    """Sum energies in closed form over eigenvectors: A = right diag(eigenvalues) left.

    With u_k(a) = p_k(mu_a), entry (i, j) of p_k(B) is sum_a right[i, a] u_k(a) left[a, j], so

        energy[i, j] = sum over modes a, b of right[i, a] conj(right[i, b]) left[a, j]
                       conj(left[b, j]) S[a, b],   S[a, b] = sum_k level^-k u_k(a) conj(u_k(b)).
    """

    eigenvalues_N: np.ndarray
    right_NN: np.ndarray
    left_NN: np.ndarray

    def of(self, response: Response, recursion: Recursion, level: float) -> Any:
        """Return the energy as an (N, N) array, for many nodes as a linear operator."""
        weights_NN = self._pair_sums(response, recursion, level)
        num_nodes = len(self.eigenvalues_N)
        right_NN, left_NN = self.right_NN, self.left_NN
        # Few nodes: all N^2 pairs of modes at once, as one matrix product.
        if num_nodes <= EXPLICIT_NODES:
            pairs = (num_nodes, num_nodes * num_nodes)
            out = (right_NN[:, :, None] * right_NN.conj()[:, None, :]).reshape(pairs)
            into = (left_NN[:, None, :] * left_NN.conj()[None, :, :]).reshape(pairs[::-1])
            # A sum of squares: what rounding leaves below zero is zero.
            return np.maximum(np.real(out @ (weights_NN.reshape(-1, 1) * into)), 0.0)

        # Many nodes: energy @ v = diag(right (S * (left diag(v) left^H)) right^H), in N^3.
        def apply(vector_N: np.ndarray) -> np.ndarray:
            inner_NN = weights_NN * ((left_NN * vector_N.ravel()) @ left_NN.conj().T)
            return np.real(np.einsum("ab,ab->a", right_NN @ inner_NN, right_NN.conj()))

        shape = (num_nodes, num_nodes)
        return LinearOperator(shape, matvec=apply, dtype=np.float64)  # pyright: ignore

    def _pair_sums(self, response: Response, recursion: Recursion, level: float) -> np.ndarray:
        """Return S[a, b] = sum over k >= 1 of level^-k u_k(a) conj(u_k(b)) for all pairs of modes.

        Absorb level^(-k/2) into u_k and write w for the conjugate of the second mode:

            u_(k+1) = t u_k - d u_(k-1),   w_(k+1) = t' w_k - d' w_(k-1).

        Multiply the recursions with each other and with w_k or u_k, and sum over k >= 2. With the
        unknowns s = sum_(k>=2) u_k w_k, f = sum_(k>=2) u_(k+1) w_k, b = sum_(k>=2) u_k w_(k+1):

            s - u2 w2 = (t t') s + d d' (s + u1 w1) - t d' (f + u2 w1) - t' d (b + u1 w2)
            f         = t s - d (b + u1 w2)
            b         = t' s - d' (f + u2 w1)

        The last two give f = ahead s + ahead0 and b = behind s + behind0; the first then gives s,
        and S = u1 w1 + s.
        """
        # t, d and the first two terms of every mode.
        mu_N = self.eigenvalues_N - 1.0
        shared = int(np.argmin(np.abs(mu_N)))
        trace_N = (2.0 - recursion.gain + recursion.rate * recursion.gain * mu_N) / np.sqrt(level)
        det_N = np.full(mu_N.shape, (1.0 - recursion.gain) / level)
        u1_N = np.polyval(response.first[::-1], mu_N) / np.sqrt(level)
        u2_N = np.polyval(response.second[::-1], mu_N) / level
        # The shared mode has the roots 1 - gain and 1, and no response excites the 1. In the closed
        # form it would be a pole at level 1: keep the one-term recursion p_(k+1) = (1 - gain) p_k.
        trace_N[shared], det_N[shared] = (1.0 - recursion.gain) / np.sqrt(level), 0.0
        u1_N[shared] = 0.0 if response.zero_sum else response.first[0] / np.sqrt(level)
        u2_N[shared] = trace_N[shared] * u1_N[shared]

        # First mode down the rows, conjugate of the second along the columns (t' = tc, d' = dc).
        t, d, u1, u2 = (v_N[:, None] for v_N in (trace_N, det_N, u1_N, u2_N))
        tc, dc, w1, w2 = (v_N.conj()[None, :] for v_N in (trace_N, det_N, u1_N, u2_N))
        dd, u2w1, u1w2 = d * dc, u2 * w1, u1 * w2
        # f = ahead s + ahead0 and b = behind s + behind0.
        ahead, ahead0 = (t - d * tc) / (1.0 - dd), d * (dc * u2w1 - u1w2) / (1.0 - dd)
        behind, behind0 = (tc - dc * t) / (1.0 - dd), dc * (d * u1w2 - u2w1) / (1.0 - dd)
        # (1 - dd - t tc + t dc ahead + tc d behind) s = source.
        source = u2 * w2 + dd * u1 * w1 - t * dc * (u2w1 + ahead0) - tc * d * (u1w2 + behind0)
        return u1 * w1 + source / (1.0 - dd - t * tc + t * dc * ahead + tc * d * behind)


@final
@dataclass(frozen=True, eq=False)
class SteppedEnergies:
    """Sum energies by walking the recursion block by block.

    What follows the last block is added as a geometric series. The walk ends when two blocks in a
    row move that estimate by less than `tolerance` of it.
    """

    weights: Any  # (N, N), sparse where that is faster
    stationary_N: np.ndarray
    tolerance: float = 1e-7
    max_steps: int = 20_000
    block: int = 16

    def of(self, response: Response, recursion: Recursion, level: float) -> np.ndarray:
        """Return the energy as an (N, N) array."""
        terms = self._walk(response, recursion, level)
        total_NN = next(terms) ** 2
        block_NN, added, estimate, settled, rest = np.zeros_like(total_NN), np.inf, np.inf, 0, 0.0
        for _ in range(self.max_steps // self.block):
            block_NN = np.zeros_like(total_NN)
            for _ in range(self.block):
                block_NN += next(terms) ** 2
            total_NN += block_NN
            # Ratio of successive blocks (0 after exact averaging); the rest of the series is
            # block (ratio + ratio^2 + ...).
            previous_block, added = added, float(block_NN.sum())
            ratio = added / previous_block if previous_block > 0.0 else 0.0
            rest = ratio / (1.0 - ratio) if ratio < 1.0 else 0.0
            # Settled twice: the ratio of one block can be right by accident.
            previous, estimate = estimate, float(total_NN.sum()) + rest * added
            settled = settled + 1 if abs(estimate - previous) <= self.tolerance * estimate else 0
            if settled == 2 or not np.isfinite(estimate):
                break
        return total_NN + rest * block_NN

    def _walk(self, response: Response, recursion: Recursion, level: float) -> Iterator[np.ndarray]:
        """Yield p_k(B) level^(-k/2) for k = 1, 2, ..."""
        scale = 1.0 / np.sqrt(level)
        keep, share = (1.0 - recursion.gain) * scale, recursion.rate * recursion.gain * scale
        shared = 0.0 if response.zero_sum else response.first[0] * scale
        old_NN = self._evaluate(response.first) * scale
        now_NN = self._evaluate(response.second) * scale**2
        yield self._with_column_sums(old_NN, shared)
        while True:
            # Column sums are known exactly: 1^T B = 0, so they follow the shared mode. Restoring
            # them keeps rounding from feeding its root of 1, which would never decay.
            shared *= keep
            yield self._with_column_sums(now_NN, shared)
            # (2 - gain + rate gain (A - I)) p_k - (1 - gain) p_(k-1), every term scaled.
            next_NN = share * (self.weights @ now_NN)
            next_NN += (scale + keep - share) * now_NN
            next_NN -= (keep * scale) * old_NN
            old_NN, now_NN = now_NN, next_NN

    def _evaluate(self, polynomial: Polynomial) -> np.ndarray:
        """Return p(A - I) by Horner's rule."""
        identity_NN = np.eye(len(self.stationary_N), dtype=self.weights.dtype)
        value_NN = polynomial[-1] * identity_NN
        for coefficient in polynomial[-2::-1]:
            value_NN = self.weights @ value_NN - value_NN + coefficient * identity_NN
        return value_NN

    def _with_column_sums(self, matrix_NN: np.ndarray, target: float) -> np.ndarray:
        """Set all column sums to `target`, moving along phi, the eigenvector of the shared mode."""
        matrix_NN += self.stationary_N[:, None] * (target - matrix_NN.sum(axis=0))[None, :]
        return matrix_NN


@lru_cache(maxsize=8)
def modal_energies(topology: Topology) -> ModalEnergies | None:
    """Return the closed form, or None where A has no well-conditioned eigenvectors."""
    symmetric_NN = symmetrized(topology)
    if symmetric_NN is not None:
        # A reversible walk: the symmetric form has orthonormal eigenvectors, so no condition number
        # has to be checked.
        root_N = np.sqrt(stationary(topology))
        values_N, vectors_NN = np.linalg.eigh(symmetric_NN)
        return ModalEnergies(values_N, root_N[:, None] * vectors_NN, vectors_NN.T / root_N)
    values_N, right_NN = np.linalg.eig(topology.weights)
    if np.linalg.cond(right_NN) > _LARGEST_CONDITION:
        return None
    return ModalEnergies(
        values_N.astype(complex), right_NN.astype(complex), np.linalg.inv(right_NN).astype(complex)
    )


def stepped_energies(topology: Topology, tolerance: float = 1e-7) -> SteppedEnergies:
    """Return the walk over the recursion."""
    # Large graphs walk in float32: twice as fast, and six digits of the energies are left.
    kind = np.float32 if topology.num_nodes > _SINGLE_PRECISION_NODES else np.float64
    weights_NN = topology.weights.astype(kind)
    sparse_enough = np.count_nonzero(weights_NN) < 0.05 * weights_NN.size
    phi_N = stationary(topology).astype(kind)
    # A bound on the work: a step is at least N^2 additions.
    max_steps = int(min(20_000, 1e9 / topology.num_nodes**2))
    return SteppedEnergies(
        sparse.csr_matrix(weights_NN) if sparse_enough else weights_NN, phi_N, tolerance, max_steps
    )
