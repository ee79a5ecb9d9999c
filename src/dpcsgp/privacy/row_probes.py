"""Compare what a model and loss compute for one example among other companions and in other places.

At one batch size the arithmetic of a row is fixed, so its output, its loss and the loss gradients
at layer outputs must not change by a bit. Differences beyond a few units in the last place mean
that rows are mixed and are refused with the layer's name. Smaller ones can be honest (a kernel
that takes a slow path for a whole register): they are returned, for the engine to find a shape
without them.

Legend: R rows of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping.contract import check_losses
from dpcsgp.privacy.memory_probes import Loss, Pair, same_bits
from dpcsgp.privacy.model_checks import label
from dpcsgp.randomness import torch_seed

_LAST_PLACES: Final = 4  # units in the last place of a row's largest value
_LOOSE: Final = 1e-4  # behind a layer that differs in last places
_SIZES: Final = 1e-3  # between batches of different sizes, relative to the norm of all rows
_TELLING: Final = (11, 13)  # an axis that follows both sizes is the batch axis
_HUGE: Final = 1e30
_EXTREMES: Final = (_HUGE, float("nan"), float("inf"), 1e-40, 0.0)


Named = Literal["output", "loss", "gradient"]
Kind = Literal["companions", "place"]
_Key = tuple[str, Named, int]


class RowDependence(NamedTuple):
    """A last-place difference of one example's values, in a batch of `rows`."""

    layer: str  # "" is the model itself, "loss" the loss
    value: Named
    kind: Kind
    rows: int


class _Value(NamedTuple):
    """Rows of one layer's output or gradient; `key` is the same in every pass."""

    key: _Key
    rows: Tensor


class RowProbe:
    """One model, with or without loss, whose rows are compared in batches of any size."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        batch: Callable[[int, str], Pair],
        steady: nn.Module,
    ) -> None:
        """`batch(rows, purpose)` gives public examples; `steady` is the model without Dropout."""
        self._module, self._loss, self._batch, self._steady = module, loss, batch, steady
        self._found: dict[RowDependence, None] = {}
        # Which values have a row per example: those whose first axis follows two batch sizes.
        inputs, targets = batch(max(_TELLING), "first")
        passes = [
            {value.key: value.rows for value in self._all(steady, (inputs[:size], targets[:size]))}
            for size in _TELLING
        ]
        self._by_row = {
            key for key in passes[0] if _follows([values.get(key) for values in passes])
        }
        self._compare_sizes(*passes)

    @property
    def found(self) -> tuple[RowDependence, ...]:
        """The last-place differences so far."""
        return tuple(self._found)

    def compare(self, rows: int, thorough: bool = True) -> None:
        """Refuse a model or loss whose rows depend on each other in a batch of this size.

        Thorough: one row among random and extreme companions, and one row in all places. Otherwise
        three rows among companions of which one is huge.
        """
        first, second = self._batch(rows, "first"), self._batch(rows, "second")
        expected = self._values(self._module, first)
        places = (0, rows // 2, rows - 1)
        if not thorough:
            self._compare_few(
                expected, first, second, sorted({*places} - {rows - 1 if rows < 4 else -1})
            )
            return
        for place in places:
            self._compare_places(expected, first, second, [place])
        for turn, value in enumerate(_EXTREMES):
            if (companions := _extreme(second, value)) is not None:
                self._compare_places(expected, first, companions, [places[turn % 3]], may_fail=True)
        self._compare_all_places(first, rows)

    def _compare_few(
        self, expected: list[_Value], first: Pair, second: Pair, places: list[int]
    ) -> None:
        """Compare some rows in one pass; in two where a huge companion cannot be borne."""
        companions = tuple(part.clone() for part in second)
        for part in companions:
            if part.is_floating_point():
                part[[row for row in range(len(part)) if row not in places][:1]] = _HUGE
        if not self._compare_places(
            expected, first, (companions[0], companions[1]), places, may_fail=True
        ):
            self._compare_places(expected, first, second, places)

    def _compare_sizes(self, some: dict[_Key, Tensor], more: dict[_Key, Tensor]) -> None:
        """Refuse a model or loss whose rows have other values in a batch of another size."""
        for key in (key for key in some if key in self._by_row):
            here, there = (
                part[: min(_TELLING)].double().nan_to_num(0, 0, 0)
                for part in (some[key], more[key])
            )
            # A gradient may jump where the last place of an output moves.
            if key[1] != "gradient" and float((here - there).norm()) > _SIZES * float(there.norm()):
                raise ModelError(self._words(key))

    def _compare_places(
        self,
        expected: list[_Value],
        first: Pair,
        companions: Pair,
        places: Sequence[int],
        may_fail: bool = False,
    ) -> bool:
        """Compare rows among their own and other companions; tell if that could be computed."""
        batch = tuple(part.clone() for part in companions)
        for mixed, original in zip(batch, first, strict=True):
            mixed[list(places)] = original[list(places)]
        try:
            values = {
                value.key: value.rows for value in self._values(self._module, (batch[0], batch[1]))
            }
        except Exception:
            if may_fail:
                return False
            raise
        for place in places:
            pairs = [
                (key, rows[place], values[key][place]) for key, rows in expected if key in values
            ]
            self._judge(pairs, "companions", len(first[0]))
        return True

    def _compare_all_places(self, first: Pair, rows: int) -> None:
        """Put one row in every place: all must come out the same.

        Matrix products round by place, by more units the longer their sums are, so the scale is
        that of the layer and not of the row; what would mix rows shows among other companions.
        """
        scales = {value.key: _largest(value.rows) for value in self._values(self._steady, first)}
        inputs, targets = (part[:1].expand(rows, *part.shape[1:]).clone() for part in first)
        for key, part in self._values(self._steady, (inputs, targets)):
            here = part[:1].expand_as(part)
            if same_bits(here, part):
                continue
            if not _within(here, part, _LOOSE * scales.get(key, 0.0)):
                raise ModelError(self._words(key))
            self._note(key, "place", rows)
            return  # what follows may have rounded values for its cause

    def _judge(self, pairs: list[tuple[_Key, Tensor, Tensor]], kind: Kind, rows: int) -> None:
        """Refuse at the first layer that mixes rows; note the first that differs in last places."""
        rounded = False  # whether a layer before differed in last places
        for key, here, there in pairs:
            if same_bits(here, there):
                continue
            if rounded and key[1] == "gradient":  # which may jump for a last place
                continue
            inexact = here.is_floating_point() or here.is_complex()
            unit = torch.finfo(here.dtype).eps if inexact else 0.0
            allowed = _LOOSE if rounded else _LAST_PLACES * unit
            if not _within(here, there, allowed * _largest(here)):
                raise ModelError(self._words(key))
            if not rounded:
                self._note(key, kind, rows)
            rounded = True

    def _note(self, key: _Key, kind: Kind, rows: int) -> None:
        self._found[RowDependence(key[0], key[1], kind, rows)] = None

    def _words(self, key: _Key) -> str:
        name, value, _ = key
        if name == "loss":
            return (
                "loss: the value of one example depends on the other examples of the batch or on "
                "how many there are, so no example has a gradient of its own; divide by public "
                "constants and treat examples one by one"
            )
        what = "its output" if value == "output" else "the loss gradient at its output"
        return (
            f"model layer {label(name, self._module.get_submodule(name))}: {what} for one "
            "example depends on the other examples of the batch, on its place among them or on "
            "how many there are, so no example has a gradient of its own; use a layer that treats "
            "examples one by one (recurrent layers: batch_first=True), and divide by public "
            "constants"
        )

    def _values(self, module: nn.Module, batch: Pair) -> list[_Value]:
        """Return the values whose first axis is the batch, in the order of their computation."""
        size = len(batch[0])
        return [
            value
            for value in self._all(module, batch)
            if value.key in self._by_row and len(value.rows) == size
        ]

    def _all(self, module: nn.Module, batch: Pair) -> list[_Value]:
        with torch_seed(0, "model probe masks"), torch.set_grad_enabled(self._loss is not None):
            return _run(module, self._loss, batch)


def _run(module: nn.Module, loss: Loss | None, batch: Pair) -> list[_Value]:
    """Return every layer's outputs as layers finish, then losses, then gradients at the outputs."""
    inputs, targets = (part.clone() for part in batch)
    values: list[_Value] = []
    edges: list[tuple[_Key, Any]] = []
    calls: Counter[str] = Counter()

    def keep(name: str, output: Any) -> None:
        for part in nested(output):
            calls[name] += 1
            values.append(_Value((name, "output", calls[name]), part.detach().clone()))
            if part.requires_grad:
                edges.append(((name, "gradient", calls[name]), get_gradient_edge(part)))

    outputs = watch_outputs(
        module, inputs, list(module.named_modules()), lambda name, _, output: keep(name, output)
    )
    if loss is None:
        return values
    losses = loss(outputs, targets)
    check_losses(losses, len(inputs))
    values.append(_Value(("loss", "loss", 0), losses.detach()))
    if losses.requires_grad:
        gradients = torch.autograd.grad(
            losses.sum(), [edge for _, edge in edges], allow_unused=True
        )
        parts = zip([key for key, _ in edges], gradients, strict=True)
        values += [_Value(key, part) for key, part in reversed(list(parts)) if part is not None]
    return values


def watch_outputs(
    module: nn.Module,
    batch: Tensor,
    layers: Sequence[tuple[str, nn.Module]],
    see: Callable[[str, nn.Module, Any], None],
) -> Any:
    """Run the module once and show the outputs of these layers as they come; return the last."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, output: see(name, layer, output)

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
    try:
        with torch_seed(0, "model probe masks"):
            return module(batch)
    finally:
        for handle in handles:
            handle.remove()


def _follows(parts: Sequence[Tensor | None]) -> bool:
    """Tell whether the first axis has the length of the batch, for two lengths of it."""
    return all(
        part is not None and len(part) == size for part, size in zip(parts, _TELLING, strict=True)
    )


def nested(output: Any) -> Iterator[Tensor]:
    """Yield the tensors with at least one axis of a nested output."""
    if isinstance(output, Tensor):
        if output.dim():
            yield output
    elif isinstance(output, list | tuple):
        yield from (tensor for part in output for tensor in nested(part))
    elif isinstance(output, dict):
        yield from (tensor for part in output.values() for tensor in nested(part))


def _extreme(batch: Pair, value: float) -> Pair | None:
    """Return companions full of one value, where inputs or targets can hold it; None if neither."""
    if not any(part.is_floating_point() for part in batch) and value:
        return None
    inputs, targets = (
        torch.full_like(part, value) if part.is_floating_point() or not value else part
        for part in batch
    )
    return inputs, targets


def _largest(part: Tensor) -> float:
    """Return the largest finite size of a value."""
    finite = part[part.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _within(one: Tensor, other: Tensor, most: float) -> bool:
    """Tell whether no finite value differs by more, and the others not at all."""
    odd = ~one.isfinite()
    if (
        one.shape != other.shape
        or not torch.equal(odd, ~other.isfinite())
        or not same_bits(one[odd], other[odd])
    ):
        return False
    exact = torch.complex128 if one.is_complex() else torch.float64
    differences = (one[~odd].to(exact) - other[~odd].to(exact)).abs()
    return not differences.numel() or float(differences.max()) <= most
