"""Time a few steps on random inputs of the declared shapes; no data set is opened.

The parts of a step are timed one by one, so that a handful of timings serves all plans: private
gradients (linear in the batch size), one exchange for each way of exchanging, one evaluation, one
checkpoint, one entry of the ledger.

Legend: N nodes, E examples, D coordinates.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from dpcsgp import training
from dpcsgp.config import Config
from dpcsgp.network import Simulator
from dpcsgp.privacy import GaussianMechanism
from dpcsgp.randomness import PublicRandomness
from dpcsgp.runs.build import build_run, hosted
from dpcsgp.runs.data import BuiltinData
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder, new_run_id
from dpcsgp.runs.simulation import simulated_network
from dpcsgp.tasks.downloads.catalogue import PUBLISHED

_POOL: Final = 2000  # random examples per node; batches are drawn from them again and again
_LONG_ENOUGH: Final = 0.4  # seconds of a gradient step after which the batch is not enlarged
_DIGITS_TEST: Final = 297  # test examples of scikit-learn's digits


@final
@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a run.

    The private gradients of all nodes take `fixed + per_example * batch size`.
    """

    fixed: float
    per_example: float
    evaluation: float
    checkpoint: float
    entry: float

    def seconds(self, config: Config, batch_size: int, exchange: float) -> float:
        """Predict the seconds of a whole run."""
        settings, run = config.algorithm, config.run
        step = self.fixed + self.per_example * batch_size + self.entry
        # evaluations: at the start, at the end, and in between; a last checkpoint at the end
        rounds = settings.steps // settings.gossip_every + settings.polish_rounds
        evaluations = 2 + ((settings.steps - 1) // run.evaluate_every if run.evaluate_every else 0)
        checkpoints = 1 + (settings.steps // run.checkpoint_every if run.checkpoint_every else 0)
        return (
            settings.steps * step
            + rounds * exchange
            + evaluations * self.evaluation
            + checkpoints * self.checkpoint
        )


def time_parts(design: RunDesign) -> StepTimes:
    """Time everything but the exchange, on a real run over random examples."""
    # the ledger, the metrics and the checkpoint go to a real disk, as in training
    with tempfile.TemporaryDirectory() as folder:
        results = ResultsFolder(Path(folder), new_run_id())
        run = build_run(design, _random_data(design), Simulator(design.topology), results)
        model_ND = design.anchor_D.expand(design.topology.num_nodes, -1).contiguous()
        fixed, per_example = _time_gradients(run, model_ND)
        state = run.algorithm.init(model_ND, design.anchor_D)
        progress = training.Progress(state, torch.zeros_like(model_ND))
        nodes, ledger, mechanism = run.network.nodes, run.gradients.ledger, run.gradients.mechanism
        events = {node: mechanism.event(row) for row, node in enumerate(nodes)}
        entry = _time(lambda: ledger.record(0, run.gradients.attempt, events), repeats=1)
        return StepTimes(
            fixed=fixed,
            per_example=per_example,
            evaluation=_time(lambda: training.record(run, progress), repeats=1),
            checkpoint=_time(lambda: training.save_checkpoint(run, progress), repeats=1),
            entry=entry,
        )


def time_exchange(design: RunDesign) -> float:
    """Time one exchange of random models, all nodes in this process."""
    network = simulated_network(design)
    public = PublicRandomness(design.config.run.seed, network.nodes)
    algorithm = hosted(design.algorithm, design, network)
    start_ND = design.anchor_D.expand(len(network.nodes), -1).clone()
    state = algorithm.descend(
        algorithm.init(start_ND, design.anchor_D), torch.randn_like(start_ND).mul_(1e-3)
    )
    state = algorithm.gossip(state, network, public)  # the first round also fills caches
    return _time(lambda: algorithm.gossip(state, network, public), repeats=2)


def state_bytes(design: RunDesign) -> int:
    """Estimate the memory of a process that hosts all nodes, without data.

    State, momentum, gradients and the scratch of one exchange.
    """
    # one row of every state tensor, and six more vectors per node
    state = design.algorithm.init(design.anchor_D[None], design.anchor_D)
    row = sum(value.nbytes for value in state if isinstance(value, Tensor) and value.ndim == 2)
    return design.topology.num_nodes * (row + 6 * design.anchor_D.nbytes)


def data_bytes(design: RunDesign, batch_size: int) -> int:
    """Estimate the memory of all nodes' examples, and of one batch with its activations."""
    values = 4 * torch.Size(design.facts.input_shape).numel()
    activations = 4 * sum(getattr(layer, "out_features", 0) for layer in design.module.modules())
    return sum(design.facts.num_examples) * values + design.topology.num_nodes * batch_size * (
        values + activations
    )


def _time_gradients(run: training.Run, model_ND: Tensor) -> tuple[float, float]:
    """Return (fixed, per example) seconds of the private gradients, from two batch sizes.

    The size is doubled until a step takes long enough or the data are used up.
    """
    smallest = min(run.gradients.mechanism.num_examples)
    sizes = [size for size in (2**k for k in range(3, 20)) if size <= smallest] or [smallest]
    times = [(sizes[0], _time_release(run, model_ND, sizes[0]))]
    for size in sizes[1:]:
        times.append((size, _time_release(run, model_ND, size)))
        if times[-1][1] > _LONG_ENOUGH:
            break
    # A line through the largest size and the one three doublings before: smaller sizes are mostly
    # overhead, and noise of the clock could make their slope negative.
    (small, first), (large, last) = times[max(len(times) - 4, 0)], times[-1]
    slope = max((last - first) / (large - small), 0.0) if large > small else 0.0
    return max(last - slope * large, 0.0), slope


def _time_release(run: training.Run, model_ND: Tensor, batch_size: int) -> float:
    """Time private gradients of batches of this size, without budget and ledger."""
    num_nodes, gradients = len(run.network.nodes), run.gradients
    stated = gradients.mechanism
    mechanism = GaussianMechanism(
        stated.clip_norm,
        (1.0,) * num_nodes,
        (batch_size,) * num_nodes,
        stated.num_examples,
        stated.sampling,
    )

    def clipped_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
        # more examples are declared than the pool holds
        inputs, targets = run.task.examples(indices_NE % _POOL)
        if gradients.augment is not None:
            inputs = gradients.augment(inputs, gradients.random, 0)
        (shape,) = mechanism.rows_of_same_shape()
        return gradients.engine.clipped_sum(
            model_ND, inputs, targets, present_NE, mechanism.clip_norm, shape
        )

    def release() -> Tensor:
        return mechanism.release(clipped_sum, 0, gradients.random, [True] * num_nodes)

    return _time(release, repeats=2)


def _random_data(design: RunDesign) -> BuiltinData:
    """Return random examples of the declared shapes: a pool per node, and a test set."""
    facts = design.facts
    pool = min(max(facts.num_examples), _POOL)
    num_nodes = len(facts.num_examples)
    name = design.config.task.name
    num_test = PUBLISHED[name].shapes.test_labels[0] if name in PUBLISHED else _DIGITS_TEST
    labels = torch.arange(pool * num_nodes) % facts.num_classes
    parts = [torch.arange(pool * node, pool * (node + 1)) for node in range(num_nodes)]
    # evaluation takes as long as on the published test set
    test = (torch.rand(num_test, *facts.input_shape), torch.arange(num_test) % facts.num_classes)
    return BuiltinData(torch.rand(len(labels), *facts.input_shape), labels, parts, test, facts)


def _time(action: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats
