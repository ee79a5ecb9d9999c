"""From a checked design to a run: data, secret keys, ledger and files of the nodes that this
process hosts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpcsgp.runs.facts import Facts, refuse_own
from dpcsgp.runs.design import RunDesign
from dpcsgp.records.checkpoint import CheckpointFolder
from dpcsgp.config import Config, per_node
from dpcsgp.privacy import (
    Budget,
    GaussianMechanism,
    LedgerBook,
    clipping_engine,
    composed_epsilon,
    releases_within,
)
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.metrics import Recorder
from dpcsgp.tasks import (
    Augmentation,
    Classification,
    MovableTask,
    compute_features,
    load_dataset,
    parse_features,
    partition,
)
from dpcsgp.training import Run, TrainingNetwork
from dpcsgp.training import Schedule as TrainingSchedule


class RunData(Protocol):
    """The data of a run: what is public about them, and the task of the nodes that a process
    hosts."""

    @property
    def facts(self) -> Facts:
        """What everybody may know."""
        ...

    def task(self, module: nn.Module, nodes: Sequence[int]) -> MovableTask:
        """Return the task of these nodes for the run's module."""
        ...


@dataclass(frozen=True)
class Data:
    """Inputs and labels of everybody, the hosted nodes' parts, and the public test set."""

    inputs: Tensor
    labels: Tensor
    parts: list[Tensor]
    test: tuple[Tensor, Tensor]
    facts: Facts

    def task(self, module: nn.Module, nodes: Sequence[int]) -> MovableTask:
        """Return classification with each node's part of the data."""
        return Classification.split(module, self.inputs, self.labels, [self.parts[node] for node in nodes], self.test)


def load_builtin_data(config: Config, progress: Any = None) -> Data:
    """Load, map to public features and split; `dp-sgd` gets everything in one place."""
    refuse_own(config)
    features = parse_features(config.task.features)
    images = load_dataset(config.task.name, progress=progress)
    spec = "iid" if config.method.one_place else config.task.partition
    labels = images.train_labels.numpy()
    parts = [
        torch.from_numpy(part)
        for part in partition(labels, config.num_nodes, spec, config.run.seed)
    ]
    inputs, test_inputs = compute_features(images, features, progress=progress)
    facts = Facts(tuple(inputs.shape[1:]), images.num_classes, tuple(len(part) for part in parts))
    looked_at = config.run.test_examples or len(test_inputs)
    return Data(inputs, images.train_labels, parts, (test_inputs[:looked_at], images.test_labels[:looked_at]), facts)


def new_run_id() -> str:
    """Return a fresh public name for a run; ledgers and checkpoints carry it."""
    return secrets.token_hex(8)


def build_run(
    design: RunDesign,
    data: RunData,
    network: TrainingNetwork,
    out: Path,
    run_id: str,
    part: int = 0,
    num_parts: int = 1,
) -> Run:
    """Add data, keys, ledger and files to a design, for the nodes that this process hosts."""
    config, nodes = design.config, network.nodes
    privacy = config.privacy
    mechanism = _hosted(design.mechanism, nodes)
    task = data.task(design.module, nodes).to(config.run.device)
    public = PublicRandomness(config.run.seed, nodes)
    deltas = [per_node(privacy.delta, len(design.facts.num_examples))[node] for node in nodes]
    private = PrivateRandomness.fresh(nodes) if privacy.seed is None else PrivateRandomness.seeded(privacy.seed, nodes)
    ledger = LedgerBook(
        out / "ledger",
        nodes,
        run_id,
        config=config.fingerprint(),
        deltas=deltas,
        events=[mechanism.event(row) if mechanism.num_examples[row] else None for row in range(len(nodes))],
        private=not private.reproducible,
    )
    return Run(
        task=task,
        engine=clipping_engine(design.module, task.loss, config.task.augmentation_multiplicity),
        mechanism=mechanism,
        budget=_budget(config, mechanism, nodes, ledger, deltas),
        ledger=ledger,
        algorithm=design.algorithm,
        polish=design.polish,
        network=network,
        public=public,
        private=private,
        recorder=Recorder(out, part, num_parts),
        schedule=_schedule(config),
        epsilon_spent=lambda: [composed_epsilon(ledger.releases(n), d) for n, d in zip(nodes, deltas, strict=True)],
        anchor_D=design.anchor_D,
        attempt=ledger.next_attempt(),
        checkpoints=CheckpointFolder(out / "checkpoint", run_id, part, num_parts, config=config.fingerprint()),
        hosts_all=num_parts == 1,
        augment=_augmentation(config),
        node_weights=node_weights(config, design.facts.num_examples, nodes),
    )


def _augmentation(config: Config) -> Augmentation | None:
    if config.task.augmentation == "none":
        return None
    return Augmentation(config.task.augmentation, config.task.augmentation_multiplicity)


def node_weights(config: Config, num_examples: Sequence[int], nodes: Sequence[int]) -> tuple[float, ...] | None:
    """Return the hosted nodes' factors J_i / mean(J) for declared sizes J, or None where every node
    counts equally.

    The average over all n nodes of J_i / mean(J) times g_i is sum_i J_i g_i / sum_i J_i: what one
    node with everybody's examples would have. The sizes are declared and public, so nothing further
    is released; noise is scaled with them. """
    if config.algorithm.node_weights == "equal":
        return None
    mean = sum(num_examples) / len(num_examples)
    return tuple(num_examples[node] / mean for node in nodes)


def _hosted(mechanism: GaussianMechanism, nodes: Sequence[int]) -> GaussianMechanism:
    return replace(
        mechanism,
        noise_multipliers=tuple(mechanism.noise_multipliers[node] for node in nodes),
        expected_batch_sizes=tuple(mechanism.expected_batch_sizes[node] for node in nodes),
        num_examples=tuple(mechanism.num_examples[node] for node in nodes),
    )


def _budget(
    config: Config, mechanism: GaussianMechanism, nodes: Sequence[int], ledger: LedgerBook, deltas: Sequence[float]
) -> Budget:
    """Enforce budgets where noise was calibrated for them; the paper's rule and no noise make no
    verified promise."""
    if config.privacy.noise != "calibrated":
        return Budget.unlimited(nodes)
    epsilons = per_node(config.privacy.epsilon, config.num_nodes)
    with_data = [row for row in range(len(nodes)) if mechanism.num_examples[row]]
    remaining: list[int | None] = [0] * len(nodes)  # a node without data has nothing to release
    for row in with_data:
        spent = tuple(ledger.releases(nodes[row]))
        remaining[row] = releases_within(mechanism.event(row), epsilons[nodes[row]], deltas[row], spent)
    return Budget(nodes, remaining)


def _schedule(config: Config) -> TrainingSchedule:
    return TrainingSchedule(
        steps=config.algorithm.steps,
        gossip_every=config.algorithm.gossip_every,
        polish_rounds=config.algorithm.polish_rounds,
        evaluate_every=config.run.evaluate_every,
        checkpoint_every=config.run.checkpoint_every,
        momentum=config.algorithm.momentum,
        average_last=config.algorithm.average_last,
    )
