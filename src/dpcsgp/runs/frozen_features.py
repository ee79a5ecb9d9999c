"""A model of which only a head is trained: its frozen part is run once per example.

The task then has the features for its inputs and the head for its model. What is trained are the
same parameters in the same order, so vectors, messages, ledgers, checkpoints and results are those
of the whole model. Whether features are kept follows from the model, public rows, settings and
declared numbers; the log says what was decided and why. How a row keeps its bits is said in
`privacy/frozen_rows.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from dpcsgp.config import Config
from dpcsgp.privacy.frozen_rows import ROWS_OF_A_PASS, FrozenRows
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.frozen_split import NoSplit, Split, find_split
from dpcsgp.tasks import Supervised, Task
from dpcsgp.tasks.measures import DirectedMetric
from dpcsgp.tasks.supervised import LOSSES, WeightedCrossEntropy
from dpcsgp.tasks.units import UnitTask

# of the features of all nodes and of the test data; more only where features are smaller than
# what they are made of
MOST_BYTES: Final = 10**9
_PUBLIC_ROWS: Final = 64  # that the checks are made with

log = logging.getLogger(__name__)


def with_frozen_features(task: Task, config: Config, facts: Facts) -> Task:
    """Return the task with features for its inputs, where a frozen part makes them.

    Otherwise the task as it is: the whole model is run at every step, as ever.

    Args:
        task: examples of the hosted nodes, on the device where passes run.
        config: settings of the run.
        facts: declared numbers of all nodes, hosted or not: all processes decide alike.
    """
    rows = task.rows if isinstance(task, UnitTask) else task
    if not _has_frozen(task):
        return task
    try:
        if not isinstance(rows, Supervised):
            raise NoSplit("examples are read when they are drawn")
        if config.task.augmentation != "none":
            raise NoSplit(f'task.augmentation = "{config.task.augmentation}" makes new examples')
        declared = None if isinstance(task, UnitTask) else facts.num_examples
        cached = featured(rows, declared, config.run.max_rows_per_pass)
    except NoSplit as reason:
        log.info("the frozen part of the model is run at every step: %s", reason)
        return task
    return replace(task, rows=cached) if isinstance(task, UnitTask) else cached


def featured(
    task: Supervised, declared: Sequence[int] | None, most_rows: int | str = "auto"
) -> Supervised:
    """Return a task of features and head.

    Args:
        task: examples of the hosted nodes.
        declared: public numbers of examples of all nodes; None: only persons are counted.
        most_rows: of a pass; "auto": as many as are useful.

    Raises:
        NoSplit: why there are no features.
    """
    public = task.public_rows(_PUBLIC_ROWS)
    split = find_split(task.module, public[0], _has_own_functions(task.loss, task.metrics))
    _check_size(task, split, declared)
    most = max(ROWS_OF_A_PASS) if most_rows == "auto" else int(most_rows)
    try:
        passes = FrozenRows.checked(task.module, split.entry, public, most)
    except Exception as error:  # on public rows: the whole model may run all the same
        raise NoSplit(f"its rows cannot be told apart ({error})") from error
    log.info(
        "the frozen part of the model is run once per example: %s features before '%s', "
        "%d rows at a time",
        "x".join(map(str, split.shape)),
        split.entry,
        passes.rows_per_pass,
    )
    test = task.test
    if test is not None:  # public, and measured in eval() mode
        test = passes.evaluating().features(test[0]), test[1]
    return replace(task, module=split.head, inputs=_inputs(task, passes), test=test)


def _inputs(task: Supervised, passes: FrozenRows) -> Tensor:
    """Return the features of all rows, in passes of each node's own."""
    held = task.held_examples
    starts = [0, *accumulate(held)]
    parts = [
        passes.features(task.inputs[start : start + own], declared)
        for start, own, declared in zip(starts, held, task.num_examples, strict=False)
    ]
    return torch.cat(parts) if parts else passes.features(task.inputs[:0])


def _check_size(task: Supervised, split: Split, declared: Sequence[int] | None) -> None:
    """Refuse features that are too large, by public numbers alone.

    How many rows all persons have together is nobody's business, so their features may be no larger
    than the rows themselves.
    """
    row_bytes = task.inputs[:0].new_empty(1, *task.inputs.shape[1:]).nbytes
    if split.row_bytes <= row_bytes:
        return
    if declared is None:
        raise NoSplit(f"features of a row take {split.row_bytes:,} bytes, the row {row_bytes:,}")
    count = sum(declared) + (len(task.test[0]) if task.test else 0)
    if count * split.row_bytes > MOST_BYTES:
        raise NoSplit(f"features take {count * split.row_bytes:,} bytes, more than {MOST_BYTES:,}")


def _has_frozen(task: Task) -> bool:
    return not all(parameter.requires_grad for parameter in task.module.parameters())


def _has_own_functions(loss: Any, metrics: Mapping[str, Any]) -> bool:
    """Tell whether loss or metrics may look at more of the outputs than their logits."""
    own = [usual for usual, _ in LOSSES.values()]
    measured = [metric for _, usual in LOSSES.values() for metric in usual.values()]
    plain = [
        metric.function if isinstance(metric, DirectedMetric) else metric
        for metric in metrics.values()
    ]
    known = loss in own or isinstance(loss, WeightedCrossEntropy)
    return not (known and all(metric in measured for metric in plain))
