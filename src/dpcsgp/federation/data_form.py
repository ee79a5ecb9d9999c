"""Whether a party's examples and loss are those that its roster speaks of.

No text here quotes an example: shapes, number formats and names only.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.federation.data_shape import OWN_LOSS, DataShape, Leaf
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.node_data import Classes, RowForm
from dpcsgp.tasks.tables import Names, table_names, with_order
from dpcsgp.tasks.trees import Packing

_LOCAL: Final = "<locals>."
# Where a pair (inputs, targets) has its tables.
_INPUTS: Final = (0,)
_TARGETS: Final = (1,)


def check_loss(shape: DataShape, given: str | LossPerExample | None) -> str | LossPerExample:
    """Return the loss of the roster: a name of this package's, or the given function.

    Raises:
        ConfigError: the given one has another name than the roster's.
    """
    if given is None:
        if shape.has_own_loss:
            raise ConfigError(
                f"data.loss = {shape.loss!r}: this loss lives in the parties' Python; run the "
                "roster with dpcsgp.take_part(roster, party, loss=...) and a function of that name"
            )
        return shape.loss
    name = given if isinstance(given, str) else loss_name(given)
    if name != shape.loss:
        raise ConfigError(
            f"loss: the roster names {shape.loss!r}, the given one is {name!r}; all parties need "
            "the same loss: give that one, or have a roster made with another"
        )
    return given


def loss_name(function: Any) -> str:
    """Return the name by which a roster speaks of a loss of the parties' own.

    >>> def huber(outputs, targets): ...
    >>> loss_name(huber)
    'own:huber'
    """
    named = function if hasattr(function, "__qualname__") else type(function)
    name = named.__qualname__.rpartition(_LOCAL)[2]
    if "<" in name or isinstance(function, functools.partial):
        raise ConfigError(
            f"loss: {name} has no name that others could compare; write it as a function: "
            "def my_loss(outputs, targets): ..."
        )
    return f"{OWN_LOSS}{name}"


def check_form(form: RowForm, classes: Classes, shape: DataShape) -> None:
    """Refuse examples of another form than the roster's.

    Args:
        form: of the party's examples.
        classes: labels by which text was numbered; None: targets are numbers.
        shape: what the roster says.

    Raises:
        DataError: names every difference.
    """
    faults = _input_faults(form.inputs, shape) + _target_faults(form.targets, classes, shape)
    if faults:
        raise DataError(
            f"data: {'; '.join(faults)}. Bring them into that form, or have another roster made"
        )


def in_roster_order(data: Any, shape: DataShape, where: str) -> tuple[Any, tuple[str, ...] | None]:
    """Return examples with the columns of their tables in the roster's order, and their names.

    Args:
        data: examples in any form; what is no table has no names, and stays as it is.
        shape: what the roster says.
        where: names the data in errors.

    Raises:
        DataError: a column is missing, or not on the roster.
    """
    found = table_names(data, where)
    names = found.get(_INPUTS)
    if not shape.columns:
        return data, None if names is None else tuple(map(str, names))
    wanted: Names = {_INPUTS: list(shape.columns)}
    if len(shape.target) > 1:
        wanted[_TARGETS] = list(shape.target)
    data = with_order(data, wanted, where, "data.columns in the roster")
    return data, None if names is None else shape.columns


def leaves_in(packing: Packing) -> tuple[Leaf, ...]:
    """Return the leaves of a party's inputs or targets as a roster describes them."""
    names = _names(packing.skeleton)
    return tuple(
        Leaf(name, tuple(shape), str(dtype).removeprefix("torch."))
        for name, shape, dtype in zip(names, packing.shapes, packing.dtypes, strict=True)
    )


def _names(skeleton: Any, name: str = "") -> list[str]:
    """Return the paths of all leaves: keys with dots between them, places in brackets."""
    if skeleton is None:
        return [name]
    kind, parts = skeleton
    found: list[str] = []
    for key, part in parts:
        step = f"[{key}]" if kind == "tuple" else f"{'.' if name else ''}{key}"
        found += _names(part, f"{name}{step}")
    return found


def _input_faults(inputs: Packing, shape: DataShape) -> list[str]:
    if shape.inputs:
        return _differences("inputs", inputs, shape.inputs)
    if inputs.skeleton is None and tuple(inputs.shape) == shape.input_shape:
        return []
    found = (
        f"the shape {list(inputs.shape)}"
        if inputs.skeleton is None
        else f"the parts {', '.join(map(str, leaves_in(inputs)))}"
    )
    return [f"inputs have {found}, the roster says {list(shape.input_shape)}"]


def _target_faults(targets: Packing, classes: Classes, shape: DataShape) -> list[str]:
    if shape.targets:
        return _differences("targets", targets, shape.targets)
    told = f"targets are {targets.dtype} of shape {list(targets.shape)}"
    if shape.target_shape is not None:
        right = targets.skeleton is None and tuple(targets.shape) == shape.target_shape
        return [] if right else [f"{told}, the roster says {list(shape.target_shape)}"]
    # Every party would number text in an order of its own, unless the roster has one.
    known = classes is None or bool(shape.classes)
    one_number = targets.skeleton is None and not targets.shape
    if known and one_number and not targets.dtype.is_floating_point:
        return []
    return [
        f"{told}; expected one class from 0 to {shape.num_classes - 1} per example, numbered "
        "alike by all parties (data.classes of a roster lists labels that are text)"
    ]


def _differences(kind: str, found: Packing, wanted: tuple[Leaf, ...]) -> list[str]:
    """Name every leaf that is missing, too many or different; their order does not matter."""
    here = {leaf.name: leaf for leaf in leaves_in(found)}
    there = {leaf.name: leaf for leaf in wanted}
    return [
        f"{kind}: {here.get(name, f'no {name or kind}')}, the roster says "
        f"{there.get(name, f'no {name or kind}')}"
        for name in {**there, **here}
        if here.get(name) != there.get(name)
    ]
