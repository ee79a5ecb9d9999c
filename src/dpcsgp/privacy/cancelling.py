"""Noise that cancels between pairs of nodes: how well each is hidden while the sum stays clean.

In the unit in which gradients are averaged, node i adds its own noise own_i z_i and, for every node
j that it shares a secret stream with, shared z_ij, which j subtracts. Whoever sees all messages and
knows all secrets of the colluders is left with the honest nodes H, whose noise has the covariance

    S = diag(own_i^2) + shared^2 L,        L = m I - 11' the Laplacian of all pairs in H, m = |H|.

One example moves the mean of node i's release alone, by at most sensitivity_i. Between two
Gaussians of one covariance S whose means differ by v only v' S^-1 v matters, so the release is a
Gaussian mechanism with the noise multiplier

    1 / (sensitivity_i sqrt((S^-1)_ii)).

S is the conductance matrix of an electrical network: shared^2 between every pair, own_j^2 from node
j to the ground; (S^-1)_ii is the resistance from i to the ground. Taking a node out, or making its
own noise smaller, can only raise it (Rayleigh's monotonicity law). So of all ways to choose k
colluders the worst takes the k others with the largest own noise: no search is needed.

Pairs that fail to cancel. If the two ends of a pair draw different streams (their keys differ), the
noise of both is independent: of S only the entries ij and ji change, from -shared^2 to 0. If a node
stays silent whose pairs the others still draw, its row and column are struck out of S. Neither ever
hides a node less: 1 / (S^-1)_kk does not fall, whichever pairs fail and whoever is silent.

    Proof. Let the entries ij and ji grow by t from -shared^2 to 0, one pair after the other. All
    along, S is symmetric, its off-diagonal entries are at most 0 and its rows add up to own_i^2 > 0
    or more: it is diagonally dominant, hence positive definite and an M-matrix, and S^-1 has no
    negative entry. So d(S^-1)_kk / dt = -2 (S^-1)_ki (S^-1)_jk <= 0. Silence: 1 / (S^-1)_kk is the
    variance of k's noise given all the other releases, and grows if fewer of them are given.

So eps, which is computed as if all pairs cancelled, holds whatever pairs fail to agree on; only the
average gets noisier. (Leaving a pair's noise out at one end would be another thing: the partner may
then be hidden less. Whoever cannot agree must draw the same amount from a stream of its own.)

Reference: Allouah et al., "The privacy power of correlated noise in decentralized learning" (2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, Literal

from dpcsgp.errors import ConfigError

LARGEST_GROUP: Final = 64  # nodes among which all pairs share noise; more are cut into groups

Colluders = Literal["all"] | int


def noise_groups(num_nodes: int) -> list[range]:
    """Return the public groups within which all pairs share noise: as few and as even as can be.

    >>> [len(group) for group in noise_groups(100)]
    [50, 50]
    """
    count = math.ceil(num_nodes / LARGEST_GROUP)
    edges = [round(index * num_nodes / count) for index in range(count + 1)]
    return [range(low, high) for low, high in itertools.pairwise(edges)]


def effective_noise_multipliers(
    own: Sequence[float],
    shared: float,
    sensitivities: Sequence[float],
    max_colluders: Colluders = "all",
) -> list[float]:
    """Return each node's noise multiplier against everybody who sees all messages, and k colluders.

    Args:
        own: standard deviation of the noise that each node keeps to itself, per coordinate.
        shared: standard deviation of the noise that each pair of a group adds and subtracts.
        sensitivities: by how much one example moves each node's release, in the same unit; zero for
            a node that releases nothing, which then shares no noise with anybody.
        max_colluders: how many other nodes may tell all they know; "all": nobody else is honest.

    Returns:
        One multiplier per node, the smallest over who the colluders are; infinity for nodes that
        release nothing.

    Raises:
        ConfigError: for negative or infinite values, or lists of different lengths.

    >>> effective_noise_multipliers([1.0, 1.0], 10.0, [0.5, 0.5], max_colluders=1)
    [2.0, 2.0]
    """
    _check(own, shared, sensitivities, max_colluders)
    multipliers = [math.inf] * len(own)
    for group in noise_groups(len(own)):
        active = [node for node in group if sensitivities[node] > 0]
        # The worst colluders are those with the largest noise of their own: they come first.
        ordered = sorted((own[node] for node in active), reverse=True)
        known: dict[float, float] = {}  # many nodes are alike: each kind is computed once
        for node in active:
            if own[node] not in known:
                others = ordered.copy()
                others.remove(own[node])
                honest = others[max_colluders:] if max_colluders != "all" else []
                known[own[node]] = _resistance(own[node], honest, shared)
            multipliers[node] = 1 / (sensitivities[node] * math.sqrt(known[own[node]]))
    return multipliers


def _resistance(own: float, others: Sequence[float], shared: float) -> float:
    """Return (S^-1)_ii of a node among honest others, by Sherman and Morrison's formula.

    With d_j = own_j^2 + m shared^2 it is 1 / d_i + shared^2 m / (d_i^2 sum_j own_j^2 / d_j): all
    terms are positive, so nothing cancels in floating point.
    """
    size = 1 + len(others)
    if shared == 0 or size == 1:
        return math.inf if own == 0 else 1 / own**2
    squares = [own**2, *(other**2 for other in others)]
    denominators = [square + size * shared**2 for square in squares]
    grounded = sum(s / d for s, d in zip(squares, denominators, strict=True))
    if grounded == 0:  # nobody has noise of its own: the sum of all is bare
        return math.inf
    return 1 / denominators[0] + shared**2 * size / (denominators[0] ** 2 * grounded)


def _check(
    own: Sequence[float], shared: float, sensitivities: Sequence[float], max_colluders: Colluders
) -> None:
    if len(own) != len(sensitivities):
        raise ConfigError(
            f"own has {len(own)} values and sensitivities {len(sensitivities)}: give one per node"
        )
    for name, values in (("own", own), ("shared", [shared]), ("sensitivities", sensitivities)):
        for value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} = {value}: expected a finite number of at least 0")
    # True is an int in Python.
    number = isinstance(max_colluders, int) and not isinstance(max_colluders, bool)
    if max_colluders != "all" and not (number and max_colluders >= 0):
        raise ConfigError(
            f'privacy.max_colluders = {max_colluders}: expected "all", or a number from 0 on'
        )
