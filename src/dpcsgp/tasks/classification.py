"""Classification with one tensor of inputs for all hosted nodes, laid out node after node.

Legend: N hosted nodes, E places for examples, J examples, K models, D coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from dpcsgp.parameters import ParameterLayout
from dpcsgp.tasks.base import LossPerExample, gather

EVALUATION_BATCH = 2000


def cross_entropy_per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each example."""
    return cross_entropy(outputs, targets, reduction="none")


@final
@dataclass(frozen=True)
class Classification:
    """A module trained by cross-entropy, evaluated by accuracy on public test data."""

    module: nn.Module
    inputs: Tensor  # (J, ...), the hosted nodes' examples one node after the other
    labels: Tensor  # (J,)
    num_examples: tuple[int, ...]
    test_inputs: Tensor
    test_labels: Tensor
    loss: LossPerExample = cross_entropy_per_example

    @classmethod
    def split(
        cls,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        parts: Sequence[Tensor],
        test: tuple[Tensor, Tensor],
    ) -> Classification:
        """Give each hosted node its part (example numbers) of a data set."""
        order = torch.cat([torch.as_tensor(part) for part in parts])
        sizes = tuple(len(part) for part in parts)
        return cls(module, inputs[order], labels[order], sizes, *test)

    def to(self, device: str) -> Classification:
        """Return the task with module and data on a device."""
        tensors = {
            name: getattr(self, name).to(device)
            for name in ("inputs", "labels", "test_inputs", "test_labels")
        }
        return replace(self, module=self.module.to(device), **tensors)

    @property
    def held_examples(self) -> tuple[int, ...]:
        """Every node holds what it declares."""
        return self.num_examples

    def examples(self, indices_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and labels (N, E)."""
        inputs, labels = gather(indices_NE, self.num_examples, self.inputs, self.labels)
        return inputs, labels

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first test images and labels."""
        return self.test_inputs[:count], self.test_labels[:count]

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return the accuracy of each model on the test set."""
        views = ParameterLayout.of(self.module).views(models_KD.to(self.test_inputs.device))
        rows = range(models_KD.shape[0])
        accuracies = [
            self._accuracy({name: value[row] for name, value in views.items()}) for row in rows
        ]
        return {"accuracy": torch.tensor(accuracies)}

    @torch.inference_mode()
    def _accuracy(self, parameters: dict[str, Tensor]) -> float:
        correct = 0
        for inputs, labels in zip(
            self.test_inputs.split(EVALUATION_BATCH),
            self.test_labels.split(EVALUATION_BATCH),
            strict=True,
        ):
            outputs = functional_call(self.module, parameters, (inputs,))
            correct += int((outputs.argmax(-1) == labels).sum())
        return correct / len(self.test_labels)
