"""Your own convolutional network with GroupNorm: four nodes learn 8 x 8 digits.

    python examples/own_image_model.py [--out FOLDER]

The data are scikit-learn's digits. Each example's gradient is averaged over two random views before
it is clipped, which costs time but no privacy. Takes a few seconds.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpcsgp


def show(row: dict[str, Any]) -> None:
    """Print one line per evaluation on the public test set."""
    print(f"step {row['step']:3d}  accuracy {row['accuracy_node_mean']:.3f}")


parser = argparse.ArgumentParser()
parser.add_argument("--out", default=None, help="results folder; default: a new one under runs/")
out = parser.parse_args().out


class Digits(Dataset[tuple[Tensor, int]]):
    """Some of the digits, as any map-style dataset gives them: an image (1, 8, 8), its label."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.pixels, self.labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        # pixels are 0 to 16: a public range, scaled to -1 to 1
        return self.pixels[number].view(1, 8, 8) / 8 - 1, int(self.labels[number])


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    # BatchNorm mixes examples: dpcsgp.train refuses it and shows what to write instead
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128, 10),
)
result = dpcsgp.train(
    model,
    node_data=[Digits(range(start, start + 375)) for start in range(0, 1500, 375)],
    test_data=Digits(range(1500, 1797)),
    epsilon=8.0,
    delta=1e-3,
    settings={
        "task.augmentation": "crop",
        "task.augmentation_multiplicity": 2,
        "algorithm.learning_rate": 2.0,
        "algorithm.steps": 40,
    },
    on_evaluation=show,
    out=out,
)
print(result)
