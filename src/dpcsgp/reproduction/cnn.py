"""A small convolutional network on MNIST's pixels at generous budgets, together and alone."""

from __future__ import annotations

from pathlib import Path

from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.outcome import SCORES, markdown, table, write_outcome

BASE = (
    "task.model=cnn",
    "algorithm.steps=80",
    "privacy.expected_batch_size=512",
    "run.evaluate_every=20",
)
METHODS = {
    "DP-CSGP, rot:1": ("algorithm.learning_rate=2",),
    "local, no messages": (
        "algorithm.name=local",
        "algorithm.learning_rate=1",
        "algorithm.polish_rounds=0",
    ),
}


def cnn(experiment: Experiment) -> list[Path]:
    """Train a small CNN (26,010 parameters) on MNIST over 10 nodes at eps 3 and 10."""
    runs = experiment.run(
        [
            cell(*BASE, f"privacy.epsilon={epsilon}", *settings, epsilon=epsilon, method=method)
            for epsilon in (3, 10)
            for method, settings in METHODS.items()
        ]
    )
    columns = ("epsilon", "method", *SCORES, "bytes_per_edge", "epsilon_verified", "repeats")
    page = experiment.write_page(
        "A small CNN on MNIST",
        "10 nodes, directed exponential graph, 80 steps, expected batch 512 of 6,000, delta 1e-4.",
        markdown(table(runs), columns),
        "![accuracy against bits](figure.png)",
    )
    return [
        *write_outcome(
            experiment.out, runs, "epsilon", "method", show=lambda value: f"ε = {value}"
        ),
        page,
    ]
