"""The examples of one node: in memory, or read from a dataset whenever they are drawn.

A map-style dataset is read into memory once if its rows are always the same and fit (see
`MOST_BYTES_IN_MEMORY`). Otherwise rows are read at every draw. Random transforms then happen anew
each time; what they draw from torch, numpy and `random` comes from seeds of the caller's, one per
place, so no row's view depends on which others were drawn.

Legend: J examples, E places for examples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from dpcsgp.errors import RefusedDataError
from dpcsgp.randomness import generators_kept, generators_moved, seed_generators
from dpcsgp.tasks.node_data import Classes, Columns, Part, RowForm, RowReader, opened, read_columns
from dpcsgp.tasks.scanning import Scan

# of the map-style datasets of a process; CIFAR-10 in float32 fits
MOST_BYTES_IN_MEMORY: Final = 640 * 10**6
# rows that are compared with themselves: the first, and some all over the data
_FIRST_READ_TWICE: Final = 8
_SPREAD_READ_TWICE: Final = 24
_ROWS_AT_A_TIME: Final = 256


class NodeExamples(Protocol):
    """The examples of one node, packed."""

    @property
    def form(self) -> RowForm:
        """How inputs and targets are packed."""
        ...

    @property
    def scan(self) -> Scan:
        """What one look at all examples found."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices_E: Sequence[int], seeds_E: Sequence[int]) -> tuple[Part, Tensor]:
        """Return the examples in these places, and which of them could be read."""
        ...


@final
@dataclass(frozen=True)
class StackedExamples:
    """Examples in memory."""

    inputs: Tensor
    targets: Tensor
    form: RowForm
    scan: Scan

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices_E: Sequence[int], seeds_E: Sequence[int]) -> tuple[Part, Tensor]:
        """Return the examples in these places."""
        which = torch.as_tensor(indices_E).clamp(max=len(self.inputs) - 1)
        return (self.inputs[which], self.targets[which]), torch.ones(len(which), dtype=torch.bool)


@final
@dataclass(frozen=True)
class LazyExamples:
    """Examples that are read from a dataset whenever they are drawn."""

    reader: RowReader
    count: int
    is_random: bool
    scan: Scan

    @property
    def form(self) -> RowForm:
        """How inputs and targets are packed."""
        return self.reader.form

    def __len__(self) -> int:
        return self.count

    def read(self, indices_E: Sequence[int], seeds_E: Sequence[int]) -> tuple[Part, Tensor]:
        """Return the examples in these places, and which of them could be read.

        A row that fails leaves its place blank and says nothing: to stop or to warn would tell the
        others that it was drawn.
        """
        inputs, targets = _blank(self.form, len(indices_E))
        readable_E = torch.zeros(len(indices_E), dtype=torch.bool)
        with generators_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for place, (index, seed) in enumerate(zip(indices_E, seeds_E, strict=True)):
                if self.is_random:
                    seed_generators(seed)
                try:
                    row = self.reader.read(min(index, self.count - 1))
                except Exception:  # which rows fail is nobody's business
                    continue
                inputs[place], targets[place] = row[0][0], row[1][0]
                readable_E[place] = True
        return (inputs, targets), readable_E


def _blank(form: RowForm, count: int) -> Part:
    """Return zeros of the form of so many examples."""
    return (
        torch.zeros((count, *form.inputs.shape), dtype=form.inputs.dtype),
        torch.zeros((count, *form.targets.shape), dtype=form.targets.dtype),
    )


def collect_examples(
    data: Any, count: int, where: str, classes: Classes, room: float
) -> StackedExamples | LazyExamples:
    """Look at all examples of a node once; keep them if they may be kept.

    Args:
        data: the node's data in any form.
        count: how many examples to take, from the first on.
        where: whose data, for errors.
        classes: the public list of labels, if labels are mapped.
        room: bytes that rows of a dataset may take in memory.

    Raises:
        RefusedDataError: for examples that cannot be read, differ in form or are not finite.
    """
    source = opened(data, where)
    if isinstance(source, Columns):
        (inputs, targets), form = read_columns(source, where, classes)
        scan = Scan.of(inputs[:count], targets[:count], where, form.whole_kinds)
        scan.refuse_missing()
        return StackedExamples(inputs[:count], targets[:count], form, scan)
    with generators_kept():
        return _from_rows(RowReader.of(source, where, classes), count, room)


def _from_rows(reader: RowReader, count: int, room: float) -> StackedExamples | LazyExamples:
    """Read all rows once; keep them if they are always the same and fit."""
    is_random = _draws(reader, count)
    keep = not is_random and count * bytes_per_row(reader.form) <= room
    inputs, targets = _blank(reader.form, count if keep else 0)
    scan = Scan(reader.where, reader.form.whole_kinds)
    seed_generators(0)
    for start, (some_inputs, some_targets) in _chunks(reader, count):
        scan.add(some_inputs, some_targets)
        if keep:
            inputs[start : start + len(some_inputs)] = some_inputs
            targets[start : start + len(some_inputs)] = some_targets
    scan.refuse_missing()
    # Rows further on may draw where the first did not.
    is_random = generators_moved(0) or is_random
    if keep and not is_random:
        return StackedExamples(inputs, targets, reader.form, scan)
    return LazyExamples(reader, count, is_random, scan)


def _chunks(reader: RowReader, count: int) -> Iterator[tuple[int, Part]]:
    for start in range(0, count, _ROWS_AT_A_TIME):
        rows = [reader.read(index) for index in range(start, min(start + _ROWS_AT_A_TIME, count))]
        yield start, (torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows]))


def bytes_per_row(form: RowForm) -> int:
    """Return the bytes of one packed example."""
    return sum(
        packing.dtype.itemsize * math.prod(packing.shape) for packing in (form.inputs, form.targets)
    )


def _draws(reader: RowReader, count: int) -> bool:
    """Tell whether rows draw random numbers; refuse those that draw where nobody can seed them."""
    moved = False
    for index in _read_twice(count):
        seed_generators(index)
        first = reader.read(index)
        drew = generators_moved(index)  # seeds them again
        again = reader.read(index)
        _refuse_if_kept(drew, index, reader.where)
        moved = moved or drew
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(first, again, strict=True)):
            raise RefusedDataError(
                f"{reader.where}, example {index}",
                ": reading it twice under the same random state gives different values; random "
                "transforms must draw from torch, numpy.random or random itself (no generator of "
                "their own, no counter), so that they can be seeded in secret",
            )
    return moved


def _read_twice(count: int) -> list[int]:
    """Return which rows are read twice: data are often sorted, and some kinds of rows may draw."""
    spread = range(0, count, math.ceil(count / _SPREAD_READ_TWICE) or 1)
    return sorted({*range(min(count, _FIRST_READ_TWICE)), *spread})


def refuse_kept_views(read: Callable[[int], Any], count: int, where: str) -> None:
    """Refuse rows that draw a view when they are read first, and keep it.

    Call it before anybody reads all rows. Some rows are tried.
    """
    with generators_kept():
        for index in _read_twice(count):
            seed_generators(index)
            read(index)
            drew = generators_moved(index)  # seeds them again
            read(index)
            _refuse_if_kept(drew, index, where)


def _refuse_if_kept(drew: bool, index: int, where: str) -> None:
    """Refuse a row that drew under the seed `index`, but not when it was read again.

    Such views would be drawn while the start looks at all rows, under seeds that anybody knows, by
    the number of a row: taking out one example would change the views of all that follow.
    """
    if drew and not generators_moved(index):
        raise RefusedDataError(
            f"{where}, example {index}",
            ": it draws random numbers when it is read first and none when it is read again; "
            "random transforms must draw at every reading (keep rows as they are before the "
            "transform, not after it), so that they can be seeded in secret",
        )


def _bits(values: Tensor) -> Tensor:
    """Return bit patterns, so that missing values equal themselves."""
    return values.contiguous().view(torch.uint8) if values.is_floating_point() else values
