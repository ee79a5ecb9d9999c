"""Any module, loss per example and metric on public data; by default, classification.

Legend: N hosted nodes, E places for examples, J examples, K models, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.modes import evaluation_mode
from dpcsgp.parameters import ParameterLayout
from dpcsgp.records.metrics import Direction
from dpcsgp.tasks.base import LossPerExample, gather, random_like
from dpcsgp.tasks.measures import directions_of, measured

EVALUATION_BATCH: Final = 2000  # test examples in one forward pass

# (outputs (J, ...), targets (J, ...)) of the test set -> one number
Metric = Callable[[Any, Tensor], Tensor | float]
# a metric, or one with the word that says which of its values are better
OwnMetric = Metric | tuple[Metric, Direction]


def logits_of(outputs: Any) -> Any:
    """Return what losses and metrics of this package look at.

    Models that return a record with `logits`, as those of transformers do, are taken at these.
    """
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def cross_entropy_per_example(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each example."""
    return cross_entropy(logits_of(outputs), targets, reduction="none")


@final
@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The cross-entropy of each example times a public weight of its class."""

    weights: tuple[float, ...]

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return one loss per example."""
        logits = logits_of(outputs)
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return cross_entropy(logits, targets, weight=weights, reduction="none")


def classification_loss(class_weights: Sequence[float]) -> LossPerExample:
    """Return the cross-entropy, with weights of classes if there are any."""
    return (
        WeightedCrossEntropy(tuple(class_weights)) if class_weights else cross_entropy_per_example
    )


def check_class_weights(weights: Sequence[float], num_classes: int) -> None:
    """Refuse weights that are not one per class."""
    if weights and len(weights) != num_classes:
        raise ConfigError(
            f"task.class_weights has {len(weights)} values for {num_classes} classes; give one "
            "per class, in the order of the model's outputs"
        )


def squared_error_per_example(outputs: Any, targets: Tensor) -> Tensor:
    """Return each example's squared error, averaged over its outputs; (E, 1) fits targets (E,)."""
    outputs = logits_of(outputs)
    if outputs.numel() != targets.numel():
        raise ModelError(
            f'loss = "mse": the model gives {tuple(outputs.shape)} for targets '
            f"{tuple(targets.shape)}; make them the same shape, such as (examples, values)"
        )
    return (outputs.reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(dim=1)


def accuracy(outputs: Any, targets: Tensor) -> float:
    """Return the share of examples whose largest output is the target.

    Targets may be probabilities of classes; the largest of them is then the target.
    """
    outputs = logits_of(outputs)
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(1)
    correct = outputs.argmax(1) == targets
    return int(correct.sum()) / correct.numel()


def mean_squared_error(outputs: Any, targets: Tensor) -> float:
    """Return the mean of `squared_error_per_example`."""
    return float(squared_error_per_example(outputs, targets).double().mean())


LOSSES: Final[dict[str, tuple[LossPerExample, dict[str, Metric]]]] = {
    "cross_entropy": (cross_entropy_per_example, {"accuracy": accuracy}),
    "mse": (squared_error_per_example, {"mean_squared_error": mean_squared_error}),
}


@final
@dataclass(frozen=True)
class Supervised:
    """A module trained by a loss per example, evaluated by metrics on public test data."""

    module: nn.Module
    inputs: Tensor  # (J, ...), the hosted nodes' examples one node after the other
    targets: Tensor  # (J, ...)
    num_examples: tuple[int, ...]
    test: tuple[Tensor, Tensor] | None  # inputs and targets; None: not evaluated
    loss: LossPerExample = cross_entropy_per_example
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
    held: tuple[int, ...] | None = None  # None: every node holds what it declares

    @classmethod
    def split(
        cls,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        parts: Sequence[Tensor],
        test: tuple[Tensor, Tensor],
        loss: LossPerExample = cross_entropy_per_example,
    ) -> Supervised:
        """Return classification in which each hosted node has its part (example numbers)."""
        order = torch.cat([torch.as_tensor(part) for part in parts])
        sizes = tuple(len(part) for part in parts)
        if not torch.equal(order, torch.arange(len(inputs))):  # else one copy is enough
            inputs, labels = inputs[order], labels[order]
        return cls(module, inputs, labels, sizes, test, loss)

    @property
    def held_examples(self) -> tuple[int, ...]:
        """How many examples each hosted node really holds."""
        return self.num_examples if self.held is None else self.held

    def to(self, device: str) -> Supervised:
        """Return the task with module and data on a device."""
        test = (self.test[0].to(device), self.test[1].to(device)) if self.test else None
        return replace(
            self,
            module=self.module.to(device),
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            test=test,
        )

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (N, E, ...) and targets (N, E, ...)."""
        held = self.held_examples
        inputs, targets = gather(indices_NE, held, self.inputs, self.targets, rows=rows)
        return inputs, targets

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first test examples, or random ones like the training data."""
        if self.test is None:
            return random_like(self.inputs, count), random_like(self.targets, count)
        return self.test[0][:count], self.test[1][:count]

    @property
    def directions(self) -> dict[str, Direction]:
        """Metric -> which values of it are better."""
        return directions_of(self.metrics)

    def evaluate(self, models_KD: Tensor) -> dict[str, Tensor]:
        """Return each metric of each model on the test set, with the module in eval() mode."""
        if self.test is None:
            return {}
        views = ParameterLayout.of(self.module).views(models_KD.to(self.inputs.device))
        with evaluation_mode(self.module):
            found = [
                self._metrics({name: value[row] for name, value in views.items()})
                for row in range(len(models_KD))
            ]
        return {name: torch.tensor([values[name] for values in found]) for name in self.metrics}

    @torch.no_grad()
    def _metrics(self, parameters: dict[str, Tensor]) -> dict[str, float]:
        assert self.test is not None
        inputs, targets = self.test
        parts = [
            functional_call(self.module, parameters, (batch,))
            for batch in inputs.split(EVALUATION_BATCH)
        ]
        return measured(self.metrics, _joined(parts), targets)


def _joined(parts: list[Any]) -> Any:
    """Join outputs that are tensors, or tuples, lists or dicts of them, nested at will.

    A dict of a class of its own, such as the records of transformers, stays one of that class.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return type(first)(**{key: _joined([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple | list):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    return first
