"""The one loop. Read `train` from top to bottom to follow one training step.

Private data are seen by `privacy.PrivateGradients` alone; what it returns is clipped, noised and
divided by public constants, and its event is on the ledger's disk. Everything after that is
post-processing.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dpcsgp.algorithms import Algorithm, Network
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.algorithms.optimizers import Memory, Momentum, Optimizer, memory_of_ready
from dpcsgp.compression.base import naming_gradient_step
from dpcsgp.errors import CheckpointError, DivergenceError, WaitStoppedError
from dpcsgp.evaluation import evaluation_row, warn_if_not_finite, warn_if_residual_grows
from dpcsgp.network import Traffic
from dpcsgp.privacy import PrivateGradients
from dpcsgp.randomness import PublicRandomness
from dpcsgp.records.checkpoint import Checkpoint, CheckpointFolder, Keeper
from dpcsgp.records.ending import Ending, Stop
from dpcsgp.records.metrics import Recorder
from dpcsgp.tasks import Task

log = logging.getLogger(__name__)


class TrainingNetwork(Network, Protocol):
    """A network that also counts what it sends, and lets processes tell each other small values."""

    traffic: Traffic

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """Return what all processes of the run gave under this name (JSON values, by rank)."""
        ...


class LateGradients(Protocol):
    """Private gradients that may be ready only rounds after they were begun."""

    def take(self, model_ND: Tensor, step: int) -> tuple[Tensor, Sequence[bool]]:
        """Return gradients (N, D) and whose are ready now; rows of others hold nothing."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When things happen: gradient steps, exchanges, evaluations and checkpoints."""

    steps: int
    gossip_every: int = 1
    polish_rounds: int = 0
    evaluate_every: int = 10
    checkpoint_every: int = 0
    average_last: int = 0


@dataclass(frozen=True)
class Run:
    """All parts of a training run in one process; `runs.build.build_run` puts one together.

    Attributes:
        task: model, loss and public evaluation; private examples are reached through `gradients`.
        gradients: the private step.
        algorithm: how nodes descend and exchange.
        polish: the same for the rounds after the last gradient.
        network: who hears whom.
        public: streams that every node knows.
        recorder: where rows are written.
        schedule: when things happen.
        anchor_D: the public initial model.
        optimizer: from a private gradient to the direction of a local step.
        checkpoints: where to save; None: nowhere.
        late: gradients that may be late; None: every step waits for its own.
        hosts_all: whether all nodes of the run are in this process.
        resumes_alone: whether this process goes on from its own newest checkpoint, whatever others
            have; otherwise all need one step in common.
        on_row: sees a copy of every row that is written: public values only.
        on_saved: told after every checkpoint of the oldest step that is kept.
    """

    task: Task
    gradients: PrivateGradients
    algorithm: Algorithm[Any]
    polish: Algorithm[Any]
    network: TrainingNetwork
    public: PublicRandomness
    recorder: Recorder
    schedule: Schedule
    anchor_D: Tensor
    optimizer: Optimizer = field(default_factory=Momentum)
    checkpoints: CheckpointFolder | None = None
    late: LateGradients | None = None
    hosts_all: bool = True
    resumes_alone: bool = True
    on_row: Callable[[dict[str, Any]], None] = lambda row: None
    on_saved: Callable[[int], None] = lambda oldest: None


@dataclass
class Progress:
    """Where a run stands; handed to whoever watches after every step and every polish round."""

    state: Any
    memory: Memory  # the optimizer's, such as a velocity
    tail_ND: Tensor | None = None  # running mean of the last steps' models, if asked for
    rounds_polished: int = 0
    steps_saved: bool = False  # the state after the last step is on disk
    seconds: float = 0.0
    ending: Ending = Ending.COMPLETED
    detail: str = ""
    started: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Return seconds of training, those before a resume included."""
        return self.seconds + time.monotonic() - self.started

    @property
    def stopped_because(self) -> str:
        """The ending in words, as `summary.json` has it."""
        return f"{self.ending}{self.detail}"


Watcher = Callable[[Progress], None]


def train(
    run: Run,
    watch: Watcher = lambda progress: None,
    should_stop: Callable[[int], object] = lambda step: False,
    resume_from: Checkpoint | None = None,
) -> Progress:
    """Train to the end, to a stop, or until all budgets are spent.

    The state after the last step is saved, if anything is, unless the run diverged before or one of
    several processes failed. What polishing makes of it is not a checkpoint.

    Args:
        run: the parts.
        watch: called after every step and every polish round.
        should_stop: called with the number of steps done, before each step; see `Stop.of`.
        resume_from: where to go on; None: from the start.

    Returns:
        The last state, and why it is the last.
    """
    # From the start or a checkpoint, as far as the schedule and all budgets go.
    progress = _start(run, resume_from)
    last_step = progress.state.step + _steps_within_budget(run, progress.state.step)
    steps = run.schedule.steps
    try:
        while progress.state.step < steps:
            if stop := Stop.of(should_stop(progress.state.step)):
                early = stop is Stop.FINISH
                ending = Ending.FINISHED_EARLY if early else Ending.INTERRUPTED
                _end(progress, ending, f" at step {progress.state.step} of {steps}")
                break
            if progress.state.step >= last_step:
                _end(progress, Ending.BUDGET_SPENT, f" at step {last_step} of {steps}")
                break
            # One step, then what follows from it: running mean, row, checkpoint, a look for others.
            _iterate(run, progress)
            _average(run, progress, min(steps, last_step))
            _after_step(run, progress)
            watch(progress)
        if run.checkpoints:
            save_checkpoint(run, progress)
            progress.steps_saved = True
        # A run that was interrupted goes on later; all others are brought to their end.
        if progress.ending is not Ending.INTERRUPTED:
            _settle(run, progress, run.algorithm)
            _take_average(run, progress)
            _polish(run, progress, watch)
    except DivergenceError as error:
        _end(progress, Ending.DIVERGED, f": {error}")
    except WaitStoppedError:
        # The step that waited is made again later, of the same release.
        _end(progress, Ending.INTERRUPTED, f" at step {progress.state.step} of {steps}")
        _rescue(run, progress)
    except Exception:
        _rescue(run, progress)
        raise
    record(run, progress, final=True)
    log.info("%s after step %d", progress.ending, progress.state.step)
    return progress


def _end(progress: Progress, ending: Ending, detail: str) -> None:
    progress.ending, progress.detail = ending, detail


def _rescue(run: Run, progress: Progress) -> None:
    """Keep the steps that were paid for when code outside of the loop fails, then let it fail.

    Where processes need a step in common there is nothing to keep: the others are at other steps,
    and the last common one is on disk.
    """
    # Once the last step is saved, polishing must not replace it: a resume polishes anew.
    keeps = run.checkpoints and run.resumes_alone and progress.state.step > 0
    if keeps and not progress.steps_saved:
        with suppress(Exception):  # what failed first is what has to be told
            save_checkpoint(run, progress)


def _iterate(run: Run, progress: Progress) -> None:
    """One iteration: private gradient, direction, descent, exchange."""
    step, decay = progress.state.step, run.optimizer.weight_decay
    # Private: recorded, clipped and noised before it is handed over.
    model_ND = run.algorithm.model(progress.state)
    if run.late is None:
        grad_ND, ready = run.gradients(model_ND, step), None
    else:
        grad_ND, ready = run.late.take(model_ND, step)
    # Post-processing: momentum or Adam, weight decay.
    direction_ND, memory = run.optimizer.direction(grad_ND, progress.memory)
    if decay:  # out of place: the memory may hold the direction itself
        direction_ND = direction_ND.add(model_ND, alpha=decay)
    state = _descended(run.algorithm, progress.state, direction_ND, ready)
    memory = memory_of_ready(progress.memory, memory, ready)
    del model_ND, grad_ND, direction_ND  # N x D tensors less while the nodes exchange
    if (step + 1) % run.schedule.gossip_every == 0:
        with naming_gradient_step(state.step), run.network.traffic.of_whole_rounds():
            state = run.algorithm.gossip(state, run.network, run.public)
    # Assigned together at the end: whatever interrupts an iteration leaves the state before it.
    progress.state, progress.memory = state, memory


def _descended(algorithm: Any, state: Any, grad_ND: Tensor, ready: Sequence[bool] | None) -> Any:
    """Take a local step, or only those nodes that have a gradient."""
    if ready is None:
        return algorithm.descend(state, grad_ND)
    return algorithm.descend_some(state, grad_ND, ready)


def _steps_within_budget(run: Run, step: int) -> int:
    """Return in how many further steps some node of the run can make a release: all agree on it."""
    left = run.gradients.join(step, run.schedule.steps, run.network.gather_values)
    hosted = run.schedule.steps if left is None else left
    return max(run.network.gather_values("remaining releases", hosted))


def _average(run: Run, progress: Progress, last_step: int) -> None:
    """Keep the running mean of the models of the last steps: post-processing, costs no privacy."""
    # How many of the last steps are over, this one included.
    count = progress.state.step - (last_step - run.schedule.average_last)
    if not run.schedule.average_last or count < 1:
        return
    models_ND = run.algorithm.model(progress.state)
    if count == 1 or progress.tail_ND is None:
        progress.tail_ND = models_ND.clone()
    else:
        progress.tail_ND = progress.tail_ND.lerp(models_ND, 1 / count)


def _take_average(run: Run, progress: Progress) -> None:
    """Go on from the averaged models as from a start: public copies begin at the anchor again."""
    if progress.tail_ND is not None:
        state = run.polish.init(progress.tail_ND, run.anchor_D)
        if isinstance(run.polish, LaggedDPCSGP):
            state = run.polish.counted(state, progress.state)
        progress.state = state._replace(step=progress.state.step, round=progress.state.round)


def _polish(run: Run, progress: Progress, watch: Watcher) -> None:
    """Gossip on without gradients: nodes move together, nothing new about the data is released."""
    for _ in range(run.schedule.polish_rounds):
        with naming_gradient_step(progress.state.step):
            progress.state = run.polish.gossip(progress.state, run.network, run.public)
        progress.rounds_polished += 1
        watch(progress)
    _settle(run, progress, run.polish)


def _settle(run: Run, progress: Progress, algorithm: Algorithm[Any]) -> None:
    """With lag: take what is still under way, so that what follows begins in step."""
    if isinstance(algorithm, LaggedDPCSGP):
        progress.state = algorithm.settle(progress.state, run.network, run.public)


def _start(run: Run, checkpoint: Checkpoint | None) -> Progress:
    """Return the first progress, or that of a checkpoint whose ledgers are as long as it says."""
    if checkpoint is None:
        run.recorder.keep_until(-1)  # rows of an earlier start that left no checkpoint
        start_ND = run.anchor_D.expand(len(run.network.nodes), -1).clone()
        state = run.algorithm.init(start_ND, run.anchor_D)
        progress = Progress(state, run.optimizer.init(start_ND))
        if run.checkpoints and not run.resumes_alone and run.schedule.checkpoint_every:
            save_checkpoint(run, progress)  # all processes have a step in common from the first on
        record(run, progress)
        return progress
    progress = _restored(run, checkpoint)
    run.gradients.ledger.check_against(checkpoint.meta["ledger"])
    run.recorder.keep_until(checkpoint.step)
    log.info("resumed from the checkpoint of step %d", checkpoint.step)
    return progress


def _restored(run: Run, checkpoint: Checkpoint) -> Progress:
    """Return the progress of a checkpoint, or refuse one of another method, model or release."""
    tensors = dict(checkpoint.tensors)
    tail_ND = tensors.pop("tail_ND", None)
    kept = {
        name: tensors.pop(name)
        for keeper in _keepers(run)
        for name in keeper.checkpoint_names
        if name in tensors
    }
    start_ND = run.anchor_D.expand(len(run.network.nodes), -1)
    # A state and a memory of this run tell which names and shapes must be there.
    template, memory = run.algorithm.init(start_ND, run.anchor_D), run.optimizer.init(start_ND)
    shapes = {name: value.shape for name, value in (_tensors(template) | memory).items()}
    found = {name: value.shape for name, value in tensors.items()}
    if found != shapes:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} holds {sorted(checkpoint.tensors)} of other "
            "names or shapes than this run's state; it was written by another method, optimizer "
            "or model. "
            "Start again with another --out folder"
        )
    # Bytes that were sent before count, and so do the seconds.
    run.network.traffic.restore(**checkpoint.meta["traffic"])
    for keeper in _keepers(run):
        keeper.restore(kept)
    memory = {name: tensors.pop(name) for name in memory}
    state = template._replace(**tensors, step=checkpoint.step, round=checkpoint.meta["round"])
    return Progress(state, memory, tail_ND, seconds=checkpoint.meta["seconds"])


def _keepers(run: Run) -> list[Keeper]:
    return [part for part in (run.network, run.late) if isinstance(part, Keeper)]


def _tensors(state: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state._asdict().items() if isinstance(value, Tensor)}


def _after_step(run: Run, progress: Progress) -> None:
    step = progress.state.step
    every = run.schedule.evaluate_every
    if every and step % every == 0 and step < run.schedule.steps:
        record(run, progress)
    every = run.schedule.checkpoint_every
    if run.checkpoints and every and step % every == 0:
        save_checkpoint(run, progress)


def save_checkpoint(run: Run, progress: Progress) -> None:
    """Write a checkpoint of this process."""
    assert run.checkpoints is not None
    tensors = _tensors(progress.state) | progress.memory
    if progress.tail_ND is not None:
        tensors["tail_ND"] = progress.tail_ND
    for keeper in _keepers(run):
        tensors |= keeper.tensors()
    meta = {
        "round": progress.state.round,
        "traffic": run.network.traffic.as_dict(),
        "ledger": run.gradients.ledger.heads(),
        "seconds": progress.elapsed(),
    }
    run.checkpoints.save(progress.state.step, tensors, meta)
    # Releases are kept as long as some checkpoint leads back to them.
    oldest = min(run.checkpoints.complete_steps(), default=0)
    run.gradients.forget_before(oldest)
    run.on_saved(oldest)
    log.info("saved step %d", progress.state.step)


def record(run: Run, progress: Progress, final: bool = False) -> None:
    """Evaluate on public data, write one row, and show a copy of it to whoever watches."""
    row = evaluation_row(run, progress.state, progress.elapsed(), final)
    run.recorder.write(row)
    run.on_row(copy.deepcopy(row))  # whoever looks at it cannot change what is recorded
    warn_if_not_finite(run.recorder.rows)
    if not _has_law(run):
        warn_if_residual_grows(run.recorder.rows)


def _has_law(run: Run) -> bool:
    """Say whether a law has shown at the start that gossip is stable: then nothing can diverge."""
    compressor = getattr(run.algorithm, "compressor", None)
    return compressor is None or compressor.moments(len(run.anchor_D)) is not None
