"""How much noise each node brings into the common model, from public facts alone.

A node's gradient carries noise of standard deviation s_i = noise multiplier x clip norm / expected
batch on every coordinate. The average over n nodes that count w_i carries
sqrt(sum_i (w_i s_i)^2) / n: one node with few examples can spoil it for all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

from dpcsgp.runs.design import RunDesign

# how many times as much noise "equal" may bring as "examples" before somebody should know
_MUCH_MORE: Final = 2.0
_MOST: Final = 0.8  # of the variance, from one node
_FEW: Final = 2  # nodes: of two, one always brings half


class AverageNoise(NamedTuple):
    """Standard deviation per coordinate of the average gradient's noise, under both weightings."""

    equal: float
    examples: float


def node_noise(design: RunDesign) -> list[float]:
    """Return each node's noise per coordinate of its gradient; 0 for nodes without data."""
    mechanism = design.mechanism
    if mechanism.shared is not None:  # what pairs share cancels; without the nodes' weights
        law, weights = mechanism.shared, mechanism.expected_batch_sizes
        return [
            own / (factor * batch) if factor else 0.0
            for own, factor, batch in zip(law.own, law.factors, weights, strict=True)
        ]
    rows = zip(
        mechanism.noise_multipliers,
        mechanism.expected_batch_sizes,
        mechanism.num_examples,
        strict=True,
    )
    return [
        multiplier * mechanism.clip_norm / batch if total else 0.0
        for multiplier, batch, total in rows
    ]


def average_noise(design: RunDesign) -> AverageNoise:
    """Return the noise of the average gradient if nodes count equally, and if by their examples."""
    noise, sizes = node_noise(design), design.mechanism.num_examples
    return AverageNoise(
        equal=math.hypot(*noise) / len(noise),
        examples=math.hypot(*_weighted(noise, sizes)) / sum(sizes),
    )


def _weighted(noise: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [size * part for size, part in zip(sizes, noise, strict=True)]


def warn_about_dominating_noise(design: RunDesign) -> None:
    """Warn where one node brings most of the noise of the average gradient.

    A node with few examples does so where all nodes count equally, a node with a small budget in
    any case.
    """
    config, noise, sizes = design.config, node_noise(design), design.mechanism.num_examples
    if not config.method.sends or not any(noise):
        return
    found, counts = average_noise(design), config.algorithm.node_weights
    parts = noise if counts == "equal" else _weighted(noise, sizes)
    node = max(range(len(parts)), key=lambda index: parts[index])
    share = parts[node] ** 2 / sum(part**2 for part in parts)
    if counts == "equal" and found.equal > _MUCH_MORE * found.examples:
        remedy = 'set algorithm.node_weights = "examples" (the declared sizes are public)'
    elif share > _MOST and len(noise) > _FEW:
        remedy = "give it a larger privacy.epsilon or expected_batch_size, or no data (None)"
    else:
        return
    warnings.warn(
        f'algorithm.node_weights = "{counts}": node {node} ({sizes[node]} examples) brings '
        f"{share:.0%} of the noise of the average gradient, which is {found.equal:.3g} a "
        f'coordinate with "equal" and {found.examples:.3g} with "examples"; {remedy}',
        stacklevel=3,
    )
