"""One look at a node's examples before anything is spent: missing values, and ranges of numbers.

What is found stays on the machine that holds the data.

Legend: J examples, W values of an example.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

import torch
from torch import Tensor

from dpcsgp.errors import RefusedDataError

_VALUES_AT_A_TIME: Final = 2**22


@final
class Extremes:
    """Smallest and largest value of every place of an example, and the examples that have them."""

    def __init__(self, width: int) -> None:
        self.low_W = torch.full((width,), torch.inf, dtype=torch.float64)
        self.high_W = torch.full((width,), -torch.inf, dtype=torch.float64)
        self.low_row_W = torch.zeros(width, dtype=torch.int64)
        self.high_row_W = torch.zeros(width, dtype=torch.int64)

    def add(self, values_JW: Tensor, first: int) -> None:
        """Look at further examples; the first of them has this number."""
        high, high_row = values_JW.max(dim=0)
        low, low_row = values_JW.min(dim=0)
        higher, lower = high > self.high_W, low < self.low_W
        self.high_W = torch.where(higher, high.double(), self.high_W)
        self.low_W = torch.where(lower, low.double(), self.low_W)
        self.high_row_W = torch.where(higher, first + high_row, self.high_row_W)
        self.low_row_W = torch.where(lower, first + low_row, self.low_row_W)


@final
class Scan:
    """What one look at all examples of a node found.

    `where` names the node in errors; extremes are kept of the `kinds` ("inputs", "targets") that
    hold whole numbers.
    """

    def __init__(self, where: str, kinds: Collection[str]) -> None:
        self.where, self._kinds = where, kinds
        self.inputs: Extremes | None = None
        self.targets: Extremes | None = None
        self._seen = 0
        self._bad = 0
        self._first = ""

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, where: str, kinds: Collection[str]) -> Scan:
        """Look at examples that are in memory, some at a time."""
        scan = cls(where, kinds)
        at_a_time = max(1, _VALUES_AT_A_TIME // max(1, inputs[:1].numel()))
        for start in range(0, len(inputs), at_a_time):
            scan.add(inputs[start : start + at_a_time], targets[start : start + at_a_time])
        return scan

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Look at the next examples."""
        bad_J = torch.zeros(len(inputs), dtype=torch.bool)
        for kind, values in (("inputs", inputs), ("targets", targets)):
            flat_JW = values.reshape(len(values), -1)
            if values.is_floating_point():
                bad_JW = ~flat_JW.isfinite()
                if not self._first and bool(bad_JW.any()):
                    self._first = self._place(kind, values, bad_JW)
                bad_J |= bad_JW.any(dim=1)
            if kind in self._kinds and flat_JW.shape[1]:
                extremes = getattr(self, kind) or Extremes(flat_JW.shape[1])
                extremes.add(flat_JW, self._seen)
                setattr(self, kind, extremes)
        self._bad += int(bad_J.sum())
        self._seen += len(inputs)

    def _place(self, kind: str, values: Tensor, bad_JW: Tensor) -> str:
        """Name the first example that is not finite, and where in it."""
        example, column = (int(part) for part in bad_JW.nonzero()[0])
        name = f"example {self._seen + example}"
        if kind == "targets":
            return f"{name}, target"
        if values.dim() == 2:
            return f"{name}, column {column}"
        place = torch.unravel_index(torch.tensor(column), values.shape[1:])
        return f"{name}, at {tuple(int(part) for part in place)}"

    def refuse_missing(self) -> None:
        """Refuse examples with missing or infinite values: they would count as zero gradients."""
        if self._bad:
            raise RefusedDataError(
                self.where,
                f": {self._bad} of {self._seen} examples have values that are not finite (first: "
                f"{self._first}); fill them in with public values, or leave these examples out",
            )
