"""Before the first release: does a row give the same bits whatever its companions and its place?

The bound on an example's influence rests on it, and it depends on the kernels that this machine
picks for this model, so it is checked at every start, with the real engine, in the real shapes, on
public or random rows. Kernels are chosen by shape, alignment and place, not by values, so rows of
generic values show every difference; some vector routines take another branch for a whole register,
so companions with extreme values are tried as well.

Where a row's place matters, drawn examples take fixed places (see `passes`). Where companions
matter, fewer rows are passed at a time, down to one. Where even one row does not repeat itself, the
run is refused.

Legend: K public rows, N hosted nodes, P places of a pass, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping.arithmetic import check_products
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import torch_seed

Rows = tuple[Tensor, Tensor]

# apart: a NaN would hide the others
_EXTREMES: Final = ((1e30, -1e30, 1e-40), (float("inf"),), (float("nan"),))
_CLIP: Final = 1.0
_NEARBY: Final = 0.02
_JITTER: Final = 0.1
# sets of other companions: what one of them happens not to show, such as a parity, another may
_OTHERS: Final = 8
# rows of several sizes: a branch may depend on the largest value of a batch
_SIZES: Final = (1.0, 1e-3, 30.0)
_CUT: Final = 0.0  # no size: rows that end in zeros, as padded ones do; code may cut to the longest


class Difference(NamedTuple):
    """What of a row differs, and with what."""

    name: str
    kind: Literal["place", "companions"]


class RowEngine(Protocol):
    """Whatever computes something of the rows of a pass."""

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill with rows (K, ...) like these."""
        ...

    def rows(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> list[tuple[str, Tensor]]:
        """Return by name what is computed of the rows of one pass, rows on the first axis."""
        ...


def rows_are_equal(engine: RowEngine, public: Rows, shape: PassShape) -> bool:
    """Tell whether rows of one node keep their bits among other companions and at other places.

    For what has no trained parameters; public rows (K, ...) as in `engine_with_equal_rows`.
    """
    none_D = torch.zeros(0, device=public[0].device)
    return _first_difference(engine, none_D, public, {shape: 1}, True) is None


def engine_with_equal_rows(
    engine: CheckedEngine,
    model_D: Tensor,
    public: Rows,
    nodes_by_shape: Callable[[bool], dict[PassShape, int]],
) -> tuple[CheckedEngine, bool]:
    """Return an engine whose rows do not depend on each other, the fastest there is.

    Args:
        engine: the engine that the run would use.
        model_D: a public model, such as the initial one.
        public: inputs (K, ...) and targets (K, ...) of some public or random examples.
        nodes_by_shape: how many nodes pass together in which shapes, without (False) and with
            (True) fixed places.

    Returns:
        The engine, and whether its rows need fixed places.

    Raises:
        ModelError: where even one row at a time does not repeat itself bit for bit, or where
            products are not float32.
    """
    check_products(public[0].device)
    # Not the model itself: layers that start at zero would hide every difference behind them.
    with torch_seed(0, "row checks"):
        model_D = model_D + _NEARBY * torch.randn(model_D.shape, dtype=model_D.dtype)
    model_D = model_D.to(public[0].device)
    # Checked without Dropout, whose masks would differ between any two passes.
    quiet, found = engine.deterministic(public[0]), None
    while quiet is not None:
        found = _first_difference(quiet, model_D, public, nodes_by_shape(False), True)
        if found is None:
            return engine, False
        if found.kind == "place":  # examples may keep fixed places, if that is all
            found = _first_difference(quiet, model_D, public, nodes_by_shape(True), False)
            if found is None:
                return engine, True
        slower, quiet = engine.slower(), quiet.slower()
        engine = slower if slower is not None else engine
    raise ModelError(
        f"model: {found.name if found else 'the gradient'} does not repeat itself bit for bit, "
        "even one example at a time; the bound on an example's influence needs that. Use "
        "deterministic layers, or another device"
    )


def units_of_rows(public: Rows, rows_per_unit: int) -> Rows:
    """Return public units (K, M, ...) of M > 1 rows each, put together from public rows."""
    if rows_per_unit == 1:
        return public
    count = len(public[0])
    with torch_seed(0, "units of public rows"):
        which_KM = torch.randint(count, (count, rows_per_unit)).to(public[0].device)
    return public[0][which_KM], public[1][which_KM]


def _first_difference(
    engine: RowEngine,
    model_D: Tensor,
    public: Rows,
    nodes_by_shape: dict[PassShape, int],
    places: bool,
) -> Difference | None:
    """Return a difference in any shape, one between companions first; in places if asked for."""
    found: list[Difference] = []
    for shape, num_nodes in nodes_by_shape.items():
        models_ND = model_D.expand(num_nodes, -1).contiguous()
        for size in (*_SIZES, _CUT):
            try:
                check = _Check(engine, models_ND, public, shape, size)
            except Exception:
                if size == 1.0:
                    raise
                continue  # model or loss refuse rows of this size
            found += check.other_companions()
            if size == 1.0:
                found += check.no_companions()
            if places and not found and size == 1.0:
                found += check.places()
    return min(found, key=lambda difference: difference.kind, default=None)


class _Check:
    """A pass full of different rows, to be compared with these rows elsewhere or among others."""

    def __init__(
        self, engine: RowEngine, models_ND: Tensor, public: Rows, shape: PassShape, size: float
    ) -> None:
        public = _finite_rows(public)
        num_nodes, self._places = engine.checked_places(models_ND, public[0], shape)
        self._engine, self._shape, self._models_ND = engine, shape, models_ND[:num_nodes]
        with torch_seed(0, "row checks"):
            self._rows = _different_rows(public, num_nodes, self._places, size)
            count = _OTHERS if size == 1.0 else 1
            self._others = [
                _different_rows(public, num_nodes, self._places, 1.0) for _ in range(count)
            ]
        self._constants = _constants(public[0])
        self._present_NP = torch.ones(
            num_nodes, self._places, dtype=torch.bool, device=public[0].device
        )
        self._expected = self._run(self._rows, self._present_NP)

    def other_companions(self) -> Iterator[Difference]:
        """Yield what differs where every second row is another one, or constant and extreme."""
        even_P = torch.arange(self._places, device=self._present_NP.device) % 2 == 0
        for others in self._others:
            yield from self._compare(self._mixed(even_P, others), self._present_NP, even_P)
        for values in self._constants:
            yield from self._compare(
                self._mixed(even_P, self._constant(values)), self._present_NP, even_P
            )

    def no_companions(self) -> Iterator[Difference]:
        """Yield what differs in the same pass, with every second row blank, with all but one."""
        numbers_P = torch.arange(self._places, device=self._present_NP.device)
        for kept_P in (numbers_P >= 0, numbers_P % 2 == 1, numbers_P == self._places // 2):
            yield from self._compare(
                self._rows, kept_P.expand_as(self._present_NP).contiguous(), kept_P
            )

    def places(self) -> Iterator[Difference]:
        """Yield what differs where all rows move to other places, or where a node passes alone."""
        # One node alone: kernels may be chosen by the number of nodes in a batched product.
        inputs, targets = (part[:1].clone() for part in self._rows)
        model, present = self._models_ND[:1].clone(), self._present_NP[:1]
        alone = self._engine.rows(model, inputs, targets, present, _CLIP, self._shape)
        for (name, expected), (_, found) in zip(self._expected, alone, strict=True):
            if not torch.equal(expected[: len(found)], _bits(found)):
                yield Difference(name, "place")
        # To a neighbour's place, and far away: into other registers, tiles and threads.
        for shift in sorted({1, self._places // 2, self._places // 3 + 1}):
            moved = (self._rows[0].roll(shift, dims=1), self._rows[1].roll(shift, dims=1))
            for (name, expected), (_, found) in zip(
                self._expected, self._run(moved, self._present_NP), strict=True
            ):
                if not torch.equal(
                    self._by_place(expected).roll(shift, dims=1), self._by_place(found)
                ):
                    yield Difference(name, "place")

    def _compare(self, rows: Rows, present_NP: Tensor, kept_P: Tensor) -> Iterator[Difference]:
        try:
            found = self._run(rows, present_NP)
        except Exception:  # extreme rows that model or loss refuse would be left out of the pass
            return
        for (name, expected), (_, values) in zip(self._expected, found, strict=True):
            if not torch.equal(
                self._by_place(expected)[:, kept_P], self._by_place(values)[:, kept_P]
            ):
                yield Difference(name, "companions")

    def _mixed(self, kept_P: Tensor, others: Rows) -> Rows:
        inputs, targets = (
            torch.where(kept_P.view(1, -1, *[1] * (rows.dim() - 2)), rows, other)
            for rows, other in zip(self._rows, others, strict=True)
        )
        return inputs, targets

    def _constant(self, values: tuple[float, ...]) -> Rows:
        inputs, targets = self._rows
        values_P = (
            torch.tensor(values, dtype=torch.float64)
            .repeat(self._places)[: self._places]
            .to(inputs)
        )
        return values_P.view(1, -1, *[1] * (inputs.dim() - 2)).expand_as(inputs), targets

    def _run(self, rows: Rows, present_NP: Tensor) -> list[tuple[str, Tensor]]:
        inputs, targets = (part.clone(memory_format=torch.contiguous_format) for part in rows)
        seen = self._engine.rows(self._models_ND, inputs, targets, present_NP, _CLIP, self._shape)
        return [(name, _bits(values)) for name, values in seen]

    def _by_place(self, bits: Tensor) -> Tensor:
        """Return (N, P, views of a row, ...) without the blank rows at the end."""
        by_node = bits.unflatten(0, (len(self._models_ND), -1))
        views = max(1, by_node.shape[1] // self._places)
        return by_node[:, : views * self._places].unflatten(1, (self._places, views))


def _different_rows(public: Rows, num_nodes: int, places: int, size: float) -> Rows:
    """Return rows (N, P, ...) of some size, alike for all nodes: public ones, changed a little.

    Whole numbers stay between the smallest and the largest public one; small rows are all smallest
    but for single places. Cut ones are zero from a random place in the first half of each row on.
    """
    inputs, targets = public
    which_P = torch.randint(len(inputs), (places,)).to(inputs.device)
    chosen = inputs[which_P]
    if size == _CUT:
        flat_PV = chosen.reshape(places, -1)
        numbers_V = torch.arange(flat_PV.shape[1], device=inputs.device)
        ends_P = torch.randint(1, flat_PV.shape[1] // 2 + 2, (places,)).to(inputs.device)
        chosen = torch.where(numbers_V < ends_P[:, None], flat_PV, 0).to(inputs)
        chosen = chosen.view(places, *inputs.shape[1:])
    elif inputs.is_floating_point():
        scale = inputs.abs().mean().clamp_min(1e-3)
        chosen = size * (chosen + _JITTER * scale * torch.randn(chosen.shape).to(chosen))
    elif size < 1:
        low = inputs.min()
        chosen = torch.where(chosen > low, low + (inputs.max() > low).to(low), low).to(inputs)
    labels = targets[which_P]
    return chosen.expand(num_nodes, *chosen.shape), labels.expand(num_nodes, *labels.shape)


def _finite_rows(public: Rows) -> Rows:
    """Return the public rows that are finite: NaN and infinity would hide all differences."""
    finite = torch.ones(len(public[0]), dtype=torch.bool, device=public[0].device)
    for part in public:
        if part.is_floating_point():
            finite &= part.isfinite().flatten(1).all(dim=1) if part.dim() > 1 else part.isfinite()
    if bool(finite.any()):
        return public[0][finite], public[1][finite]
    inputs, targets = (
        part.nan_to_num(0.0, 0.0, 0.0) if part.is_floating_point() else part for part in public
    )
    return inputs, targets


def _constants(inputs: Tensor) -> tuple[tuple[float, ...], ...]:
    """Return the values of constant companions: extreme, or the ends of the range of integers."""
    if inputs.is_floating_point():
        return _EXTREMES
    largest = 255 if inputs.dtype is torch.uint8 else int(inputs.max())
    return ((float(inputs.min()),), (float(largest),))


def _bits(rows: Tensor) -> Tensor:
    """Return the bit patterns: NaN equals itself, and zero is not minus zero."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(kinds[rows.element_size()])
