"""Settings that the caller left open, from public facts alone: shapes, declared sizes, the budget.

A step moves the averaged model by rate x (clipped gradient + noise), so all lengths here are in
clip norms. Let T steps of mean rate eta (momentum and decay counted in) carry noise of standard
deviation s a coordinate, on D coordinates, and let U be the number of units: the outputs of all
weight matrices. The path of clipped gradients is at most eta C T long; noise alone carries the
model eta sqrt(T D) s away. Full composition makes s grow like sqrt(T), so their ratio

    rho = sqrt(D / T) s / C

depends on budget, examples and shapes, hardly on T or the batch. The rule for the rate is that
noise alone moves the model by a fixed multiple of the square root of its units,

    eta C T rho = reach sqrt(U),   but eta C at most `LARGEST_STEP`:

usual initial weights have a length of about 1/sqrt(3) per unit, so that the noise stays comparable
with the start, and the gradients, which agree with each other, get as far as noise permits.
Predictions of classes bear more noise than values do: only the direction of the outputs counts.

Steps, batch and compression hardly matter for accuracy and are chosen by cost: `STEPS` steps, or
as many as three passes over the largest node take; batches of all examples, or `LARGEST_BATCH`; as
many bits per coordinate as keep an edge within `EDGE_BYTES`. docs/own-data.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from dpcsgp.algorithms import LinearDecay
from dpcsgp.config import AlgorithmConfig, Config, change_config, per_node
from dpcsgp.privacy import GaussianMechanism
from dpcsgp.runs.calibration import build_mechanism, node_weights

REACH_OF_CLASSES: Final = 1.3
REACH_OF_VALUES: Final = 0.6
LARGEST_STEP: Final = 4.0  # mean rate x clip norm of a step, momentum counted in
STEPS: Final = 40
MOST_STEPS: Final = 400
PASSES: Final = 3  # over the data of the largest node
LARGEST_BATCH: Final = 2048
EDGE_BYTES: Final = 1_000_000
MOST_BITS: Final = 4
LARGEST_DELTA: Final = 1e-4
RULED: Final = (
    "privacy.delta",
    "privacy.expected_batch_size",
    "algorithm.steps",
    "algorithm.learning_rate",
    "compression.spec",
)


CHOSEN: Final = "settings by the rule"  # among the facts that all processes share


def open_settings(config: Config) -> tuple[str, ...]:
    """Return the settings that the rule will fill in."""
    return tuple(name for name in RULED if is_open(config, name))


def is_open(config: Config, name: str) -> bool:
    """Tell whether nobody has decided about `section.key`."""
    section, key = name.split(".")
    return key not in getattr(config, section).model_fields_set


def with_defaults(
    config: Config,
    module: nn.Module,
    num_examples: Sequence[int],
    *,
    classes: bool,
    started: Config | None = None,
) -> Config:
    """Return the settings with what was left open filled in by the rule above.

    Args:
        config: settings; what was set there stays as it is.
        module: the model; only the shapes of its trainable parameters count.
        num_examples: declared examples of all nodes.
        classes: whether outputs are scores of classes.
        started: settings of the run that is continued: it keeps its own.
    """
    # In this order: the noise follows from budget, batch and steps, and the rate from the noise.
    rules: dict[str, Callable[[Config], Any]] = {
        "privacy.delta": lambda known: _delta(num_examples),
        "privacy.expected_batch_size": lambda known: batch_sizes(num_examples),
        "algorithm.steps": lambda known: _steps(known, num_examples),
        "compression.spec": lambda known: _compression(known, trained_coordinates(module)),
        "algorithm.learning_rate": lambda known: learning_rate(
            known, module, num_examples, classes
        ),
    }
    before = started.flat() if started is not None else {}
    for name, rule in rules.items():
        if is_open(config, name):
            value = before[name] if name in before else rule(config)
            config = change_config(config, {name: value})
    return config


def learning_rate(
    config: Config, module: nn.Module, num_examples: Sequence[int], classes: bool
) -> float:
    """Return the initial learning rate of the rule, for the steps and batches of the settings."""
    settings, clip_norm = config.algorithm, config.privacy.clip_norm
    noise = averaged_noise(config, num_examples)
    reach = REACH_OF_CLASSES if classes else REACH_OF_VALUES
    # eta T, from eta T rho = reach sqrt(U) with rho = sqrt(D / T) s / C, in clip norms
    ratio = math.sqrt(trained_coordinates(module) / settings.steps) * noise / clip_norm
    path = reach * math.sqrt(num_units(module)) / ratio if ratio else math.inf
    step = min(path / settings.steps, LARGEST_STEP)
    return float(f"{step / clip_norm / mean_amplification(settings):.2g}")


def mean_amplification(settings: AlgorithmConfig) -> float:
    """Return the mean step of a run over its initial learning rate: decay and momentum."""
    decay = LinearDecay(1.0, settings.learning_rate_decay, settings.steps)
    mean = sum(decay(step) for step in range(settings.steps)) / settings.steps
    return mean / (1.0 - settings.momentum)


def averaged_noise(
    config: Config, num_examples: Sequence[int], calibrated: GaussianMechanism | None = None
) -> float:
    """Return the deviation per coordinate of the noise that a step of the average model carries.

    Where nothing is averaged it is that of a typical node. Noise that pairs of nodes share counts
    in full, as if it did not cancel. `calibrated` saves asking the accountant again.
    """
    mechanism = calibrated or build_mechanism(config, num_examples)
    weights = node_weights(config, num_examples) or (1.0,) * len(num_examples)
    parts = [weight * noise for weight, noise in zip(weights, _node_noise(mechanism), strict=True)]
    if config.method.sends:
        return math.hypot(*parts) / len(parts)
    return math.sqrt(sum(part**2 for part in parts) / sum(total > 0 for total in num_examples))


def _node_noise(mechanism: GaussianMechanism) -> list[float]:
    rows = zip(mechanism.noise_multipliers, mechanism.expected_batch_sizes, strict=True)
    return [multiplier * mechanism.clip_norm / batch for multiplier, batch in rows]


def trained_coordinates(module: nn.Module) -> int:
    """Return D, the number of coordinates that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def num_units(module: nn.Module) -> int:
    """Return U: the outputs of all trained weight matrices; of a table, the length of an entry."""
    tables = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    }
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    units = sum(p.shape[-1] if id(p) in tables else p.shape[0] for p in matrices)
    return max(units, 1)


def _delta(num_examples: Sequence[int]) -> float:
    """A tenth of one over the examples of the largest node, or less."""
    return float(f"{min(LARGEST_DELTA, 0.1 / max(*num_examples, 1)):.1g}")


def batch_sizes(num_examples: Sequence[int]) -> int | list[int]:
    sizes = [min(max(total, 1), LARGEST_BATCH) for total in num_examples]
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _steps(config: Config, num_examples: Sequence[int]) -> int:
    batches = per_node(config.privacy.expected_batch_size, len(num_examples))
    rates = [
        (max(1, total // 3) if batch == "auto" else batch) / total
        for batch, total in zip(batches, num_examples, strict=True)
        if total
    ]
    return min(max(STEPS, round(PASSES / min(rates))), MOST_STEPS)


def _compression(config: Config, dim: int) -> str:
    """Return as many bits per coordinate as one edge has room for."""
    if not config.method.error_feedback:
        return config.compression.spec
    rounds = config.algorithm.steps // config.algorithm.gossip_every
    bits = 8 * EDGE_BYTES // max(dim * (rounds + config.algorithm.polish_rounds), 1)
    return f"rot:{min(max(bits, 1), MOST_BITS)}"
