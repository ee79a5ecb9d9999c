"""Tuples and dicts of tensors, nested at will, as one tensor with a row per example, and back.

Everything between the data and the model moves rows of one tensor: drawing, blanks, passes of
public shapes and the checks of single rows. A structured input is packed into such a row where the
data are read and unpacked just before the model's own code, so that nothing between knows of it.
Shapes and formats are public, and the bits of every value come out as they went in.

Leaves of one number format are laid side by side in that format. Where formats are mixed, rows are
float32: it holds bytes and whole numbers up to 2^24 exactly, and larger ones are refused.

Legend: J examples, W values of a packed row.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from dpcsgp.errors import RefusedDataError

EXACT: Final = 2**24  # whole numbers up to this size are float32 numbers
_MOST_STAND_INS: Final = 256
_FINE: Final = 4096.0

Skeleton = Any  # None for a leaf, else ("tuple" or "dict", ((key, skeleton), ...))


def skeleton_of(tree: Any) -> Skeleton:
    """Return the form of a tree: what is nested in what, without the values."""
    if isinstance(tree, Mapping):
        return ("dict", tuple((key, skeleton_of(part)) for key, part in tree.items()))
    if isinstance(tree, tuple):
        return ("tuple", tuple((key, skeleton_of(part)) for key, part in enumerate(tree)))
    return None


def leaves_of(tree: Any, skeleton: Skeleton, name: str = "") -> list[tuple[str, Any]]:
    """Return the leaves with their names, such as `['mask']`, in the order of the skeleton.

    Raises:
        KeyError: where the tree has another form.
    """
    if skeleton is None:
        if isinstance(tree, Mapping | tuple):
            raise KeyError(name)
        return [(name, tree)]
    kind, parts = skeleton
    if not isinstance(tree, Mapping if kind == "dict" else tuple) or len(tree) != len(parts):
        raise KeyError(name)
    return [leaf for key, part in parts for leaf in leaves_of(tree[key], part, f"{name}[{key!r}]")]


def _rebuilt(skeleton: Skeleton, leaves: Iterator[Tensor]) -> Any:
    if skeleton is None:
        return next(leaves)
    kind, parts = skeleton
    values = [_rebuilt(part, leaves) for _, part in parts]
    return (
        dict(zip((key for key, _ in parts), values, strict=True)) if kind == "dict" else (*values,)
    )


@final
@dataclass(frozen=True)
class Packing:
    """The public form of one example's input or target, and its way into one row and back.

    Attributes:
        skeleton: what is nested in what; None: a single tensor, which stays as it is.
        shapes: shape of each leaf, without the axis of examples.
        dtypes: number format of each leaf.
        stand_ins: of each leaf of whole numbers in a row of mixed formats, valid public values.
    """

    skeleton: Skeleton
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    stand_ins: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, skeleton: Skeleton, leaves: Sequence[Tensor]) -> Packing:
        """Return the packing of examples like these, leaves (J, ...)."""
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves)
        return cls(skeleton, shapes, tuple(leaf.dtype for leaf in leaves))

    @property
    def is_mixed(self) -> bool:
        """Whether leaves of several number formats share a row."""
        return len(set(self.dtypes)) > 1

    @property
    def has_whole_numbers(self) -> bool:
        """Whether a leaf holds whole numbers."""
        return any(not dtype.is_floating_point for dtype in self.dtypes)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of packed rows."""
        return torch.float32 if self.is_mixed else self.dtypes[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a packed row."""
        return self.shapes[0] if self.skeleton is None else (sum(map(math.prod, self.shapes)),)

    def __str__(self) -> str:
        if self.skeleton is None:
            return f"{self.dtypes[0]} of shape {self.shapes[0]}"
        names = [name for name, _ in leaves_of(_hollow(self.skeleton), self.skeleton)]
        parts = zip(names, self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{name} {dtype} of shape {shape}" for name, dtype, shape in parts)

    def pack(self, leaves: Sequence[Tensor], where: str) -> Tensor:
        """Return rows (J, *shape) that hold the leaves (J, ...)."""
        if self.skeleton is None:
            return leaves[0]
        if self.is_mixed:
            for leaf in leaves:
                _refuse_inexact(leaf, where)
        return torch.cat([leaf.flatten(1).to(self.dtype) for leaf in _at_least_2d(leaves)], dim=1)

    def unpack(self, rows: Tensor) -> Any:
        """Return the tree whose leaves (J, ...) the rows hold."""
        if self.skeleton is None:
            return rows
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = [part.contiguous() for part in rows.split(sizes, dim=1)]
        leaves = [self._leaf(number, part) for number, part in enumerate(parts)]
        return _rebuilt(self.skeleton, iter(leaves))

    def _leaf(self, number: int, part: Tensor) -> Tensor:
        dtype = self.dtypes[number]
        if self.is_mixed and not dtype.is_floating_point:
            part = _whole(part, self.stand_ins[number] if self.stand_ins else (0, 1)).to(dtype)
        return part.reshape(part.shape[0], *self.shapes[number])

    def with_stand_ins(self, public: Tensor) -> Packing:
        """Return the packing with valid whole numbers taken from public rows."""
        if not self.is_mixed:
            return self
        sizes = [math.prod(shape) for shape in self.shapes]
        found = [
            tuple(part.unique()[:_MOST_STAND_INS].long().tolist())
            for part in public.split(sizes, dim=1)
        ]
        return replace(self, stand_ins=tuple(found))


def _hollow(skeleton: Skeleton) -> Any:
    """Return a tree of this form with nothing in its leaves."""
    return _rebuilt(skeleton, itertools.repeat(torch.zeros(0)))


def _at_least_2d(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf if leaf.dim() > 1 else leaf[:, None] for leaf in leaves]


def _refuse_inexact(leaf: Tensor, where: str) -> None:
    if not leaf.is_floating_point() and leaf.numel() and int(leaf.abs().max()) > EXACT:
        raise RefusedDataError(
            where,
            f": a whole number is above 2^24 = {EXACT:,}; beside floating-point inputs whole "
            "numbers must be smaller: count from 0, or give it as a float",
        )


def _whole(values: Tensor, stand_ins: tuple[int, ...]) -> Tensor:
    """Return stored whole numbers as they are; anything else becomes a valid stand-in.

    Checks shift and scale the float32 values of public rows. What is then no whole number would
    point past any table, so it picks one of the values that public rows have.
    """
    table = torch.tensor(stand_ins or (0,), dtype=values.dtype, device=values.device)
    kept = (values == values.round()) & (values.abs() <= EXACT)
    finite = values.nan_to_num(0.0, 0.0, 0.0).clamp(-EXACT, EXACT)
    place = (finite.abs() * _FINE).remainder(float(len(table))).floor().long()
    return torch.where(kept, values, table[place.clamp(max=len(table) - 1)])


@final
class UnpackInput:
    """A hook before the model's own code: turns packed rows into the arguments of `forward`.

    A dict becomes keyword arguments if `forward` has all these names, a tuple positional ones if it
    has as many; otherwise the whole is one argument.
    """

    def __init__(self, packing: Packing, module: nn.Module) -> None:
        self.packing = packing
        self._spread = _takes_apart(packing.skeleton, module)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `forward`."""
        tree = self.packing.unpack(args[0])
        if not self._spread:
            return (tree,), kwargs
        return ((), {**kwargs, **tree}) if isinstance(tree, dict) else (tree, kwargs)


def _takes_apart(skeleton: Skeleton, module: nn.Module) -> bool:
    """Tell whether `forward` takes the parts of a tree as arguments of their own."""
    kind, parts = skeleton
    names = [str(key) for key, _ in parts]
    try:
        signature = inspect.signature(module.forward)
        if kind == "dict":
            signature.bind(**dict.fromkeys(names))
        else:
            signature.bind(*names)
    except TypeError:
        return False
    return True


@final
class UnpackTarget:
    """A loss or metric that is given packed targets and unpacks them for the caller's own."""

    def __init__(self, packing: Packing, function: Any) -> None:
        self.packing, self.function = packing, function

    def __call__(self, outputs: Any, targets: Tensor) -> Any:
        """Call the caller's function with the tree of targets."""
        return self.function(outputs, self.packing.unpack(targets))
