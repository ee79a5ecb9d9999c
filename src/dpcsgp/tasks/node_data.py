"""A user's own examples in any of their forms: whole columns at once, or rows one by one.

Columns are a pair (inputs, targets) of tensors, arrays, tables or lists, or a dict of them with one
of the usual names for targets. Rows are what a map-style dataset gives: (input, target) pairs,
longer tuples whose last part is the target, or dicts. Inputs and targets may be nested tuples and
dicts. Errors name the node and the example and stay on the machine that holds the data.

Legend: J examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcsgp.errors import ConfigError, RefusedDataError
from dpcsgp.tasks.columns import Column, is_column, label_numbers, plain, read_column
from dpcsgp.tasks.trees import Packing, leaves_of, skeleton_of

NodeData = (
    Dataset[Any] | DataLoader[Any] | Sequence[Any] | Mapping[str, Any] | tuple[Any, Any] | None
)
Classes = tuple[Any, ...] | None

_SHAPE_HINT: Final = (
    "{kind} has the shape {here}, example 0 has {first}; all examples need the same shape (crop, "
    "resize or pad them; collate=... does it for datasets)"
)
TARGET_NAMES: Final = ("labels", "label", "targets", "target")


def node_list(node_data: Any) -> list[NodeData]:
    """Return one entry per node, or say what to write where a single data set was given."""
    if isinstance(node_data, list) and not _is_pair(node_data):
        for node, data in enumerate(node_data):
            if is_column(data):
                raise ConfigError(
                    f"node_data: node {node} is a table without targets ({type(data).__name__}): "
                    "give (inputs, targets) for every node, such as (table[columns], "
                    "table['outcome'])"
                )
    if _is_one_node(node_data):
        raise ConfigError(
            "node_data: expected a list with one entry per node, got the data of one node "
            f"({type(node_data).__name__}); for one node write [data], to deal one data set to "
            "several nodes torch.utils.data.random_split(dataset, [100, 80, 60])"
        )
    return list(node_data)


def _is_pair(data: list[Any]) -> bool:
    """Tell whether a list holds inputs and targets of one node: two columns, the second narrow."""
    if len(data) != 2 or not all(map(is_column, data)):
        return False
    shapes = [tuple(getattr(part, "shape", ())) for part in data]
    return shapes[0][:1] == shapes[1][:1] and shapes[0] != shapes[1] and shapes[1][1:] in ((), (1,))


def _is_one_node(data: Any) -> bool:
    """Tell whether this is the data of one node, not a list over nodes."""
    if isinstance(data, tuple | list):
        return any(is_column(part) for part in data)
    single = isinstance(data, Dataset | DataLoader | Mapping | str) or is_column(data)
    return single or not hasattr(data, "__iter__")


@final
@dataclass(frozen=True)
class Columns:
    """Inputs and targets of all examples at once: trees of columns."""

    inputs: Any
    targets: Any


def opened(data: Any, where: str) -> Columns | Any:
    """Return columns, or the dataset whose rows are read one by one; a loader gives its dataset."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, TensorDataset) and len(data.tensors) >= 2:
        *inputs, targets = data.tensors
        return Columns(inputs[0] if len(inputs) == 1 else tuple(inputs), targets)
    if isinstance(data, Mapping):
        return Columns(*_split_mapping(data, where))
    if isinstance(data, tuple) and len(data) == 2 and _first_column(data[0]) is not None:
        return Columns(*data)
    if is_column(data) or (isinstance(data, list) and len(data) == 2 and all(map(is_column, data))):
        raise RefusedDataError(
            where,
            f": expected inputs and targets, got {type(data).__name__}; give a tuple "
            "(inputs, targets), such as (table[columns], table['outcome'])",
        )
    return data


def count_examples(data: NodeData, where: str) -> int:
    """Return the number of examples; None has none. `where` names the data in errors."""
    if data is None:
        return 0
    found = opened(data, where)
    try:
        if isinstance(found, Columns):
            column = _first_column(found.inputs)
            return int(column.shape[0]) if hasattr(column, "shape") else len(column)
        return len(found)
    except TypeError:
        raise RefusedDataError(
            where,
            f": {type(data).__name__} has no length; give a map-style dataset (with "
            "__len__ and __getitem__) or a pair of tensors (inputs, targets)",
        ) from None


def _first_column(tree: Any) -> Any:
    """Return the first leaf if it holds many examples, else None."""
    while isinstance(tree, Mapping | tuple) and len(tree):
        tree = next(iter(tree.values())) if isinstance(tree, Mapping) else tree[0]
    return tree if is_column(tree) or isinstance(tree, list) or hasattr(tree, "toarray") else None


def _split_mapping(row: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """Return the inputs and the target of a dict with one of the usual names for targets."""
    name = next((name for name in TARGET_NAMES if name in row), None)
    inputs = {key: value for key, value in row.items() if key != name}
    if name is None or not inputs:
        raise RefusedDataError(
            where,
            f": a dict with the names {', '.join(map(repr, row))}: expected inputs and one of "
            f"{', '.join(map(repr, TARGET_NAMES))}; rename the target, or give (inputs, target)",
        )
    return inputs, row[name]


@final
@dataclass(frozen=True)
class RowForm:
    """The public form of an example: how its input and its target are packed."""

    inputs: Packing
    targets: Packing

    @property
    def whole_kinds(self) -> tuple[str, ...]:
        """Which of "inputs" and "targets" hold whole numbers."""
        kinds = {"inputs": self.inputs, "targets": self.targets}
        return tuple(kind for kind, packing in kinds.items() if packing.has_whole_numbers)


Part = tuple[Tensor, Tensor]  # packed inputs (J, ...) and targets (J, ...)


def raw_targets(data: Any, where: str) -> Column | None:
    """Return the targets as they were given: text is not mapped yet. None: nested ones."""
    if isinstance(data, Columns):
        if isinstance(data.targets, tuple | Mapping):
            return None
        return read_column(data.targets, where, "targets")
    if not len(data) or not isinstance(split_row(data, 0, where)[1], str):
        return None
    rows = [split_row(data, index, where)[1] for index in range(len(data))]
    return np.array(rows, dtype=object)


def read_columns(data: Columns, where: str, classes: Classes) -> tuple[Part, RowForm]:
    """Return the packed examples of whole columns, and their form."""
    inputs, input_form = _packed(data.inputs, where, "inputs", None)
    targets, target_form = _packed(data.targets, where, "targets", classes)
    if len(inputs) != len(targets):
        raise RefusedDataError(
            where, f": {len(inputs)} inputs but {len(targets)} targets; give one target per input"
        )
    return (inputs, targets), RowForm(input_form, target_form)


def _packed(tree: Any, where: str, kind: str, classes: Classes) -> tuple[Tensor, Packing]:
    skeleton = skeleton_of(tree)
    leaves = [
        _number_format(read_column(leaf, where, kind), kind, classes, where)
        for _, leaf in leaves_of(tree, skeleton)
    ]
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) > 1:
        raise RefusedDataError(
            where, f": parts of the {kind} have different lengths: {sorted(lengths)}"
        )
    packing = Packing.of(skeleton, leaves)
    return packing.pack(leaves, where), packing


def _number_format(values: Column, kind: str, classes: Classes, where: str) -> Tensor:
    if kind == "targets" and (classes is not None or isinstance(values, np.ndarray)):
        return label_numbers(values, classes, where)
    assert isinstance(values, Tensor)
    return plain(values, keep_bytes=kind == "inputs")


def split_row(data: Any, index: int, where: str) -> tuple[Any, Any]:
    """Return input and target of one row, as the dataset gives them."""
    try:
        row = data[index]
    except Exception as error:
        raise RefusedDataError(
            f"{where}, example {index}", f": cannot be read ({type(error).__name__}: {error})"
        ) from error
    if isinstance(row, Mapping):
        return _split_mapping(row, f"{where}, example {index}")
    if isinstance(row, tuple | list) and len(row) >= 2:
        *inputs, target = row
        return inputs[0] if len(inputs) == 1 else tuple(inputs), target
    raise RefusedDataError(
        f"{where}, example {index}",
        f": expected a pair (input, target) or a dict with 'labels', got {type(row).__name__}",
    )


@final
@dataclass(frozen=True)
class RowReader:
    """Reads rows of a dataset one by one into the packed form of the first row."""

    data: Any
    where: str
    classes: Classes
    form: RowForm

    @classmethod
    def of(cls, data: Any, where: str, classes: Classes) -> RowReader:
        """Take the form of all rows from the first."""
        forms: list[Packing] = []
        for kind, tree in zip(("input", "target"), split_row(data, 0, where), strict=True):
            skeleton = skeleton_of(tree)
            leaves = _row_leaves(tree, skeleton, f"{where}, example 0", kind, classes)
            forms.append(Packing.of(skeleton, leaves))
        return cls(data, where, classes, RowForm(*forms))

    def read(self, index: int) -> Part:
        """Return one packed example: inputs (1, ...) and targets (1, ...)."""
        found: list[Tensor] = []
        trees = split_row(self.data, index, self.where)
        forms = (self.form.inputs, self.form.targets)
        for kind, tree, packing in zip(("input", "target"), trees, forms, strict=True):
            where = f"{self.where}, example {index}"
            leaves = _row_leaves(tree, packing.skeleton, where, kind, self.classes)
            hint = getattr(self.data, "hint", _SHAPE_HINT)
            found.append(packing.pack(_in_form(leaves, packing, where, kind, hint), where))
        return found[0], found[1]


def _row_leaves(tree: Any, skeleton: Any, where: str, kind: str, classes: Classes) -> list[Tensor]:
    """Return the leaves (1, ...) of one row in plain number formats."""
    try:
        leaves = leaves_of(tree, skeleton)
    except KeyError:
        raise RefusedDataError(
            where, f": {kind} is nested in another way than in example 0; give all rows one form"
        ) from None
    return [_row_leaf(value, f"{where}: {kind}{name}", kind, classes) for name, value in leaves]


def _row_leaf(value: Any, where: str, kind: str, classes: Classes) -> Tensor:
    if kind == "target" and (classes is not None or isinstance(value, str)):
        return label_numbers([value], classes, where.partition(": target")[0], single=True)
    if isinstance(value, list):
        value = read_column(value, where, f"{kind}s")
    if isinstance(value, np.ndarray | np.generic | int | float):
        value = read_column(np.asarray(value), where, f"{kind}s")
    if not isinstance(value, Tensor):
        raise RefusedDataError(
            where,
            f" is of type {type(value).__name__}; expected a tensor, an array or a number (for "
            "images, for example, add torchvision's ToTensor() as the dataset's transform)",
        )
    return plain(value[None], keep_bytes=kind == "input")


def _in_form(
    leaves: Sequence[Tensor], packing: Packing, where: str, kind: str, hint: str
) -> list[Tensor]:
    """Return the leaves if they have the shapes and formats of the first row."""
    for leaf, shape, dtype in zip(leaves, packing.shapes, packing.dtypes, strict=True):
        if tuple(leaf.shape[1:]) != shape:
            here = tuple(leaf.shape[1:])
            raise RefusedDataError(where, f": {hint.format(kind=kind, here=here, first=shape)}")
        if leaf.dtype != dtype and not dtype.is_floating_point:
            raise RefusedDataError(
                where, f": {kind} is {leaf.dtype}, in example 0 {dtype}; give one number format"
            )
    return [leaf.to(dtype) for leaf, dtype in zip(leaves, packing.dtypes, strict=True)]


def check_labels(labels: Tensor, num_outputs: int, where: str) -> None:
    """Refuse class labels that the model has no output for."""
    if labels.is_floating_point() or not len(labels):
        return  # probabilities of classes
    wrong = ((labels < 0) | (labels >= num_outputs)).reshape(len(labels), -1).any(dim=1)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise RefusedDataError(
            f"{where}, example {index}",
            f": label {labels[index].tolist()}, but the model has "
            f"{num_outputs} outputs; {label_words(int(labels[wrong].flatten()[0]), num_outputs)}",
        )


def label_words(label: int, num_outputs: int) -> str:
    """Return what labels have to be, and how those that often occur become so."""
    words = f"labels run from 0 to {num_outputs - 1}"
    if label == num_outputs:
        return f"{words}: subtract 1 from labels that begin at 1, or give the model more outputs"
    if label == -1 and num_outputs == 2:
        return f"{words}: labels -1 and 1 become (labels + 1) // 2"
    return words
