"""What a frozen part of a model makes of private rows, computed once: a row's features.

They stand for the row in every later step, so the bound on an example's influence asks of them what
it asks of a pass: the features of a row are the same bits whatever the other rows are, and however
many there are. This rests on three things.

* Every pass has the same public number of rows; blank rows (zeros) fill up the last one. Rows of
  two nodes never share a pass. How many passes a node has follows from its declared number.
* The check that every start makes of its engine (`row_checks`) is made of these passes, on public
  or random rows: other companions, extreme ones, none, other places. Unlike an engine, features
  have no fixed places to fall back on: a row that is taken out moves all that follow. Where a check
  fails fewer rows are passed at a time, down to one; where even one does not repeat itself, there
  are no features.
* What a frozen part does depends on nothing else: it has no trained parameter and draws no random
  number, and the copy of the model that runs here is used for nothing else and then forgotten.

A row on which the model raises has features that are missing (NaN). So has its gradient, which
counts as zero; a model that replaces missing values gives it a gradient of its own, as long as any
other. Features stay in memory: they are in no file, message, log or checkpoint.

Legend: K public rows, P rows of a pass, J rows of a node.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from dpcsgp.privacy.clipping.arithmetic import fixed_arithmetic
from dpcsgp.privacy.passes import PassShape
from dpcsgp.privacy.row_checks import Rows, rows_are_equal

ROWS_OF_A_PASS: Final = (64, 16, 1)  # as many as may be


@final
class FrozenRows:
    """Passes of P rows through the part of a model that comes before one of its layers."""

    def __init__(self, module: nn.Module, entry: str, rows: int) -> None:
        """Take a copy of the module; `entry` names the layer that is given the features."""
        self._module, self._entry, self._rows = copy.deepcopy(module), entry, rows
        self._untouched = copy.deepcopy(module)
        self._threads = torch.get_num_threads()
        self._gradients = True  # as a private step has them: code may look

    @classmethod
    def checked(cls, module: nn.Module, entry: str, public: Rows, most_rows: int) -> FrozenRows:
        """Return passes whose rows do not depend on each other, with as many rows as may be.

        Args:
            module: the model; it is copied.
            entry: name of the layer that is given the features.
            public: inputs (K, ...) and targets (K, ...) of some public or random rows.
            most_rows: of a pass.

        Raises:
            ArithmeticError: where even one row does not repeat itself bit for bit.
        """
        for rows in dict.fromkeys(min(most_rows, rows) for rows in ROWS_OF_A_PASS):
            passes = cls(module, entry, rows)
            # What fails here fails always.
            blanks, rows_P = passes._blanks(public[0]), torch.arange(rows) % len(public[0])
            if passes._run(blanks).shape != passes._run(public[0][rows_P]).shape:
                raise ArithmeticError("the shape of features depends on the rows")
            if rows_are_equal(passes, public, PassShape(rows)):
                return passes
        raise ArithmeticError("a row's features do not repeat themselves bit for bit")

    @property
    def rows_per_pass(self) -> int:
        """Number of rows of a pass."""
        return self._rows

    def evaluating(self) -> FrozenRows:
        """Return the same passes with the model in eval() mode, for public rows."""
        other = FrozenRows(self._module, self._entry, self._rows)
        other._module.eval()
        other._untouched.eval()
        other._gradients = False
        return other

    def features(self, inputs: Tensor, declared: int = 0) -> Tensor:
        """Return the features (J, ...) of one node's rows, in as many passes as are declared.

        Args:
            inputs: (J, ...) rows of one node.
            declared: the public number of them, of which some may be missing.
        """
        example = self._run(self._blanks(inputs))
        found = example.new_empty(len(inputs), *example.shape[1:])
        for number in range(math.ceil(max(declared, len(inputs)) / self._rows)):
            places = slice(number * self._rows, (number + 1) * self._rows)
            rows = inputs[places]
            found[places] = self._pass(rows, range(self._rows), example)[: len(rows)]
        return found

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill."""
        return 1, self._rows

    def rows(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> list[tuple[str, Tensor]]:
        """Return the features of the rows of one pass, for checks on public rows."""
        rows = inputs[0].clone()
        rows[~present_NP[0]] = 0
        return [("the frozen part", self._run(rows))]

    def _pass(self, rows: Tensor, kept: range, example: Tensor) -> Tensor:
        """Return the features of a pass of which only these places are taken.

        Where the model raises, the pass is repeated by halves, in the same shape and with all rows
        in their places: what does not raise keeps its bits, what does has none.
        """
        batch, taken = self._blanks(rows), slice(kept.start, min(kept.stop, len(rows)))
        batch[taken] = rows[taken]
        with suppress(Exception), warnings.catch_warnings():  # either would tell of a row
            warnings.simplefilter("ignore")
            features = self._run(batch)
            if features.shape == example.shape:
                return features
        # Whatever the model keeps of what raised goes with it. What fails on blank rows, too, fails
        # in public and is raised here.
        self._module = copy.deepcopy(self._untouched)
        self._run(self._blanks(rows))
        found, middle = torch.full_like(example, torch.nan), (kept.start + kept.stop) // 2
        for half in (range(kept.start, middle), range(middle, kept.stop)):
            if len(half) and len(half) < len(kept) and half.start < len(rows):
                found[half.start : half.stop] = self._pass(rows, half, example)[
                    half.start : half.stop
                ]
        return found

    def _blanks(self, inputs: Tensor) -> Tensor:
        return inputs.new_zeros(self._rows, *inputs.shape[1:])

    def _run(self, batch: Tensor) -> Tensor:
        """Run a whole pass through the model; what reaches the entry are the features."""
        found: list[Tensor] = []

        def keep(layer: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0].detach().clone(memory_format=torch.contiguous_format))

        # First of all hooks: those of the layer itself will see the features once more.
        layer = self._module.get_submodule(self._entry)
        handle = layer.register_forward_pre_hook(keep, prepend=True)
        try:
            with (
                fixed_arithmetic(batch.device, self._threads),
                torch.set_grad_enabled(self._gradients),
            ):
                self._module(batch)
        finally:
            handle.remove()
        (features,) = found
        return features
