"""From a checked design to a run: data, secret keys, ledger and files of the hosted nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dpcsgp.config import Config, per_node
from dpcsgp.privacy import (
    Budget,
    GaussianMechanism,
    LedgerBook,
    PrivateGradients,
    clipping_engine,
    releases_within,
)
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.checkpoint import CheckpointFolder
from dpcsgp.records.metrics import Recorder
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.tasks import Augmentation, Task
from dpcsgp.training import Run, Schedule, TrainingNetwork


def build_run(
    design: RunDesign,
    data: RunData,
    network: TrainingNetwork,
    folder: ResultsFolder,
    *,
    rank: int = 0,
    world_size: int = 1,
    checkpoints_to_keep: int = 2,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Run:
    """Add data, keys, ledger and files to a design, for the nodes that this process hosts.

    The private step is checked here, before it can release anything.

    Args:
        design: the checked design.
        data: examples of the hosted nodes, and public test data.
        network: who hears whom.
        folder: where everything is written.
        rank: number of this process among `world_size`.
        world_size: number of processes of the run.
        checkpoints_to_keep: how many checkpoints of this process stay on disk.
        on_row: sees every row that is written.
    """
    # Private examples are behind `task` from here on, and only `gradients` reads them.
    config, out = design.config, folder.path
    task = data.task(design.module, network.nodes).to(config.run.device)
    alone = world_size == 1
    return Run(
        task=task,
        gradients=_checked_gradients(design, task, network.nodes, folder),
        algorithm=design.algorithm,
        polish=design.polish,
        network=network,
        public=PublicRandomness(config.run.seed, network.nodes),
        # Several processes keep their own rows beside their checkpoints until they are merged.
        recorder=Recorder(out if alone else out / "checkpoint", rank, world_size),
        schedule=_schedule(config),
        anchor_D=design.anchor_D,
        checkpoints=CheckpointFolder(
            out / "checkpoint",
            folder.run_id,
            rank,
            world_size,
            keep=checkpoints_to_keep,
            config=config.fingerprint(),
        ),
        hosts_all=alone,
        on_row=on_row,
    )


def _checked_gradients(
    design: RunDesign, task: Task, nodes: Sequence[int], folder: ResultsFolder
) -> PrivateGradients:
    """Return the private step with its row check behind it."""
    gradients = _private_gradients(design, task, nodes, folder)
    try:
        return gradients.checked(design.anchor_D)
    except BaseException:
        gradients.ledger.close()  # so that this very process can try again
        raise


def _private_gradients(
    design: RunDesign, task: Task, nodes: Sequence[int], folder: ResultsFolder
) -> PrivateGradients:
    """Put the private step of the hosted nodes together; keys are fresh at every start."""
    config, privacy = design.config, design.config.privacy
    # The design knows all nodes; here only the rows of the hosted ones are kept.
    mechanism = _hosted(design.mechanism, nodes)
    deltas = [per_node(privacy.delta, len(design.facts.num_examples))[node] for node in nodes]
    seed = privacy.seed
    random = (
        PrivateRandomness.fresh(nodes) if seed is None else PrivateRandomness.seeded(seed, nodes)
    )
    # Opening the ledgers locks them: a second start of the same run is refused here.
    has_data = [total > 0 for total in mechanism.num_examples]
    ledger = LedgerBook(
        folder.path / "ledger",
        nodes,
        folder.run_id,
        config=config.fingerprint(),
        deltas=deltas,
        events=[mechanism.event(row) if has_data[row] else None for row in range(len(nodes))],
        private=not random.reproducible,
    )
    return PrivateGradients(
        source=task,
        engine=clipping_engine(design.module, task.loss, config.task.augmentation_multiplicity),
        mechanism=mechanism,
        budget=_budget(design, mechanism, nodes, ledger, deltas),
        ledger=ledger,
        random=random,
        nodes=nodes,
        attempt=ledger.next_attempt(),
        deltas=deltas,
        augment=_augmentation(config),
        node_weights=node_weights(config, design.facts.num_examples, nodes),
    )


def _augmentation(config: Config) -> Augmentation | None:
    if config.task.augmentation == "none":
        return None
    return Augmentation(config.task.augmentation, config.task.augmentation_multiplicity)


def node_weights(
    config: Config, num_examples: Sequence[int], nodes: Sequence[int]
) -> tuple[float, ...] | None:
    """Return the hosted nodes' factors J_i / mean(J) for declared sizes J; None: all count equally.

    The average over all n nodes of J_i / mean(J) times g_i is sum_i J_i g_i / sum_i J_i: what one
    node with everybody's examples would have. The sizes are declared and public, so nothing further
    is released; noise is scaled with them.
    """
    if config.algorithm.node_weights == "equal":
        return None
    mean = sum(num_examples) / len(num_examples)
    return tuple(num_examples[node] / mean for node in nodes)


def _hosted(mechanism: GaussianMechanism, nodes: Sequence[int]) -> GaussianMechanism:
    """Return the mechanism of some of the nodes."""
    return replace(
        mechanism,
        noise_multipliers=tuple(mechanism.noise_multipliers[node] for node in nodes),
        expected_batch_sizes=tuple(mechanism.expected_batch_sizes[node] for node in nodes),
        num_examples=tuple(mechanism.num_examples[node] for node in nodes),
    )


def _budget(
    design: RunDesign,
    mechanism: GaussianMechanism,
    nodes: Sequence[int],
    ledger: LedgerBook,
    deltas: Sequence[float],
) -> Budget:
    """Enforce budgets where noise was calibrated for them.

    The paper's rule and no noise make no verified promise.
    """
    privacy = design.config.privacy
    if privacy.noise != "calibrated":
        return Budget.unlimited(nodes)
    epsilons = per_node(privacy.epsilon, design.topology.num_nodes)
    remaining: list[int | None] = [0] * len(nodes)  # a node without data has nothing to release
    for row in (row for row in range(len(nodes)) if mechanism.num_examples[row]):
        spent = tuple(ledger.releases(nodes[row]))
        event, epsilon = mechanism.event(row), epsilons[nodes[row]]
        remaining[row] = releases_within(event, epsilon, deltas[row], spent)
    return Budget(nodes, remaining)


def _schedule(config: Config) -> Schedule:
    return Schedule(
        steps=config.algorithm.steps,
        gossip_every=config.algorithm.gossip_every,
        polish_rounds=config.algorithm.polish_rounds,
        evaluate_every=config.run.evaluate_every,
        checkpoint_every=config.run.checkpoint_every,
        momentum=config.algorithm.momentum,
        average_last=config.algorithm.average_last,
    )
