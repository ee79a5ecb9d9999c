"""Public features: maps of one image at a time cost no privacy, and buy more than any trick."""

from __future__ import annotations

from pathlib import Path

from dpcsgp.reproduction.experiment import Experiment, cell
from dpcsgp.reproduction.grid import Cell
from dpcsgp.reproduction.outcome import SCORES, markdown, table, write_outcome

TOGETHER, ALONE, CENTRAL = "DP-CSGP, rot:1", "local, no messages", "dp-sgd, all data"
CANCELLING = "DP-CSGP, rot:2, cancelling, 3 colluders"


def features(experiment: Experiment) -> list[Path]:
    """Compare pixels, DCT and HOG on MNIST at eps 0.5 and 0.2, and HOG on CIFAR-10 at eps 3."""
    cells = _mnist(0.5) + _mnist(0.2) + ([] if experiment.quick else _cifar())
    runs = experiment.run(cells)
    scores = (*SCORES, "accuracy_average_model")
    columns = ("task", "inputs", "method", *scores, "bytes_per_edge", "epsilon_verified")
    columns += ("epsilon_all_collude", "repeats")
    page = experiment.write_page(
        "Public features",
        "10 nodes, directed exponential graph, delta 1e-4. Bytes are frames on one edge, headers "
        "included.",
        markdown(table(runs), columns),
        "![accuracy against bits](figure.png)",
    )
    return [*write_outcome(experiment.out, runs, "task", "method", log_x=True), page]


def _mnist(epsilon: float) -> list[Cell]:
    task, base = f"MNIST, ε = {epsilon}", (f"privacy.epsilon={epsilon}",)
    hog = (*base, "task.features=hog:12", "task.model=logistic", "privacy.expected_batch_size=6000")
    small = 1 if epsilon >= 0.5 else 0.5  # more noise wants a smaller step
    settings = {
        ("pixels, 784-128-10", TOGETHER): (*base,),
        ("dct:8, 64-56-10", TOGETHER): (
            *base,
            "task.features=dct:8",
            "task.model=mlp:56",
            "algorithm.steps=38",
            f"algorithm.learning_rate={12 * small:g}",
            "algorithm.polish_rounds=2",
        ),
        ("hog:12, linear", TOGETHER): (
            *hog,
            "algorithm.steps=40",
            f"algorithm.learning_rate={10 * small:g}",
        ),
        ("hog:12, linear", CANCELLING): (
            *hog,
            "algorithm.steps=40",
            "compression.spec=rot:2",
            "privacy.max_colluders=3",
            f"algorithm.learning_rate={10 * small + 3 * (small < 1):g}",
        ),
        ("hog:12, linear", ALONE): (
            *hog,
            "algorithm.name=local",
            "algorithm.steps=20",
            f"algorithm.learning_rate={5 * small:g}",
            "algorithm.polish_rounds=0",
        ),
        ("hog:12, linear", CENTRAL): (
            *hog,
            "algorithm.name=dp-sgd",
            "privacy.expected_batch_size=60000",
            "algorithm.steps=40",
            f"algorithm.learning_rate={10 * small:g}",
        ),
    }
    return [
        cell(*values, task=task, inputs=inputs, method=f"{inputs}: {method}")
        for (inputs, method), values in settings.items()
    ]


def _cifar() -> list[Cell]:
    base = (
        "task.name=cifar10",
        "task.features=hog:12",
        "task.model=logistic",
        "privacy.epsilon=3",
        "algorithm.steps=100",
        "privacy.expected_batch_size=5000",
        "run.evaluate_every=25",
    )
    settings = {
        TOGETHER: (*base, "algorithm.learning_rate=10"),
        CANCELLING: (
            *base,
            "algorithm.learning_rate=10",
            "compression.spec=rot:2",
            "privacy.max_colluders=3",
        ),
        ALONE: (
            *base,
            "algorithm.name=local",
            "algorithm.learning_rate=5",
            "algorithm.polish_rounds=0",
        ),
        CENTRAL: (
            *base,
            "algorithm.name=dp-sgd",
            "privacy.expected_batch_size=50000",
            "algorithm.learning_rate=10",
        ),
    }
    return [
        cell(
            *values,
            task="CIFAR-10, ε = 3",
            inputs="hog:12, linear",
            method=f"hog:12, linear: {method}",
        )
        for method, values in settings.items()
    ]
