"""The mechanism of a run: expected batches, noise for every node's promise, weights of nodes.

Only public facts are needed: settings, declared sizes, what was released before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpcsgp.config import Config, per_node
from dpcsgp.privacy import (
    GaussianMechanism,
    calibrate_noise,
    paper_noise_multiplier,
)
from dpcsgp.privacy.shared_noise import SharedNoise, calibrate_shared_noise
from dpcsgp.runs.earlier import NOTHING_EARLIER, Earlier, Releases


def expected_batches(config: Config, num_examples: Sequence[int]) -> tuple[int, ...]:
    """Return the expected batch of every node; "auto" is a third of its examples."""
    batches = per_node(config.privacy.expected_batch_size, len(num_examples))
    return tuple(
        max(1, total // 3) if batch == "auto" else batch
        for batch, total in zip(batches, num_examples, strict=True)
    )


def build_mechanism(
    config: Config, num_examples: Sequence[int], earlier: Earlier = NOTHING_EARLIER
) -> GaussianMechanism:
    """Calibrate each node's noise for its own budget, data, batch size and earlier releases."""
    privacy, num_nodes = config.privacy, len(num_examples)
    batches = expected_batches(config, num_examples)
    # Constructed once without noise: a batch larger than the data is refused before the accountant
    # is asked.
    quiet = GaussianMechanism(
        privacy.clip_norm, (0.0,) * num_nodes, batches, tuple(num_examples), privacy.sampling
    )
    if privacy.noise == "none":
        return quiet
    rows = zip(
        per_node(privacy.epsilon, num_nodes),
        per_node(privacy.delta, num_nodes),
        batches,
        num_examples,
        earlier.releases or ((),) * num_nodes,
        strict=True,
    )
    steps = config.algorithm.steps - earlier.steps
    return replace(
        quiet, noise_multipliers=tuple(_noise_multiplier(config, steps, *row) for row in rows)
    )


def share_noise(config: Config, mechanism: GaussianMechanism, price: float) -> GaussianMechanism:
    """Split calibrated noise into what nodes keep and what pairs share, for `max_colluders`.

    Args:
        config: the settings.
        mechanism: all nodes of the run with the independent noise that their promises ask for.
        price: what variance of a single release costs, in variance of the average.

    Returns:
        The mechanism with shared noise; as it is where sharing would not help.
    """
    colluders, sizes = config.privacy.max_colluders, mechanism.num_examples
    assert colluders != "all"
    weights = node_weights(config, sizes) or (1.0,) * len(sizes)
    factors = tuple(
        weight / batch if total else 0.0
        for weight, batch, total in zip(weights, mechanism.expected_batch_sizes, sizes, strict=True)
    )
    sensitivities = [factor * mechanism.clip_norm for factor in factors]
    own, shared = calibrate_shared_noise(
        mechanism.noise_multipliers, sensitivities, colluders, price
    )
    if shared == 0:
        return mechanism
    law = SharedNoise(
        own=own,
        shared=shared,
        factors=factors,
        clip_norm=mechanism.clip_norm,
        sampling_rates=tuple(
            batch / total if total else 1.0
            for batch, total in zip(mechanism.expected_batch_sizes, sizes, strict=True)
        ),
        sampling=mechanism.sampling,
        max_colluders=colluders,
    )
    multipliers = tuple(
        law.event(node).noise_multiplier if total else 0.0 for node, total in enumerate(sizes)
    )
    return replace(mechanism, noise_multipliers=multipliers, shared=law)


def node_weights(config: Config, num_examples: Sequence[int]) -> tuple[float, ...] | None:
    """Return all nodes' factors J_i / mean(J) for declared sizes J; None: all count equally.

    The average over all n nodes of J_i / mean(J) times g_i is sum_i J_i g_i / sum_i J_i: what one
    node with everybody's examples would have. The sizes are declared and public, so nothing further
    is released; noise is scaled with them.
    """
    if config.algorithm.node_weights == "equal":
        return None
    mean = sum(num_examples) / len(num_examples)
    return tuple(total / mean for total in num_examples)


def _noise_multiplier(
    config: Config,
    steps: int,
    epsilon: float,
    delta: float,
    batch: int,
    total: int,
    spent: Releases,
) -> float:
    if total == 0:
        return 0.0
    if config.privacy.noise == "paper":
        return (
            paper_noise_multiplier(epsilon, delta, config.algorithm.steps, total, config.privacy.c2)
            * batch
        )
    return calibrate_noise(
        epsilon=epsilon,
        delta=delta,
        sampling_rate=batch / total,
        steps=steps + config.privacy.replay_reserve,
        sampling=config.privacy.sampling,
        spent=spent,
    )
