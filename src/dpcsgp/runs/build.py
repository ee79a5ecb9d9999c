"""From a checked design to a run: data, secret keys, ledger and files of the hosted nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dpcsgp.algorithms import Algorithm
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.algorithms.optimizers import Adam, Momentum, Optimizer
from dpcsgp.config import Config, per_node
from dpcsgp.privacy import (
    Budget,
    GaussianMechanism,
    LedgerBook,
    PrivateGradients,
    clipping_engine,
    releases_within,
)
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.kept_releases import KeptReleases, worth_keeping
from dpcsgp.privacy.pair_noise import PairNoise, Partners
from dpcsgp.privacy.passes import MOST_PLACES
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.checkpoint import CheckpointFolder
from dpcsgp.records.metrics import Recorder
from dpcsgp.runs.calibration import node_weights
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.frozen_features import with_frozen_features
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
    checkpoint_reach: int = 0,
    keep_all_releases: bool = False,
    partners: Partners | None = None,
    is_promised: bool = False,
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
        checkpoint_reach: steps to which a start may have to go back; those that lead there stay.
        keep_all_releases: keep releases of any size until a checkpoint has their step.
        partners: the other parties of a federation, with whom the hosted node shares noise.
        is_promised: whether budgets are kept whatever rule the noise follows: a roster's are.
        on_row: sees every row that is written.
    """
    # Private examples are behind `task` from here on, and only `gradients` reads them.
    config, out = design.config, folder.path
    task = data.task(design.module, network.nodes).to(config.run.device)
    task = with_frozen_features(task, config, design.facts)
    alone = world_size == 1
    kept = _kept_releases(design, network.nodes, folder, (rank, world_size), keep_all_releases)
    return Run(
        task=task,
        gradients=_checked_gradients(
            design, task, network.nodes, folder, kept, partners, is_promised
        ),
        algorithm=hosted(design.algorithm, design, network),
        polish=hosted(design.polish, design, network),
        network=network,
        public=PublicRandomness(config.run.seed, network.nodes),
        # Several processes keep their own rows beside their checkpoints until they are merged.
        recorder=Recorder(out if alone else out / "checkpoint", rank, world_size),
        schedule=_schedule(config),
        anchor_D=design.anchor_D,
        optimizer=_optimizer(design, network.nodes),
        checkpoints=CheckpointFolder(
            folder.checkpoints or out / "checkpoint",
            folder.run_id,
            rank,
            world_size,
            keep=checkpoints_to_keep,
            config=config.fingerprint(),
            reach=checkpoint_reach,
        ),
        hosts_all=alone,
        resumes_alone=alone,
        on_row=on_row,
    )


def hosted(
    algorithm: Algorithm[Any], design: RunDesign, network: TrainingNetwork
) -> Algorithm[Any]:
    """Return the method for the hosted nodes; with lag it keeps a copy per edge to them."""
    if isinstance(algorithm, LaggedDPCSGP):
        return algorithm.hosting(design.topology, network.nodes)
    return algorithm


def _checked_gradients(
    design: RunDesign,
    task: Task,
    nodes: Sequence[int],
    folder: ResultsFolder,
    kept: KeptReleases | None,
    partners: Partners | None,
    is_promised: bool,
) -> PrivateGradients:
    """Return the private step with its row check behind it."""
    gradients = _private_gradients(design, task, nodes, folder, partners, is_promised)
    gradients = replace(gradients, kept=kept)
    try:
        return gradients.checked(design.anchor_D)
    except BaseException:
        gradients.ledger.close()  # so that this very process can try again
        raise


def _private_gradients(
    design: RunDesign,
    task: Task,
    nodes: Sequence[int],
    folder: ResultsFolder,
    partners: Partners | None,
    is_promised: bool,
) -> PrivateGradients:
    """Put the private step of the hosted nodes together; keys are fresh at every start."""
    config, privacy = design.config, design.config.privacy
    # The design knows all nodes; here only the rows of the hosted ones are kept.
    num_nodes = len(design.facts.num_examples)
    deltas_of_all = per_node(privacy.delta, num_nodes)
    deltas = [deltas_of_all[node] for node in nodes]
    seed = privacy.seed
    random = (
        PrivateRandomness.fresh(nodes) if seed is None else PrivateRandomness.seeded(seed, nodes)
    )
    promises = tuple(zip(per_node(privacy.epsilon, num_nodes), deltas_of_all, strict=True))
    mechanism = _hosted(design.mechanism, nodes, random, folder.run_id, promises, partners)
    engine, most_places = _engine(design, task)
    mechanism = replace(mechanism, most_places=most_places)
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
        unit=design.facts.unit,
        begun_as=folder.ledger_nodes(nodes),
    )
    return PrivateGradients(
        source=task,
        engine=engine,
        mechanism=mechanism,
        budget=_budget(design, mechanism, nodes, ledger, deltas, is_promised),
        ledger=ledger,
        random=random,
        nodes=nodes,
        attempt=ledger.next_attempt(),
        deltas=deltas,
        augment=_augmentation(config),
        node_weights=_weights_after_noise(design, nodes),
    )


def _engine(design: RunDesign, task: Task) -> tuple[CheckedEngine, int]:
    """Return the engine, and how many places a pass may have: public, from shapes and settings."""
    config = design.config
    views, unit = config.task.augmentation_multiplicity, max(1, config.privacy.max_rows_per_unit)
    engine = clipping_engine(task.module, task.loss, views, unit)
    most_rows = config.run.max_rows_per_pass
    if most_rows == "auto":
        rows = task.public_rows(1)[0]
        if unit > 1:
            rows = rows[:, None]
        model_1D = design.anchor_D[None].to(rows.device)
        limit = config.run.memory_limit_gb * 1e9
        most_rows = max(1, int(limit / engine.row_bytes(model_1D, rows)))
    places = max(1, most_rows // (views * unit))
    return engine.with_most_rows(most_rows), min(places, MOST_PLACES)


def _weights_after_noise(design: RunDesign, nodes: Sequence[int]) -> tuple[float, ...] | None:
    """Return the factors of what is private already; shared noise cancels only if it comes last."""
    weights = node_weights(design.config, design.facts.num_examples)
    if weights is None or design.mechanism.shared is not None:
        return None
    return tuple(weights[node] for node in nodes)


def _kept_releases(
    design: RunDesign,
    nodes: Sequence[int],
    folder: ResultsFolder,
    process: tuple[int, int],
    of_any_size: bool,
) -> KeptReleases | None:
    """Return where releases stay until a checkpoint has their step.

    None without checkpoints, which would let them pile up, and where they are very large, unless
    those `of_any_size` are wanted. `process`: rank and world size.
    """
    small = of_any_size or worth_keeping(len(nodes), design.dim)
    if not design.config.run.checkpoint_every or not small:
        return None
    numbers = folder.ledger_nodes(nodes)
    return KeptReleases(folder.path / "ledger" / "kept", folder.run_id, numbers, *process)


def _augmentation(config: Config) -> Augmentation | None:
    if config.task.augmentation == "none":
        return None
    return Augmentation(config.task.augmentation, config.task.augmentation_multiplicity)


def _hosted(
    mechanism: GaussianMechanism,
    nodes: Sequence[int],
    random: PrivateRandomness,
    run_id: str,
    promises: Sequence[tuple[float, float]],
    partners: Partners | None,
) -> GaussianMechanism:
    """Return the mechanism of some of the nodes, with their part of the shared noise."""
    law = mechanism.shared
    pairs = PairNoise(law, nodes, random, run_id, promises, partners) if law is not None else None
    return replace(
        mechanism,
        pairs=pairs,
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
    is_promised: bool,
) -> Budget:
    """Enforce budgets where noise was calibrated for them, or a roster promises them.

    The paper's rule and no noise make no verified promise of their own.
    """
    privacy = design.config.privacy
    if privacy.noise != "calibrated" and not (is_promised and privacy.noise != "none"):
        return Budget.unlimited(nodes)
    if mechanism.pairs is not None:
        return Budget(nodes, [0] * len(nodes))  # `PrivateGradients.join` fills it in
    epsilons = per_node(privacy.epsilon, design.topology.num_nodes)
    remaining: list[int | None] = [0] * len(nodes)  # a node without data has nothing to release
    for row in (row for row in range(len(nodes)) if mechanism.num_examples[row]):
        spent = tuple(ledger.releases(nodes[row]))
        event, epsilon = mechanism.event(row), epsilons[nodes[row]]
        remaining[row] = releases_within(event, epsilon, deltas[row], spent)
    return Budget(nodes, remaining)


def _optimizer(design: RunDesign, nodes: Sequence[int]) -> Optimizer:
    """Return how the hosted nodes turn private gradients into steps."""
    settings = design.config.algorithm
    if settings.optimizer == "sgd":
        return Momentum(settings.momentum, settings.weight_decay)
    first, second = settings.adam_betas
    return Adam(
        (first, second),
        settings.adam_epsilon,
        settings.weight_decay,
        _weights_after_noise(design, nodes),
    )


def _schedule(config: Config) -> Schedule:
    return Schedule(
        steps=config.algorithm.steps,
        gossip_every=config.algorithm.gossip_every,
        polish_rounds=config.algorithm.polish_rounds,
        evaluate_every=config.run.evaluate_every,
        checkpoint_every=config.run.checkpoint_every,
        average_last=config.algorithm.average_last,
    )
