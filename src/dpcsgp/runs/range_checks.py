"""Whole numbers that a model or loss looks up in tables: is any past the end of its table?

The model does not see the private examples for this. One made-up example holds the largest value of
every place of the node's examples, another the smallest; if model and loss bear both, they bear
all. Only where they do not are the few examples tried that have those values, to name one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpcsgp.errors import RefusedDataError
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.examples import NodeExamples
from dpcsgp.tasks.node_data import RowForm, label_words
from dpcsgp.tasks.scanning import Extremes
from dpcsgp.tasks.trees import Packing

Rows = tuple[Tensor, Tensor]


def check_label_range(part: NodeExamples, num_outputs: int) -> None:
    """Refuse class labels that the model has no output for."""
    found = part.scan.targets
    if part.form.targets.dtype.is_floating_point or found is None:
        return  # probabilities of classes
    for values, rows, wrong in (
        (found.low_W, found.low_row_W, found.low_W < 0),
        (found.high_W, found.high_row_W, found.high_W >= num_outputs),
    ):
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            raise RefusedDataError(
                f"{part.scan.where}, example {int(rows[place])}",
                f": label {int(values[place])}, but the model has {num_outputs} outputs; "
                f"{label_words(int(values[place]), num_outputs)}",
            )


def check_ranges(
    module: nn.Module,
    loss: LossPerExample,
    form: RowForm,
    test: Rows | None,
    parts: Mapping[int, NodeExamples],
) -> None:
    """Refuse examples with whole numbers that model or loss choke on, before any release.

    A word past the vocabulary is such an example.
    """
    trial = _Trial(module, loss, form, test)
    for part in parts.values():
        for kind in form.whole_kinds:
            extremes = getattr(part.scan, kind)
            if extremes is not None and not trial.bears(kind, extremes):
                _name_example(trial, part, extremes)


def _whole_places(packing: Packing) -> Tensor:
    """Return which places of a packed row hold whole numbers."""
    return torch.cat(
        [
            torch.full((math.prod(shape),), not dtype.is_floating_point)
            for shape, dtype in zip(packing.shapes, packing.dtypes, strict=True)
        ]
    )


class _Trial:
    """A copy of the model in eval() mode, and a public row into which values are put."""

    def __init__(
        self, module: nn.Module, loss: LossPerExample, form: RowForm, test: Rows | None
    ) -> None:
        self._module, self._loss, self._form = copy.deepcopy(module).eval(), loss, form
        inputs, targets = (
            torch.zeros((1, *packing.shape), dtype=packing.dtype)
            for packing in (form.inputs, form.targets)
        )
        self._row = {
            "inputs": inputs if test is None else test[0][:1],
            "targets": targets if test is None else test[1][:1],
        }

    def bears(self, kind: str, extremes: Extremes) -> bool:
        """Tell whether the smallest and the largest whole number of every place can be computed."""
        packing: Packing = getattr(self._form, kind)
        whole_W = _whole_places(packing)
        for values_W in (extremes.low_W, extremes.high_W):
            row = self._row[kind].reshape(-1)
            made = torch.where(whole_W, values_W.to(row.dtype), row).reshape(1, *packing.shape)
            if self.error({**self._row, kind: made}) is not None:
                return False
        return True

    def error(self, row: Mapping[str, Tensor]) -> Exception | None:
        """Return the error that model or loss raise on a row."""
        try:
            with torch.no_grad():
                self._loss(self._module(row["inputs"].clone()), row["targets"].clone())
        except Exception as error:
            return error
        return None


def _name_example(trial: _Trial, part: NodeExamples, extremes: Extremes) -> None:
    """Try the examples that have the extreme values, and refuse the first that fails."""
    for index in _candidates(extremes):
        (inputs, targets), _ = part.read([index], [0])
        error = trial.error({"inputs": inputs, "targets": targets})
        if error is not None:
            raise RefusedDataError(
                f"{part.scan.where}, example {index}",
                f": model and loss fail on it ({error}); whole numbers past the end of a table "
                "(a word past the vocabulary) do that",
            )


def _candidates(extremes: Extremes) -> Iterable[int]:
    rows: list[Any] = [*extremes.high_row_W.tolist(), *extremes.low_row_W.tolist()]
    return sorted(set(rows))
