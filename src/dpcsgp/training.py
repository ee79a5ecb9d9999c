"""The one loop. Read `train` from top to bottom to follow one training step.

Private data are seen by `privacy.PrivateGradients` alone; what it returns is clipped, noised and
divided by public constants, and on the ledger's disk. Everything after that is post-processing.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpcsgp.algorithms import Algorithm, Network
from dpcsgp.compression.base import naming_gradient_step
from dpcsgp.errors import CheckpointError, DivergenceError
from dpcsgp.network import Traffic
from dpcsgp.privacy import Budget, ClippingEngine, GaussianMechanism, LedgerBook, PrivateGradients
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.private_gradients import Augment
from dpcsgp.privacy.row_checks import engine_with_equal_rows
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.checkpoint import Checkpoint, CheckpointFolder
from dpcsgp.records.metrics import Recorder
from dpcsgp.tasks import Task

WATCHED_EVALUATIONS = 5
# per node like metrics, but not measured on test data
RESERVED_KEYS = (
    "epsilon_nodes",
    "bytes_sent_nodes",
)
_CHECKED_ROWS = 64
MANY_NODES = 32  # above this, intermediate evaluations look at a sample of the nodes


class TrainingNetwork(Network, Protocol):
    """A network that also counts what it sends, and lets the processes of a run agree on small
    facts."""

    traffic: Traffic

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """Return the values that all processes of the run gave under this name (JSON values, by
        rank)."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When things happen: gradient steps, exchanges, evaluations, snapshots."""

    steps: int
    gossip_every: int = 1
    polish_rounds: int = 0
    evaluate_every: int = 10
    checkpoint_every: int = 0
    momentum: float = 0.0
    average_last: int = 0


@dataclass(frozen=True)
class Run:
    """All parts of a training run; `config.build_run` puts one together."""

    task: Task
    engine: ClippingEngine
    mechanism: GaussianMechanism
    budget: Budget
    ledger: LedgerBook
    algorithm: Algorithm[Any]
    polish: Algorithm[Any]
    network: TrainingNetwork
    public: PublicRandomness
    private: PrivateRandomness
    recorder: Recorder
    schedule: Schedule
    epsilon_spent: Callable[[], list[float]]
    anchor_D: Tensor
    attempt: int = 0
    checkpoints: CheckpointFolder | None = None
    hosts_all: bool = True
    augment: Augment | None = None
    node_weights: tuple[float, ...] | None = (
        None  # of the hosted nodes; None: every node counts equally
    )
    # sees every evaluation: public values only
    on_row: Callable[[dict[str, Any]], None] = lambda row: None

    @property
    def private_gradients(self) -> PrivateGradients:
        """The private step of the hosted nodes."""
        return PrivateGradients(
            examples=self.task.examples,
            held_examples=self.task.held_examples,
            engine=self.engine,
            mechanism=self.mechanism,
            budget=self.budget,
            ledger=self.ledger,
            random=self.private,
            nodes=self.network.nodes,
            attempt=self.attempt,
            augment=self.augment,
            node_weights=self.node_weights,
        )


@dataclass
class Progress:
    """Where a run stands; handed to whoever watches after every step, and to `should_stop`."""

    state: Any
    velocity_ND: Tensor | None
    tail_ND: Tensor | None = (
        None  # running mean of the models of the last steps, where that is asked for
    )
    rounds_polished: int = 0
    seconds: float = 0.0
    stopped_because: str = "completed"
    started: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Return seconds of training, those before a resume included."""
        return self.seconds + time.monotonic() - self.started


Watcher = Callable[[Progress], None]


def train(
    run: Run,
    watch: Watcher = lambda progress: None,
    should_stop: Callable[[int], bool] = lambda step: False,
    resume_from: Checkpoint | None = None,
) -> Progress:
    """Train to the end, to a stop, or until all budgets are spent; the last state is kept in all
    cases."""
    run = _with_equal_rows(run)
    progress = _start(run, resume_from)
    last_step = progress.state.step + _steps_within_budget(run)
    try:
        while progress.state.step < run.schedule.steps:
            if should_stop(progress.state.step):
                progress.stopped_because = (
                    f"interrupted at step {progress.state.step} of {run.schedule.steps}"
                )
                break
            if progress.state.step >= last_step:
                progress.stopped_because = (
                    f"privacy budget spent at step {last_step} of {run.schedule.steps}"
                )
                break
            _iterate(run, progress)
            _average(run, progress, min(run.schedule.steps, last_step))
            _after_step(run, progress)
            watch(progress)
        if run.checkpoints:
            save_checkpoint(run, progress)
        if not progress.stopped_because.startswith("interrupted"):
            _take_average(run, progress)
            _polish(run, progress, watch)
    except DivergenceError as error:
        progress.stopped_because = f"diverged: {error}"
    except Exception:
        _rescue(run, progress)
        raise
    record(run, progress, final=True)
    return progress


def _with_equal_rows(run: Run) -> Run:
    """Check the engine before anything is released; take a slower one, or fixed places, where that
    is needed."""
    checkable = isinstance(run.engine, CheckedEngine) and isinstance(
        run.mechanism, GaussianMechanism
    )
    if not checkable or not any(
        run.mechanism.num_examples
    ):  # broken on purpose by an audit, or nothing to release
        return run
    assert isinstance(run.engine, CheckedEngine)

    def nodes_by_shape(fixed: bool) -> dict[PassShape, int]:
        groups = replace(run.mechanism, fixed_places=fixed).rows_of_same_shape()
        return {shape: len(rows) for shape, rows in groups.items()}

    public = run.task.public_rows(_CHECKED_ROWS)
    engine, fixed = engine_with_equal_rows(run.engine, run.anchor_D, public, nodes_by_shape)
    return replace(run, engine=engine, mechanism=replace(run.mechanism, fixed_places=fixed))


def _rescue(run: Run, progress: Progress) -> None:
    """Keep the steps that were paid for when code outside of the loop fails (a metric, a callback),
    then let it fail.

    With several processes there is nothing to keep: the others are at other steps, and the last
    common one is on disk."""
    if run.checkpoints and run.hosts_all and progress.state.step > 0:
        with suppress(Exception):  # what failed first is what has to be told
            save_checkpoint(run, progress)


def _iterate(run: Run, progress: Progress) -> None:
    """One iteration: private gradient, momentum, descent, exchange."""
    step = progress.state.step
    grad_ND = run.private_gradients(run.algorithm.model(progress.state), step)
    if progress.velocity_ND is not None:
        grad_ND.add_(progress.velocity_ND, alpha=run.schedule.momentum)
    state = run.algorithm.descend(progress.state, grad_ND)
    velocity_ND = grad_ND if progress.velocity_ND is not None else None
    del grad_ND  # an N x D tensor less while the nodes exchange
    if (step + 1) % run.schedule.gossip_every == 0:
        with naming_gradient_step(state.step):
            state = run.algorithm.gossip(state, run.network, run.public)
    # Assigned together at the end: whatever interrupts an iteration leaves the state before it.
    progress.state, progress.velocity_ND = state, velocity_ND


def _steps_within_budget(run: Run) -> int:
    """Return how many steps some node of the whole run can still make a release in; all processes
    agree on it."""
    hosted = [run.schedule.steps if left is None else left for left in run.budget.remaining]
    return max(run.network.gather_values("remaining releases", max(hosted, default=0)))


def _average(run: Run, progress: Progress, last_step: int) -> None:
    """Keep the running mean of the models of the last `average_last` steps: post-processing, it
    costs no privacy."""
    count = progress.state.step - (last_step - run.schedule.average_last)
    if not run.schedule.average_last or count < 1:
        return
    models_ND = run.algorithm.model(progress.state)
    if count == 1 or progress.tail_ND is None:
        progress.tail_ND = models_ND.clone()
    else:
        progress.tail_ND = progress.tail_ND.lerp(models_ND, 1 / count)


def _take_average(run: Run, progress: Progress) -> None:
    """Go on from the averaged models, as if they were a start: the public copies begin at the
    anchor again."""
    if progress.tail_ND is not None:
        state = run.polish.init(progress.tail_ND, run.anchor_D)
        progress.state = state._replace(step=progress.state.step, round=progress.state.round)


def _polish(run: Run, progress: Progress, watch: Watcher) -> None:
    """Gossip on without gradients: the nodes move together and nothing new about the data is
    released."""
    for _ in range(run.schedule.polish_rounds):
        with naming_gradient_step(progress.state.step):
            progress.state = run.polish.gossip(progress.state, run.network, run.public)
        progress.rounds_polished += 1
        watch(progress)


def _start(run: Run, snapshot: Checkpoint | None) -> Progress:
    if snapshot is None:
        run.recorder.keep_until(-1)  # rows of an earlier start that left no snapshot
        start_ND = run.anchor_D.expand(len(run.network.nodes), -1).clone()
        state = run.algorithm.init(start_ND, run.anchor_D)
        velocity_ND = torch.zeros_like(start_ND) if run.schedule.momentum else None
        progress = Progress(state, velocity_ND)
        if run.checkpoints and run.checkpoints.num_parts > 1 and run.schedule.checkpoint_every:
            # so that all processes have a step in common from the first one on
            save_checkpoint(run, progress)
        record(run, progress)
        return progress
    progress = _restored(run, snapshot)
    run.ledger.check_against(snapshot.meta["ledger"])
    run.recorder.keep_until(snapshot.step)
    return progress


def _restored(run: Run, snapshot: Checkpoint) -> Progress:
    """Return the progress of a snapshot, or refuse one that another method, model or release
    wrote."""
    tensors = dict(snapshot.tensors)
    velocity_ND, tail_ND = tensors.pop("velocity_ND", None), tensors.pop("tail_ND", None)
    start_ND = run.anchor_D.expand(len(run.network.nodes), -1)
    expected = run.algorithm.init(start_ND, run.anchor_D)._asdict()
    shapes = {name: value.shape for name, value in expected.items() if isinstance(value, Tensor)}
    if {name: value.shape for name, value in tensors.items()} != shapes or (
        velocity_ND is None
    ) != (not run.schedule.momentum):
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds {sorted(snapshot.tensors)} of other "
            "names or shapes than this "
            "run's state; it was written by another method or model. Start again with another "
            "--out folder"
        )
    template = type(run.algorithm.init(run.anchor_D[None], run.anchor_D))
    run.network.traffic.restore(**snapshot.meta["traffic"])
    state = template(**tensors, step=snapshot.step, round=snapshot.meta["round"])
    return Progress(state, velocity_ND, tail_ND, seconds=snapshot.meta["seconds"])


def _after_step(run: Run, progress: Progress) -> None:
    step = progress.state.step
    every = run.schedule.evaluate_every
    if every and step % every == 0 and step < run.schedule.steps:
        record(run, progress)
    every = run.schedule.checkpoint_every
    if run.checkpoints and every and step % every == 0:
        save_checkpoint(run, progress)


def save_checkpoint(run: Run, progress: Progress) -> None:
    """Write a snapshot of this process."""
    assert run.checkpoints is not None
    fields = progress.state._asdict()
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    if progress.velocity_ND is not None:
        tensors["velocity_ND"] = progress.velocity_ND
    if progress.tail_ND is not None:
        tensors["tail_ND"] = progress.tail_ND
    meta = {
        "round": progress.state.round,
        "traffic": run.network.traffic.as_dict(),
        "ledger": run.ledger.heads(),
        "seconds": progress.elapsed(),
    }
    run.checkpoints.save(progress.state.step, tensors, meta)


def record(run: Run, progress: Progress, final: bool = False) -> None:
    """Evaluate on public data and write one row."""
    state = progress.state
    models_ND = run.algorithm.model(state)
    num_nodes = models_ND.shape[0]
    looked_at = (
        range(num_nodes)
        if final or num_nodes <= MANY_NODES
        else range(0, num_nodes, num_nodes // 16)
    )
    row: dict[str, Any] = {
        "step": state.step,
        "round": state.round,
        "nodes": [run.network.nodes[index] for index in looked_at],
        "bytes_per_edge": run.network.traffic.bytes_per_edge,
        "bytes_sent_nodes": run.network.traffic.bytes_sent,
        "epsilon_nodes": run.epsilon_spent(),
    }
    for name, values in run.task.evaluate(models_ND[list(looked_at)]).items():
        row[f"{name}_nodes"] = values.tolist()
        row[f"{name}_node_mean"] = float(values.mean())
        row[f"{name}_node_min"] = float(values.min())
    if run.hosts_all:
        average_D = run.algorithm.average(state)
        for name, values in run.task.evaluate(average_D[None]).items():
            row[f"{name}_average_model"] = float(values[0])
        row["disagreement"] = float((models_ND - models_ND.mean(0)).pow_(2).sum(1).mean().sqrt())
    if hasattr(state, "x_hat_ND"):
        row["residual_ratio"] = residual_ratio(state.x_ND, state.x_hat_ND)
    row["seconds"] = progress.elapsed()
    if final:
        row["final"] = True
    run.recorder.write(row)
    run.on_row(copy.deepcopy(row))  # whoever looks at it cannot change what is recorded
    warn_if_residual_grows(run.recorder.rows)


def residual_ratio(x_ND: Tensor, x_hat_ND: Tensor) -> float:
    """Return the mean over nodes of |x - x_hat| / |x|: how far what others believe lags behind,
    after the noise."""
    ratios_N = (x_ND - x_hat_ND).norm(dim=1) / x_ND.norm(dim=1).clamp_min(1e-30)
    return float(ratios_N.mean())


def warn_if_residual_grows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn when the residual rose at each of the last evaluations and has doubled: top and sign
    have no radius to trust."""
    ratios = [row["residual_ratio"] for row in rows if "residual_ratio" in row][
        -WATCHED_EVALUATIONS:
    ]
    rising = all(after > before for before, after in itertools.pairwise(ratios))
    if len(ratios) == WATCHED_EVALUATIONS and rising and ratios[-1] > 2 * ratios[0] > 0:
        warnings.warn(
            f"the residual |x - x_hat| / |x| has grown from {ratios[0]:.3g} to {ratios[-1]:.3g}: "
            "gossip may be diverging; "
            "lower algorithm.mixing_rate, or use a compressor with a known radius such as 'rot:1'",
            stacklevel=2,
        )
