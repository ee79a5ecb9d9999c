"""A user's own task: the data of the hosted nodes, and the checks before any release.

The checks are of model, loss and data.

The model is probed on test data or on random inputs, never on private data. Of private whole
numbers only the smallest and largest are tried, in a made-up example (`range_checks`); data errors
name node and example and are raised where the data are.

Legend: J examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from dpcsgp.errors import DpcsgpError, ModelError, RefusedDataError
from dpcsgp.modes import evaluation_mode
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.model_probes import check_examples_independent, check_gradients_reach
from dpcsgp.runs.column_hints import warn_about_columns
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.misfits import check_class_targets, remedy
from dpcsgp.runs.public_checks import refuse_unfinite_outputs
from dpcsgp.runs.range_checks import check_label_range, check_ranges
from dpcsgp.runs.row_digests import warn_about_rows_given_twice
from dpcsgp.runs.user_data_checks import (
    declared_sizes,
    refuse_differences,
    tables_in_order,
    warn_about_loaders,
    warn_about_shared_data,
)
from dpcsgp.runs.user_units import UserUnits
from dpcsgp.tasks import LossPerExample, MovableTask, Supervised
from dpcsgp.tasks.collating import Collate, collated
from dpcsgp.tasks.columns import public_classes
from dpcsgp.tasks.examples import (
    MOST_BYTES_IN_MEMORY,
    LazyExamples,
    StackedExamples,
    bytes_per_row,
    collect_examples,
)
from dpcsgp.tasks.lazy_task import LazySupervised
from dpcsgp.tasks.measures import DirectedMetric
from dpcsgp.tasks.node_data import (
    Classes,
    NodeData,
    RowForm,
    check_labels,
    count_examples,
    opened,
    raw_targets,
)
from dpcsgp.tasks.scale_hints import warn_about_scale
from dpcsgp.tasks.supervised import (
    LOSSES,
    Metric,
    WeightedCrossEntropy,
    accuracy,
    check_class_weights,
    logits_of,
)
from dpcsgp.tasks.tables import Names
from dpcsgp.tasks.trees import Packing, UnpackInput, UnpackTarget
from dpcsgp.tasks.units import UnitTask

Part = StackedExamples | LazyExamples


@final
@dataclass(frozen=True)
class UserData:
    """The examples of the hosted nodes, public test data, and what is measured on these.

    Inputs and targets are packed (`tasks.trees`); `form` says how, and `connect` lets the model
    unpack them. `classes` are the public labels whose places are the targets, if labels are mapped.
    """

    parts: dict[int, Part]
    test: tuple[Tensor, Tensor] | None
    loss: LossPerExample
    metrics: Mapping[str, Metric]
    facts: Facts
    form: RowForm
    classes: Classes = None
    units: UserUnits | None = None  # None: every example is its own unit of privacy

    @classmethod
    def collect(
        cls,
        node_data: Sequence[NodeData],
        hosted: Sequence[int],
        test_data: NodeData,
        loss: LossPerExample,
        metrics: Mapping[str, Metric],
        num_examples: Sequence[int] | None = None,
        test_examples: int = 0,
        classes: Sequence[Any] | None = None,
        collate: Collate | None = None,
        units: UserUnits | None = None,
    ) -> UserData:
        """Read the data of the hosted nodes; of the others at most the lengths are looked at.

        `test_examples` keeps only so many of the test examples (0: all); `collate` brings rows to
        one shape; `units` say whose rows belong together, and `num_examples` then counts persons.
        """
        # Lengths first: they are cheap, and wrong ones are refused before anything is read.
        sizes = declared_sizes(node_data, hosted, num_examples, units)
        same, is_test = warn_about_shared_data(node_data, test_data)
        warn_about_loaders({f"node {node}": node_data[node] for node in hosted}, test_data)
        node_data, test_data, names = tables_in_order(node_data, hosted, test_data)
        node_data = [
            collated(data, collate if node in hosted else None, f"node {node}")
            for node, data in enumerate(node_data)
        ]
        test_data = collated(test_data, collate, "test_data")
        # Public data next: the order of classes follows from them.
        labels = _public_classes(test_data, classes)
        test = _test_part(test_data, labels, test_examples)
        parts = _parts(node_data, hosted, labels)
        # All that was read must agree in shapes and number formats.
        known = {f"node {node}": part.form for node, part in parts.items()}
        known |= {"test_data": test.form} if test else {}
        if not known:
            raise RefusedDataError(
                f"nodes {' and '.join(map(str, hosted))}",
                ": this process has no data; give test_data, so that it knows shapes",
            )
        refuse_differences(known)
        form = next(iter(known.values()))
        if test:
            form = RowForm(
                form.inputs.with_stand_ins(test.inputs), form.targets.with_stand_ins(test.targets)
            )
            warn_about_scale(test.inputs, test.targets)
        warn_about_rows_given_twice(parts, None if is_test else test, same)
        warn_about_columns(parts, (test.inputs, test.targets) if test else None)
        unpacked = {name: _unpacking(metric, form.targets) for name, metric in metrics.items()}
        return cls(
            parts,
            (test.inputs, test.targets) if test else None,
            _unpacking(loss, form.targets),
            unpacked,
            Facts(
                tuple(form.inputs.shape),
                0,
                sizes,
                _details(form, labels, names),
                "example" if units is None else "person",
            ),
            form,
            labels,
            units,
        )

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """Zeros of the shapes and formats of one example."""
        inputs, targets = self.form.inputs, self.form.targets
        return (
            torch.zeros(inputs.shape, dtype=inputs.dtype),
            torch.zeros(targets.shape, dtype=targets.dtype),
        )

    def with_fact(self, name: str, value: str) -> UserData:
        """Return the same data with one more fact that all processes share."""
        facts = replace(self.facts, details=(*self.facts.details, (name, value)))
        return replace(self, facts=facts)

    def connect(self, module: nn.Module) -> None:
        """Let the module take packed inputs, where inputs have parts."""
        if self.form.inputs.skeleton is not None:
            hook = UnpackInput(self.form.inputs, module)
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def task(self, module: nn.Module, nodes: Sequence[int]) -> MovableTask:
        """Return the task of these nodes for the run's module."""
        # A node without data has tensors of length 0 of the right shape.
        empty = tuple(part[None][:0] for part in self.example)
        parts = [self.parts.get(node) for node in nodes]
        lazy = any(isinstance(part, LazyExamples) for part in parts)
        inputs, targets = empty
        if not lazy:
            inputs = _joined([part.inputs for part in parts if isinstance(part, StackedExamples)])
            targets = _joined([part.targets for part in parts if isinstance(part, StackedExamples)])
        declared = tuple(self.facts.num_examples[node] for node in nodes)
        held = tuple(len(part) if part else 0 for part in parts)
        base = Supervised(
            module,
            inputs if len(inputs) else empty[0],
            targets if len(targets) else empty[1],
            declared if self.units is None else held,
            self.test,
            self.loss,
            self.metrics,
            held,
        )
        rows = LazySupervised(base, tuple(parts)) if lazy else base
        if self.units is None:
            return rows
        units = tuple(self.units.of(node) for node in nodes)
        return UnitTask(rows, units, declared, self.units.max_rows)

    def check(self, module: nn.Module, batch_sizes: Sequence[int] = ()) -> None:
        """Refuse a model, loss or labels that do not fit together or cannot be trained privately.

        `batch_sizes` are the expected ones of the run: what happens only in batches of such a size
        is found too.
        """
        # Probes with public or random inputs: what mixes examples or remembers them is refused.
        inputs, targets = self.example
        rows = 1 if self.units is None else self.units.max_rows
        sizes = sorted({rows * size for size in batch_sizes}, reverse=True)
        try:
            check_examples_independent(module, inputs, self.test[0] if self.test else None, sizes)
            if isinstance(self.loss, WeightedCrossEntropy):
                check_class_weights(self.loss.weights, self._num_outputs(module))
            if self._has_classes:
                self._check_public_labels(module)
            refuse_unfinite_outputs(module, self.loss, self.test)
            check_gradients_reach(module, self.loss, (inputs, targets), self.test, sizes, rows)
            if self._has_classes:
                self._check_labels(module)
        # Refusals of ours say what to do; anything else means that model and data do not fit.
        except DpcsgpError:
            raise
        except Exception as error:
            raise ModelError(self._misfit(error)) from error
        # Whole numbers are looked up in tables: one outside of a table fails only when it is met.
        check_ranges(module, self.loss, self.form, self.test, self.parts)
        # Metrics of the caller's own are tried once: later their errors would cost a run.
        start_1D = ParameterLayout.of(module).flatten(module)[None]
        base = Supervised(module, inputs[None], targets[None], (), self.test, metrics=self.metrics)
        base.evaluate(start_1D)

    def with_accuracy(self, module: nn.Module) -> UserData:
        """Return the data with accuracy among the metrics, if a loss of one's own has classes."""
        if self.test is None or "accuracy" in self.metrics:
            return self
        inputs, targets = self.test
        try:
            with torch.no_grad(), evaluation_mode(module):
                logits = logits_of(module(inputs[:1].clone()))
        except Exception:
            return self  # `check` says what is wrong
        whole = targets.dim() == 1 and not targets.is_floating_point()
        if not (whole and isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] > 1):
            return self
        if int(targets.min()) < 0 or int(targets.max()) >= logits.shape[1]:
            return self
        return replace(self, metrics={**self.metrics, "accuracy": accuracy})

    @property
    def _has_classes(self) -> bool:
        usual = LOSSES["cross_entropy"][0]
        return self.loss is usual or isinstance(self.loss, WeightedCrossEntropy)

    def _num_outputs(self, module: nn.Module) -> int:
        return self._logits(module).shape[1]

    def _logits(self, module: nn.Module) -> Tensor:
        # eval() for one forward pass, so that Dropout and the like keep quiet.
        with torch.no_grad(), evaluation_mode(module):
            return logits_of(module(self.example[0][None]))

    def _misfit(self, error: Exception) -> str:
        tried = (
            "test inputs"
            if self.test
            else "random inputs (give test_data to have it tried on real ones)"
        )
        return (
            f"model and loss fail on {tried} of shape {_shown(self.form.inputs)} with targets of "
            f"shape {_shown(self.form.targets)}: {error}{remedy(self.form.inputs, error)}"
        )

    def _check_public_labels(self, module: nn.Module) -> None:
        logits = self._logits(module)
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            return  # the loss says what it makes of them
        check_class_targets(logits, self.form.targets)
        if self.test is not None:
            check_labels(self.test[1], logits.shape[1], "test_data")

    def _check_labels(self, module: nn.Module) -> None:
        num_outputs = self._num_outputs(module)
        for part in self.parts.values():
            check_label_range(part, num_outputs)


def _shown(packing: Packing) -> str:
    if packing.skeleton is not None:
        return str(packing)
    return f"{packing.shapes[0]} ({packing.dtypes[0]})"


def _details(form: RowForm, classes: Classes, names: Names) -> tuple[tuple[str, str], ...]:
    """Return what else all processes must agree on: forms of examples, order of labels, columns."""
    columns = "; ".join(", ".join(map(str, each)) for each in names.values())
    return (
        ("form of inputs", str(form.inputs)),
        ("form of targets", str(form.targets)),
        ("classes (give the same classes=[...] everywhere)", str(classes)),
        *([("columns of tables (give test_data as a table everywhere)", columns)] if names else []),
    )


def _joined(parts: list[Tensor]) -> Tensor:
    """Return all rows one after the other; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros(0)


def _unpacking(function: Any, targets: Packing) -> Any:
    if isinstance(function, DirectedMetric):
        return replace(function, function=_unpacking(function.function, targets))
    return function if targets.skeleton is None else UnpackTarget(targets, function)


def _public_classes(test_data: NodeData, given: Sequence[Any] | None) -> Classes:
    """Return the public order of classes: as given, or as text labels of the test data sort."""
    if given is not None or not count_examples(test_data, "test_data"):
        return public_classes(None, given)
    return public_classes(raw_targets(opened(test_data, "test_data"), "test_data"), None)


def _test_part(test_data: NodeData, classes: Classes, most: int) -> StackedExamples | None:
    count = count_examples(test_data, "test_data")
    if not count:
        return None
    count = min(count, most) if most else count
    part = collect_examples(test_data, count, "test_data", classes, torch.inf)
    if isinstance(part, StackedExamples):
        return part
    # Random views are drawn once: what is measured must not change from row to row.
    (inputs, targets), _ = part.read(range(count), range(count))
    return StackedExamples(inputs, targets, part.form, part.scan)


def _parts(
    node_data: Sequence[NodeData], hosted: Sequence[int], classes: Classes
) -> dict[int, Part]:
    """Read the data of the hosted nodes; datasets fill a common room in memory."""
    parts: dict[int, Part] = {}
    room = float(MOST_BYTES_IN_MEMORY)
    for node in hosted:
        if count := count_examples(node_data[node], f"node {node}"):
            part = collect_examples(node_data[node], count, f"node {node}", classes, room)
            parts[node] = part
            if isinstance(part, StackedExamples):
                room -= len(part) * bytes_per_row(part.form)
    return parts
