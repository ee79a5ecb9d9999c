"""Epochs as steps: how often a node draws each of its examples, in expectation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpcsgp.config import Config, change_config
from dpcsgp.errors import ConfigError
from dpcsgp.runs.calibration import expected_batches
from dpcsgp.runs.default_settings import batch_sizes, is_open


def with_epochs(config: Config, epochs: float | None, num_examples: Sequence[int]) -> Config:
    """Return the settings with as many steps as make so many passes over everybody's examples.

    Args:
        config: the settings.
        epochs: how often each example is drawn, in expectation; None: as many steps as are set.
        num_examples: declared number of examples of every node.
    """
    if epochs is None:
        return config
    if not isinstance(epochs, int | float) or not (math.isfinite(epochs) and epochs > 0):
        raise ConfigError(f"epochs = {epochs!r}: expected a number above 0")
    if not is_open(config, "algorithm.steps"):
        raise ConfigError(
            f"epochs = {epochs:g} and algorithm.steps = {config.algorithm.steps}: give one of them"
        )
    if is_open(config, "privacy.expected_batch_size"):  # the rate follows from both
        batches = batch_sizes(num_examples)
        config = change_config(config, {"privacy.expected_batch_size": batches})
    # Sizes are declared and batches expected: the number of steps is public.
    drawn = sum(
        batch
        for batch, total in zip(expected_batches(config, num_examples), num_examples, strict=True)
        if total
    )
    steps = max(1, round(epochs * sum(num_examples) / drawn))
    return change_config(config, {"algorithm.steps": steps})
