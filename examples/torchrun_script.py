"""One script, two ways to run it: alone it simulates all nodes, under torchrun its share of them.

    python examples/torchrun_script.py --out runs/alone
    torchrun --nproc-per-node 2 examples/torchrun_script.py --out runs/together

Every process reads the data of the nodes it hosts and of no other. On machines of their own, each
gives None for the nodes elsewhere, and all declare the sizes:

    train(..., num_examples=[300, 400, 500, 300])

Regression, with a loss and a metric of one's own.
"""

import argparse

import torch
from torch import Tensor, nn

import dpcsgp

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, help="results folder, the same for all processes")
out = parser.parse_args().out


def make_data(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Return points and the noisy values of a function at them."""
    random = torch.Generator().manual_seed(seed)
    points = torch.rand(size, 2, generator=random) * 2 - 1
    return points, points.prod(1) + 0.05 * torch.randn(size, generator=random)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one loss per example, which is what makes clipping per example possible."""
    return nn.functional.huber_loss(outputs.squeeze(1), targets, reduction="none")


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the metric of the whole public test set."""
    return (outputs.squeeze(1) - targets).abs().mean()


torch.manual_seed(0)  # all processes start from the same model
result = dpcsgp.train(
    nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)),
    node_data=[make_data(seed, size) for seed, size in enumerate([300, 400, 500, 300])],
    test_data=make_data(99, 200),
    loss=huber,
    metrics={"mean_absolute_error": mean_absolute_error},
    epsilon=4.0,
    delta=1e-3,
    settings={
        "algorithm.learning_rate": 0.5,
        "algorithm.steps": 60,
        "algorithm.node_weights": "examples",
    },
    out=out,
)
print(f"nodes {result.nodes}: {result}", flush=True)
