"""The data of a run: what is public about them, and the task of the nodes that a process hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from dpcsgp.config import Config
from dpcsgp.runs.facts import Facts, refuse_own
from dpcsgp.tasks import (
    MovableTask,
    Supervised,
    compute_features,
    load_dataset,
    parse_features,
    partition,
)
from dpcsgp.tasks.supervised import check_class_weights, classification_loss

Downloads = Callable[..., Any]  # told of what is fetched: (text, done, total)


class RunData(Protocol):
    """Private examples of the hosted nodes, public test data, and what everybody may know."""

    @property
    def facts(self) -> Facts:
        """What everybody may know."""
        ...

    def task(self, module: nn.Module, nodes: Sequence[int]) -> MovableTask:
        """Return the task of these nodes for the run's module."""
        ...


@final
@dataclass(frozen=True)
class BuiltinData:
    """Inputs and labels of everybody, the hosted nodes' parts, and the public test set."""

    inputs: Tensor
    labels: Tensor
    parts: list[Tensor]
    test: tuple[Tensor, Tensor]
    facts: Facts
    class_weights: tuple[float, ...] = ()

    def task(self, module: nn.Module, nodes: Sequence[int]) -> MovableTask:
        """Return classification with each node's part of the data."""
        parts = [self.parts[node] for node in nodes]
        loss = classification_loss(self.class_weights)
        return Supervised.split(module, self.inputs, self.labels, parts, self.test, loss)

    def of_node(self, node: int) -> BuiltinData:
        """Return the same data without the examples of all other nodes, which are forgotten."""
        own = self.parts[node]
        parts = [own[:0] for _ in self.parts]
        parts[node] = torch.arange(len(own))
        return replace(self, inputs=self.inputs[own], labels=self.labels[own], parts=parts)


def load_builtin_data(config: Config, progress: Downloads | None = None) -> BuiltinData:
    """Load a data set, map it to public features and split it; `dp-sgd` gets all in one place.

    Args:
        config: the settings; `task`, `graph.num_nodes` and `run.seed` matter here.
        progress: told of downloads and of features that are computed.
    """
    refuse_own(config)
    features = parse_features(config.task.features)
    images = load_dataset(config.task.name, progress=progress)
    # Deal the examples to the nodes.
    spec = "iid" if config.method.one_place else config.task.partition
    labels = images.train_labels
    parts = [
        torch.from_numpy(part)
        for part in partition(labels.numpy(), config.num_nodes, spec, config.run.seed)
    ]
    # Public, data-independent features of training and test images.
    inputs, test_inputs = compute_features(images, features, progress=progress)
    sizes = tuple(len(part) for part in parts)
    facts = Facts(tuple(inputs.shape[1:]), images.num_classes, sizes)
    looked_at = config.run.test_examples or len(test_inputs)
    test = test_inputs[:looked_at], images.test_labels[:looked_at]
    weights = tuple(config.task.class_weights)
    check_class_weights(weights, images.num_classes)
    return BuiltinData(inputs, labels, parts, test, facts, weights)
