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


class AverageNoise(NamedTuple):
    """Standard deviation per coordinate of the average gradient's noise, under both weightings."""

    equal: float
    examples: float


def node_noise(design: RunDesign) -> list[float]:
    """Return each node's noise per coordinate of its gradient; 0 for nodes without data."""
    mechanism = design.mechanism
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
    """Warn where a small node's noise dominates an average in which all nodes count equally."""
    config = design.config
    if config.algorithm.node_weights != "equal" or not config.method.sends:
        return
    found, noise = average_noise(design), node_noise(design)
    if found.equal <= _MUCH_MORE * found.examples:
        return
    node = max(range(len(noise)), key=lambda index: noise[index])
    share = noise[node] ** 2 / sum(part**2 for part in noise)
    warnings.warn(
        f'algorithm.node_weights = "equal": node {node} ({design.mechanism.num_examples[node]} '
        f"examples) brings {share:.0%} of the noise of the average gradient, which is "
        f'{found.equal:.3g} a coordinate and would be {found.examples:.3g} with "examples"; '
        'set algorithm.node_weights = "examples" (the declared sizes are public)',
        stacklevel=3,
    )
