"""The model behind the planner's ranking: how far noise, the number of steps and disagreement keep
a run from its goal.

A run walks from the public start towards a model at distance R. Each step moves along the average
of n private gradients: its useful part has length about G, its noise has variance s^2 = (noise
multiplier * clip norm / batch size)^2 / n in each of d coordinates. For convex losses, T steps with
the best constant learning rate end within

    R sqrt((G^2 + d s^2) / T),   reached with learning rate eta = R / sqrt(T (G^2 + d s^2)),

of the optimum (Shamir, Zhang 2013, arXiv 1212.1824, without its logarithm). The learning rate of a
plan is this eta, shared between momentum and decay: the mean over the schedule of rate / (1 -
momentum) is eta. Nodes that disagree pay for it on top:

    shortfall = sqrt((G^2 + d s^2) / T) / clip_norm + d D / (2 R^2),

where D is the variance per coordinate of a node's model around the average when training ends: the
steady-state disagreement under unit noise, times the noise that a node's own steps bring in, less
what polish rounds take away. Smaller is better; only differences between plans for the same task,
features and model mean something. R and G are references, not measurements of the data: R = 25 and
G = half the clip norm give learning rates that train a 784-128-10 network on MNIST well at eps 0.2
and 0.5 (docs/stability.md has the runs). The ranking knows nothing of skewed partitions.

Legend: n nodes, d coordinates, T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from dpcsgp.algorithms import LinearDecay
from dpcsgp.config import AlgorithmConfig

DISTANCE: Final = 25.0  # R
SIGNAL: Final = 0.5  # G / clip norm


@final
@dataclass(frozen=True)
class Gossip:
    """How one way of exchanging messages behaves: radius per step, disagreement under unit noise,
    nodes averaged.

    Radius 1 means that nothing is exchanged while training; `polish_radius` is then that of the
    rounds at the end."""

    radius: float
    disagreement: float
    num_averaged: int
    polish_radius: float | None = None


@final
@dataclass(frozen=True)
class Outlook:
    """What one plan promises; noises are per coordinate, `model_noise` and `disagreement` in units
    of the model."""

    noise_multiplier: float
    learning_rate: float
    gradient_noise: float
    model_noise: float
    reference: float  # R / sqrt(d): the distance to be walked, per coordinate
    disagreement: float
    shortfall: float

    @property
    def noise_to_reference(self) -> float:
        """Return the noise of the averaged model per coordinate over the reference."""
        return self.model_noise / self.reference


def foresee(
    settings: AlgorithmConfig,
    gossip: Gossip,
    dim: int,
    noise_multiplier: float,
    clip_norm: float,
    batch_size: int,
) -> Outlook:
    """Return the outlook of `settings` (steps, momentum, decay, polish rounds), with the learning
    rate chosen by the rule."""
    own_noise = noise_multiplier * clip_norm / batch_size
    gradient_noise = own_noise / math.sqrt(gossip.num_averaged)
    strength = math.hypot(SIGNAL * clip_norm, math.sqrt(dim) * gradient_noise)
    wanted = DISTANCE / (math.sqrt(settings.steps) * strength)
    shape = LinearDecay(1.0, settings.learning_rate_decay, settings.steps)
    shape_T = np.array([shape(step) for step in range(settings.steps)])
    learning_rate = round_to(wanted * (1.0 - settings.momentum) / float(shape_T.mean()), digits=2)
    rates_T = learning_rate * shape_T
    disagreement = own_noise * _late_disagreement(rates_T, settings, gossip)
    return Outlook(
        noise_multiplier=noise_multiplier,
        learning_rate=learning_rate,
        gradient_noise=gradient_noise,
        model_noise=gradient_noise
        * float(np.sqrt((_reach(rates_T, settings.momentum) ** 2).sum())),
        reference=DISTANCE / math.sqrt(dim),
        disagreement=disagreement,
        shortfall=strength / (math.sqrt(settings.steps) * clip_norm)
        + dim * disagreement**2 / (2.0 * DISTANCE**2),
    )


def round_to(value: float, digits: int) -> float:
    """Round to significant digits.

    >>> round_to(2.3456, 2)
    2.3
    """
    return float(f"{value:.{digits}g}")


def _reach(rates_T: np.ndarray, momentum: float) -> np.ndarray:
    """Return by how much a unit in the gradient of each step has moved the model at the end,
    momentum included."""
    reach_T = np.array(rates_T)
    for step in range(len(rates_T) - 2, -1, -1):
        reach_T[step] += momentum * reach_T[step + 1]
    return reach_T


def _late_disagreement(rates_T: np.ndarray, settings: AlgorithmConfig, gossip: Gossip) -> float:
    """Return the root mean square distance of a node from the average at the end, for unit noise in
    its gradients."""
    if gossip.num_averaged == 1 or gossip.disagreement == 0.0:
        return 0.0
    polished = (gossip.polish_radius or gossip.radius) ** settings.polish_rounds
    if gossip.radius == 1.0:
        return polished * float(np.sqrt((_reach(rates_T, settings.momentum) ** 2).sum()))
    # rounds after which a step's noise is forgotten
    memory = 1.0 / max(1.0 - gossip.radius**2, 1.0 / len(rates_T))
    recent = rates_T[-min(len(rates_T), math.ceil(memory)) :] / (1.0 - settings.momentum)
    settled = math.sqrt(gossip.disagreement) * float(np.sqrt((recent**2).mean()))
    return settled * polished
