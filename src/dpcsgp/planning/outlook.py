"""The model behind the planner's ranking: how far noise and few steps keep a run from its goal.

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
from dpcsgp.privacy.cancelling import noise_groups
from dpcsgp.privacy.shared_noise import calibrate_shared_noise

DISTANCE: Final = 25.0  # R
SIGNAL: Final = 0.5  # G / clip norm


@final
@dataclass(frozen=True)
class Gossip:
    """How one way of exchanging messages contracts disagreement and averages noise."""

    radius: float  # factor on disagreement per step; 1: nothing is exchanged while training
    disagreement: float  # variance around the average in the steady state, under unit noise
    num_averaged: int  # nodes whose noise is averaged
    polish_radius: float | None = None  # of the rounds at the end, if it is another one


@final
@dataclass(frozen=True)
class Sharing:
    """What shared noise does to standard deviations, as factors on those of independent noise."""

    of_message: float = 1.0
    of_average: float = 1.0

    @classmethod
    def among(cls, num_nodes: int, max_colluders: int, price: float) -> Sharing:
        """Return the factors for equal nodes by the rule of `privacy.shared_noise`.

        >>> sharing = Sharing.among(10, 0, price=0.01)
        >>> sharing.of_average < 0.5 and sharing.of_message < 2
        True
        """
        equal = [1.0] * num_nodes
        own, shared = calibrate_shared_noise(equal, equal, max_colluders, price)
        others = len(noise_groups(num_nodes)[0]) - 1
        return cls(math.sqrt(own[0] ** 2 + others * shared**2), own[0])


@final
@dataclass(frozen=True)
class Outlook:
    """What one plan promises; all noises are standard deviations per coordinate."""

    noise_multiplier: float
    learning_rate: float
    gradient_noise: float  # of the average of all nodes' gradients, s above
    model_noise: float  # what it leaves in the averaged model when training ends
    reference: float  # R / sqrt(d): the distance to be walked, per coordinate
    disagreement: float  # of a node's model from the average, sqrt(D) above
    shortfall: float  # the figure that plans are ranked by; smaller is better

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
    sharing: Sharing | None = None,
) -> Outlook:
    """Predict how a run with these settings ends; the learning rate is chosen by the rule above.

    Of `settings` the steps, momentum, decay and polish rounds count. `sharing` says what shared
    noise does to the noise of a message and of the average; None: noise is independent.
    """
    # noise of one node's gradient, of the average over nodes, and the length sqrt(G^2 + d s^2)
    sharing = sharing or Sharing()
    alone = noise_multiplier * clip_norm / batch_size
    node_noise = sharing.of_message * alone
    gradient_noise = sharing.of_average * alone / math.sqrt(gossip.num_averaged)
    gradient_length = math.hypot(SIGNAL * clip_norm, math.sqrt(dim) * gradient_noise)

    # eta, then the initial rate whose schedule has this mean once momentum has amplified it
    eta = DISTANCE / (math.sqrt(settings.steps) * gradient_length)
    decay = LinearDecay(1.0, settings.learning_rate_decay, settings.steps)
    decay_T = np.array([decay(step) for step in range(settings.steps)])
    learning_rate = round_to(eta * (1.0 - settings.momentum) / float(decay_T.mean()), digits=2)
    rates_T = learning_rate * decay_T

    disagreement = node_noise * _final_disagreement(rates_T, settings, gossip)
    optimization_error = gradient_length / (math.sqrt(settings.steps) * clip_norm)
    return Outlook(
        noise_multiplier=noise_multiplier,
        learning_rate=learning_rate,
        gradient_noise=gradient_noise,
        model_noise=gradient_noise * _accumulated_noise(rates_T, settings.momentum),
        reference=DISTANCE / math.sqrt(dim),
        disagreement=disagreement,
        shortfall=optimization_error + dim * disagreement**2 / (2.0 * DISTANCE**2),
    )


def round_to(value: float, digits: int) -> float:
    """Round to significant digits.

    >>> round_to(2.3456, 2)
    2.3
    """
    return float(f"{value:.{digits}g}")


def _accumulated_noise(rates_T: np.ndarray, momentum: float) -> float:
    """Return the standard deviation of the final model, for unit noise in every gradient."""
    # A gradient moves the model by its own rate, and through momentum by later rates:
    # influence[t] = rate[t] + momentum * influence[t + 1].
    influence_T = np.array(rates_T)
    for step in range(len(rates_T) - 2, -1, -1):
        influence_T[step] += momentum * influence_T[step + 1]
    return float(np.sqrt((influence_T**2).sum()))


def _final_disagreement(rates_T: np.ndarray, settings: AlgorithmConfig, gossip: Gossip) -> float:
    """Return a node's root mean square distance from the average, for unit noise per gradient."""
    if gossip.num_averaged == 1 or gossip.disagreement == 0.0:
        return 0.0
    polish = (gossip.polish_radius or gossip.radius) ** settings.polish_rounds
    if gossip.radius == 1.0:  # nothing was exchanged: a node keeps all of its own noise
        return polish * _accumulated_noise(rates_T, settings.momentum)
    # With gossip, the noise of a step fades within 1 / (1 - radius^2) rounds. Only the learning
    # rates of these last steps count, and the steady state under their mean square is reached.
    memory = 1.0 / max(1.0 - gossip.radius**2, 1.0 / len(rates_T))
    recent = rates_T[-min(len(rates_T), math.ceil(memory)) :] / (1.0 - settings.momentum)
    steady = math.sqrt(gossip.disagreement) * float(np.sqrt((recent**2).mean()))
    return steady * polish
