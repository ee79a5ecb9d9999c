"""The work that is timed: the same examples for plain SGD, for the engine and for the peers.

Legend: N nodes, E places for examples, J examples, D coordinates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpcsgp.benchmarking import opacus_modes
from dpcsgp.config import Config
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism, clipping_engine
from dpcsgp.privacy.events import Sampling
from dpcsgp.randomness import PrivateRandomness, torch_seed
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.frozen_features import with_frozen_features
from dpcsgp.tasks import Supervised, build_model

CLIP_NORM: Final = 1.0
NOISE: Final = 1.0


@final
@dataclass(frozen=True)
class Workload:
    """Nodes with synthetic examples and one model; every way computes a gradient per node."""

    model: str
    input_shape: tuple[int, ...]
    num_nodes: int
    batch_size: int
    examples_per_node: int
    words: int = 0  # inputs are words of so large a vocabulary; 0: numbers
    build: Callable[[], nn.Module] | None = None  # None: a model that a config names
    build_peer: Callable[[], nn.Module] | None = None  # the same model as peers need it
    sampling: Sampling = "poisson"

    @cached_property
    def module(self) -> nn.Module:
        """The network, with the same initial weights every time."""
        with torch_seed(0, "benchmark"):
            if self.build is not None:
                return self.build()
            return build_model(self.model, self.input_shape, 10)

    @cached_property
    def task(self) -> Supervised:
        """Synthetic examples of every node; inputs of unit variance, random labels."""
        total = self.num_nodes * self.examples_per_node
        with torch_seed(1, "benchmark"):
            shape = (total, *self.input_shape)
            inputs = torch.randint(1, self.words, shape) if self.words else torch.randn(shape)
            labels = torch.randint(10, (total,))
        sizes = (self.examples_per_node,) * self.num_nodes
        return Supervised(self.module, inputs, labels, sizes, (inputs[:100], labels[:100]))

    def private(self, *, secure: bool) -> Callable[[], Tensor]:
        """Return one release of all nodes: draw, gather, clip, sum, noise, divide.

        The noise is the secure one, or torch's. Features of a frozen part are computed here, once,
        as a run does at its start.
        """
        sizes = (self.examples_per_node,) * self.num_nodes
        task = with_frozen_features(self.task, Config(), Facts(self.input_shape, 10, sizes))
        engine = clipping_engine(task.module, task.loss)
        layout = ParameterLayout.of(task.module)
        models_ND = layout.flatten(task.module).expand(self.num_nodes, -1).contiguous()
        nodes = range(self.num_nodes)
        mechanism = self.mechanism(NOISE if secure else 0.0)
        random, steps = PrivateRandomness.fresh(nodes), iter(range(2**40))
        (shape,) = mechanism.rows_of_same_shape()

        def clipped_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
            sum_ND = engine.clipped_sum(
                models_ND, *task.examples(indices_NE), present_NE, CLIP_NORM, shape
            )
            if secure:  # the mechanism adds its own noise
                return sum_ND
            return sum_ND.add_(torch.randn(sum_ND.shape), alpha=NOISE * CLIP_NORM)

        return lambda: mechanism.release(clipped_sum, next(steps), random, [True] * self.num_nodes)

    def mechanism(self, noise_multiplier: float) -> GaussianMechanism:
        """Return the mechanism of these nodes; batches are full if they have no more examples."""
        times = self.num_nodes
        sizes = (self.batch_size,) * times, (self.examples_per_node,) * times
        return GaussianMechanism(CLIP_NORM, (noise_multiplier,) * times, *sizes, self.sampling)

    def plain(self) -> Callable[[], None]:
        """Return one gradient of ordinary SGD per node: gather, forward, backward."""
        module = copy.deepcopy(self.module)

        def gradients() -> None:
            for node in range(self.num_nodes):
                module.zero_grad()
                inputs, labels = self._batch(node)
                cross_entropy(module(inputs), labels).backward()

        return gradients

    def opacus(self, mode: str) -> Callable[[], None]:
        """Return one private gradient of Opacus per node, node after node."""
        module = self.module if self.build_peer is None else self.build_peer()
        gradient = opacus_modes.private_gradient(mode, module, self.batch_size, CLIP_NORM, NOISE)

        def gradients() -> None:
            for node in range(self.num_nodes):
                gradient(*self._batch(node))

        return gradients

    def _batch(self, node: int) -> tuple[Tensor, Tensor]:
        first = node * self.examples_per_node
        chosen = torch.randint(self.examples_per_node, (self.batch_size,)) + first
        return self.task.inputs[chosen], self.task.targets[chosen]


TWO_LAYERS: Final = Workload(
    "mlp:128", (784,), num_nodes=10, batch_size=256, examples_per_node=2048
)
# As many examples as the batch: the sampled batch is then exactly 32, as the peers' is.
RESNET18: Final = Workload(
    "resnet18", (3, 32, 32), num_nodes=1, batch_size=32, examples_per_node=32
)
TINY: Final = Workload("mlp:8", (16,), num_nodes=2, batch_size=4, examples_per_node=12)
WORKLOADS: Final = {"two layers": TWO_LAYERS, "resnet18": RESNET18, "tiny": TINY}
