"""What an attacker makes of the message stream: one score per victim, high if it has the canary.

The attacker hears every frame and knows everything public: graph, weights, learning rates,
momentum, masks, and the canary. Replaying the tape through the algorithm with zero gradients gives
the part of each message that gossip explains; the rest, along the canary's direction, is a known
linear mix of the private gradients, which is inverted. For an exact compressor what remains is
`drawn + Normal(0, noise_multiplier^2)` per step, and the likelihood ratio is the best test there
is. A broken mechanism may be weak elsewhere, so other scores compete, and the best one on separate
trials is used.

Legend: N nodes (two per trial), T trials, K rounds, S steps, D coordinates, B bytes of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpcsgp.algorithms import DPBlock
from dpcsgp.algorithms.base import rate_at
from dpcsgp.algorithms.dp_block import block_indices
from dpcsgp.auditing.colluders import TrialPairs
from dpcsgp.auditing.experiment import Groups, Setting
from dpcsgp.randomness import PublicRandomness

Scores = Callable[["Evidence"], np.ndarray]


@dataclass(frozen=True)
class Evidence:
    """Per victim, in clip norms over the batch size: what the attacker reads along the canary."""

    rounds_TK: np.ndarray  # what each round carried beyond what gossip explains
    steps_TS: np.ndarray  # the private gradients of the steps, recovered from the rounds

    def of(self, trials: np.ndarray) -> Evidence:
        """Return some of the trials."""
        return Evidence(self.rounds_TK[trials], self.steps_TS[trials])


@dataclass
class Replay(Groups):
    """Plays one taped round back and keeps what the receivers decoded."""

    heard_SD: Tensor | None = field(default=None)

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Return the taped frames, whatever is given."""
        self.heard_SD = None
        return self.tape.pop(0)

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Mix as the groups did; the first values of a round are the decoded messages."""
        self.heard_SD = values_SD if self.heard_SD is None else self.heard_SD
        return super().mix(values_SD, onto_ND)


def gather(
    setting: Setting,
    tape: Sequence[Tensor],
    public: PublicRandomness,
    pairs: TrialPairs | None = None,
) -> Evidence:
    """Replay the tape with zero gradients and keep what the frames held beyond the replay.

    With shared noise (`pairs`) all nodes of a trial are listened to, what the colluders know is
    subtracted, and the honest nodes' messages are combined.
    """
    algorithm, direction_D = setting.algorithm, setting.direction_D
    network = Replay(public.nodes, setting.group, list(tape))
    start_ND = torch.zeros(len(public.nodes), setting.dim)
    state: Any = algorithm.init(start_ND, start_ND[0])
    columns, shares = [], []
    for _ in range(len(tape)):
        # `before_ND` is what the gossip so far explains of a sender's x, without any gradient.
        before_ND = state.x_ND
        state = algorithm.gossip(state, network, public)
        # Block gossip reveals one block of coordinates a round, all others reveal all.
        known_D = torch.arange(setting.dim)
        if isinstance(algorithm, DPBlock):
            known_D = block_indices(setting.dim, algorithm.num_blocks)[
                algorithm.block_of_round(state.round - 1, public)
            ]
        # With error feedback the public copy x_hat follows x; otherwise the message is x itself.
        public_ND = state.x_hat_ND if setting.config.method.error_feedback else network.heard_SD
        assert public_ND is not None
        columns.append((public_ND - before_ND[:, known_D]) @ direction_D[known_D])
        shares.append(float(direction_D[known_D].square().sum()))
    rounds_NK = torch.stack(columns, 1).numpy().astype(np.float64)
    rounds_TGK = rounds_NK.reshape(-1, setting.group, len(tape))
    # rounds = mix @ steps (plus coding noise), solved for the steps by least squares
    mix_KS = _gradient_shares(setting, len(tape)) * np.array(shares)[:, None]
    if pairs is None:  # the victim is the first of its trial, the listener has no data
        rounds_TK = rounds_TGK[:, 0]
    else:
        known_TGS = np.stack(pairs.known_steps, -2) @ direction_D.double().numpy()
        rounds_TK = pairs.combine(rounds_TGK - known_TGS @ mix_KS.T)
    unit = setting.mechanism.clip_norm / setting.mechanism.expected_batch_sizes[0]
    return Evidence(rounds_TK / unit, rounds_TK @ np.linalg.pinv(mix_KS).T / unit)


def _gradient_shares(setting: Setting, num_rounds: int) -> np.ndarray:
    """Return (K, S): how far a step's gradient moves what a round carries beyond gossip."""
    momentum = setting.config.algorithm.momentum
    rate = setting.algorithm.learning_rate  # type: ignore[attr-defined]
    # momentum: the velocity of step s holds the gradient of step r <= s times momentum^(s - r)
    steps = np.arange(setting.steps)
    lags_SS = steps[:, None] - steps[None, :]
    decay_SS = np.where(lags_SS >= 0, float(momentum) ** np.maximum(lags_SS, 0), 0.0)
    # the model after step s has moved by the sum of -rate * velocity up to s
    rates_S = np.array([rate_at(rate, int(step)) for step in steps])
    moved_SS = np.cumsum(-rates_S[:, None] * decay_SS, axis=0)
    # a round comes after every `gossip_every` steps; polish rounds after the last step
    gossip_every = setting.config.algorithm.gossip_every
    last_K = np.minimum((np.arange(num_rounds) + 1) * gossip_every, setting.steps) - 1
    cumulative_KS = moved_SS[last_K]
    # exact messages: the replay holds all earlier gradients too
    if not setting.config.method.compresses:
        return np.diff(cumulative_KS, axis=0, prepend=0.0)
    return cumulative_KS


def likelihood_ratio(setting: Setting) -> Scores:
    """Return the log-likelihood ratio of exact messages under the claimed noise and rate."""
    rate, noise = setting.event.sampling_rate, setting.event.noise_multiplier

    # With the canary a step shows x ~ Normal(1, noise^2) if it was drawn, with chance `rate`, else
    # Normal(0, noise^2). Against the latter: (1 - rate) + rate exp((2 x - 1) / (2 noise^2)).
    def drawn(steps_TS: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * steps_TS - 1) / (2 * noise**2))

    def score(evidence: Evidence) -> np.ndarray:
        # under "replace one" the neighbour holds the opposite canary
        against = drawn(-evidence.steps_TS) if setting.event.sampling == "uniform" else 0.0
        return (drawn(evidence.steps_TS) - against).sum(1)

    return score


def discriminant(evidence: Evidence, inside_T: np.ndarray) -> Scores:
    """Fit Fisher's linear discriminant to the rounds, with a tenth of a percent of ridge."""
    x_TK = evidence.rounds_TK
    scale_K = np.maximum(x_TK.std(0), 1e-30)
    x_TK = x_TK / scale_K
    means = [x_TK[inside_T == side].mean(0) for side in (True, False)]
    # the covariance within both groups, which the discriminant whitens
    centred_TK = np.where(inside_T[:, None], x_TK - means[0], x_TK - means[1])
    covariance_KK = centred_TK.T @ centred_TK / len(x_TK) + 1e-3 * np.eye(x_TK.shape[1])
    weights_K = np.linalg.solve(covariance_KK, means[0] - means[1]) / scale_K
    return lambda other: other.rounds_TK @ weights_K


def candidates(setting: Setting, evidence: Evidence, inside_T: np.ndarray) -> dict[str, Scores]:
    """Return all scores that compete; those that learn do so from these trials."""
    return {
        "likelihood ratio": likelihood_ratio(setting),
        "sum over steps": lambda e: e.steps_TS.sum(1),
        "first message": lambda e: np.abs(e.rounds_TK[:, 0]),
        "last message": lambda e: -e.rounds_TK[:, -1],
        "linear discriminant": discriminant(evidence, inside_T),
    }
