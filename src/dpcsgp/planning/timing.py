"""Time the parts of a step on random inputs of the declared shapes; no data set is opened.

Each part is timed once at a small size and scaled up, so that a handful of timings serves all plans
and models of any size: private gradients (`pass_costs`), one exchange for each way of exchanging,
one evaluation, one checkpoint, one entry of the ledger.

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
from torch import Tensor, nn

from dpcsgp.config import Config
from dpcsgp.modes import evaluation_mode
from dpcsgp.planning.pass_costs import PassCosts, measure_passes, places_of_pass, rows_at_once
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.randomness import PublicRandomness
from dpcsgp.records.files import write_atomically
from dpcsgp.runs.build import hosted
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.simulation import simulated_network
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.downloads.catalogue import PUBLISHED
from dpcsgp.tasks.supervised import LOSSES

_ROWS: Final = 8  # random examples
_EXCHANGED: Final = 2**17  # coordinates of a timed exchange
_WRITTEN: Final = 2**22  # bytes of a timed file
_DIGITS_TEST: Final = 297  # test examples of scikit-learn's digits
# Vectors per node beside the state, copies of fetched rows, sets of rows in the check at the start:
# as found in the peaks of real runs (docs/performance.md).
_VECTORS: Final = 20
_COPIES_OF_BATCH: Final = 2
_SETS_OF_ROWS: Final = 2
# what libraries set up when their kernels are used first, and for recurrent layers beside that
_FIRST_USE: Final = 10_000_000
_FIRST_RECURRENCE: Final = 15_000_000


@final
@dataclass(frozen=True, eq=False)
class PublicRows:
    """A few public or random examples, their loss, and how many test examples there will be."""

    inputs: Tensor
    targets: Tensor
    loss: LossPerExample
    num_test: int


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
    passes: PassCosts
    engine: CheckedEngine
    inputs: Tensor

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


def time_parts(design: RunDesign, rows: PublicRows | None = None) -> StepTimes:
    """Time everything but the exchange, at small sizes and scaled up.

    Args:
        design: the run that is planned.
        rows: public examples, their loss and their number; None: random ones of the declared shapes
            under cross-entropy.
    """
    rows = rows or random_rows(design)
    views, num_nodes = design.config.task.augmentation_multiplicity, design.topology.num_nodes
    engine = clipping_engine(design.module, rows.loss, views)
    costs = measure_passes(engine, design.module, rows.inputs, rows.targets, views)
    models = num_nodes + 1  # evaluated: every node's and the average
    return StepTimes(
        fixed=num_nodes * costs.seconds_fixed,
        per_example=num_nodes * costs.seconds_per_row,
        evaluation=models * rows.num_test * _forward_seconds(design, rows),
        checkpoint=_disk_seconds(state_bytes(design) // 2),
        entry=num_nodes * _disk_seconds(512),
        passes=costs,
        engine=engine,
        inputs=rows.inputs,
    )


def time_exchange(design: RunDesign) -> float:
    """Time one exchange of random models, all nodes in this process.

    Only the first coordinates of large models are exchanged: the time grows with their number.
    """
    network = simulated_network(design)
    public = PublicRandomness(design.config.run.seed, network.nodes)
    algorithm = hosted(design.algorithm, design, network)
    anchor_D = design.anchor_D[:_EXCHANGED]
    start_ND = anchor_D.expand(len(network.nodes), -1).clone()
    state = algorithm.descend(
        algorithm.init(start_ND, anchor_D), torch.randn_like(start_ND).mul_(1e-3)
    )
    state = algorithm.gossip(state, network, public)  # the first round also fills caches
    seconds = _time(lambda: algorithm.gossip(state, network, public), repeats=2)
    return seconds * design.dim / anchor_D.numel()


def state_bytes(design: RunDesign) -> int:
    """Estimate the memory of a process that hosts all nodes, without data.

    State, momentum, gradients and the scratch of one exchange.
    """
    # one row of every state tensor, and more vectors per node; of a few coordinates, scaled up
    anchor_D = design.anchor_D[:_EXCHANGED]
    state = design.algorithm.init(anchor_D[None], anchor_D)
    row = sum(value.nbytes for value in state if isinstance(value, Tensor) and value.ndim == 2)
    per_node = (row + _VECTORS * anchor_D.nbytes) * design.dim // anchor_D.numel()
    return design.topology.num_nodes * per_node


def gradient_bytes(design: RunDesign, times: StepTimes) -> int:
    """Estimate the memory of the data of all nodes, and of a step's private gradients."""
    rows, together = rows_at_once(design, times.engine, times.inputs)
    example = times.inputs[0].nbytes
    # Where nodes pass together, the check of rows at the start holds several sets of them.
    per_row = times.passes.bytes_per_row + (_SETS_OF_ROWS * example if together else 0)
    data = sum(design.facts.num_examples) * example
    batch = _COPIES_OF_BATCH * places_of_pass(design) * example
    return int(first_use(design.module) + data + batch + times.passes.bytes_fixed + rows * per_row)


def first_use(module: nn.Module) -> int:
    """Return what libraries set up in memory when a model runs first."""
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
    return _FIRST_USE + (_FIRST_RECURRENCE if recurrent else 0)


def random_rows(design: RunDesign) -> PublicRows:
    """Return a few random examples of the declared shapes, for classification."""
    facts, name = design.facts, design.config.task.name
    num_test = PUBLISHED[name].shapes.test_labels[0] if name in PUBLISHED else _DIGITS_TEST
    inputs = torch.rand(_ROWS, *facts.input_shape)
    return PublicRows(
        inputs, torch.arange(_ROWS) % facts.num_classes, LOSSES["cross_entropy"][0], num_test
    )


def _forward_seconds(design: RunDesign, rows: PublicRows) -> float:
    """Time one example of an evaluation."""
    with torch.no_grad(), evaluation_mode(design.module):
        return _time(lambda: design.module(rows.inputs), repeats=1) / len(rows.inputs)


def _disk_seconds(num_bytes: int) -> float:
    """Time a file that is brought to the disk, up to a size; larger ones are scaled up."""
    written = min(num_bytes, _WRITTEN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        seconds = _time(lambda: write_atomically(path, bytes(written)), repeats=1)
    return seconds * num_bytes / written


def _time(action: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats
