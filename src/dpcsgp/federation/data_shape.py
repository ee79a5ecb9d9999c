"""What every party's examples look like: public, in the roster, the same for all.

Inputs are one tensor (`input_shape`), or for models of the parties' own a tree of them (`inputs`,
one entry per leaf). What is learnt is one of a number of classes, numbers of a shape, or for a loss
of the parties' own a tree of tensors. Columns of tables may have public names, by which those of
every party are taken. A field that says what it always was is left out of the text, so that a
roster without it has the fingerprint that it always had.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from dpcsgp.errors import ConfigError
from dpcsgp.federation.files import Fields, toml_lines, toml_value

CROSS_ENTROPY: Final = "cross_entropy"
SQUARED_ERROR: Final = "mse"
OWN_LOSS: Final = "own:"  # begins the name of a loss that lives in the parties' Python
DTYPES: Final = ("float32", "int64", "uint8")
_LOSS: Final = r"cross_entropy|mse|own:[A-Za-z_][A-Za-z0-9_.]{0,99}"
_LEAF: Final = r"[^\x00-\x1f\x7f]{0,100}"
_MOST_SIDES: Final = 4
_MOST_INPUTS: Final = 10**8
_MOST_LEAVES: Final = 64
_MOST_CLASSES: Final = 10**6
_MOST_LABELS: Final = 10**4
_LONGEST_LABEL: Final = 100
_LARGEST_LABEL: Final = 2**31
_MOST_DOTS: Final = 40  # of a line that `files.parse_table` takes
_MOST_SHOWN: Final = 8  # labels in a sentence
_MOST_COLUMNS: Final = 10**4
_LISTS: Final = ("inputs", "targets", "classes", "columns", "target")  # a line for each entry


@final
@dataclass(frozen=True)
class Leaf:
    """One tensor of an example: its place in the tree, its shape, its number format.

    The name is a path of keys and places, such as "mask", "text.mask" or "[0]"; empty: the example
    is this tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def take(cls, values: Any, where: str) -> Leaf:
        """Take the fields of one leaf, and refuse what is left over."""
        fields = Fields(values, where)
        named = fields.has("name")
        name = fields.text("name", _LEAF, "a path such as mask or [0]") if named else ""
        shape = _take_shape(fields, "shape")
        dtype = fields.text("dtype", "|".join(DTYPES), f"one of {', '.join(DTYPES)}")
        fields.end()
        if name.count(".") > _MOST_DOTS // 2:
            raise ConfigError(f"{where}: name = {name[:40]!r}...: nested too deeply")
        return cls(name, shape, dtype)

    def content(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.name or 'one tensor'} {self.dtype} {list(self.shape)}"


@final
@dataclass(frozen=True)
class DataShape:
    """What every party's examples look like, and by which loss a model is measured on them.

    Attributes:
        input_shape: of one input; () where `inputs` has leaves.
        num_classes: targets are whole numbers from 0 to num_classes - 1; 0: they are no classes.
        loss: "cross_entropy", "mse", or "own:" and the name of a function of the parties' own.
        target_shape: targets are numbers of this shape; None: they are not.
        classes: the label of each class, in the order of the model's outputs; empty: numbers.
        inputs: leaves of a nested input, or of one whose number format matters; empty: one tensor.
        targets: leaves of targets that are neither classes nor numbers of one shape.
        columns: names of the columns of a table that are the inputs, in their order; empty: no
            names are known, and columns are told apart by their places.
        target: names of the columns that hold the targets; empty: not said.
    """

    input_shape: tuple[int, ...]
    num_classes: int = 0
    loss: str = CROSS_ENTROPY
    target_shape: tuple[int, ...] | None = None
    classes: tuple[str | int, ...] = ()
    inputs: tuple[Leaf, ...] = ()
    targets: tuple[Leaf, ...] = ()
    columns: tuple[str, ...] = ()
    target: tuple[str, ...] = ()

    @classmethod
    def take(cls, fields: Fields) -> DataShape:
        """Take the fields of [data], and refuse what is left over."""
        expected = '"cross_entropy", "mse", or "own:" and the name of a function'
        loss = fields.text("loss", _LOSS, expected) if fields.has("loss") else CROSS_ENTROPY
        shape, inputs = _take_inputs(fields)
        kinds = ("num_classes", "classes", "target_shape", "targets")
        _check_targets(fields, loss, [key for key in kinds if fields.has(key)])
        target_shape = _take_shape(fields, "target_shape") if fields.has("target_shape") else None
        if loss == SQUARED_ERROR and target_shape is None:
            target_shape = ()
        targets = _take_leaves(fields, "targets") if fields.has("targets") else ()
        num_classes, classes = _take_classes(fields)
        columns, target = _take_columns(fields, shape, None if targets else target_shape or ())
        fields.end()
        return cls(
            shape, num_classes, loss, target_shape, classes, inputs, targets, columns, target
        )

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss lives in the parties' Python."""
        return self.loss.startswith(OWN_LOSS)

    @property
    def lacks_columns(self) -> bool:
        """Whether inputs look like rows of a table, and nobody said what its columns are."""
        return not self.columns and not self.inputs and len(self.input_shape) == 1

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of an input as it is handed around: leaves lie side by side."""
        if not self.inputs:
            return self.input_shape
        if len(self.inputs) == 1 and not self.inputs[0].name:
            return self.inputs[0].shape
        return (sum(math.prod(leaf.shape) for leaf in self.inputs),)

    @property
    def num_outputs(self) -> int:
        """Outputs of a model of this package: one per class, or one per number of a target.

        Raises:
            ConfigError: such a model does not fit these examples.
        """
        for kind, leaves in (("inputs", self.inputs), ("targets", self.targets)):
            if leaves:
                raise ConfigError(
                    f"data.{kind} = {', '.join(map(str, leaves))}: a model that task.model names "
                    "takes one tensor and gives classes or numbers; bring a model of your own "
                    "(dpcsgp.take_part(..., model=...)), or give input_shape and num_classes"
                )
        return self.num_classes or math.prod(self.target_shape or ())

    def content(self) -> dict[str, Any]:
        """Return the fields as plain values; what is as it always was is left out."""
        found: dict[str, Any] = {}
        if self.inputs:
            found["inputs"] = [leaf.content() for leaf in self.inputs]
        else:
            found["input_shape"] = list(self.input_shape)
        if self.num_classes:
            found["num_classes"] = self.num_classes
        if self.loss != CROSS_ENTROPY:
            found["loss"] = self.loss
        if self.target_shape is not None:
            found["target_shape"] = list(self.target_shape)
        if self.classes:
            found["classes"] = list(self.classes)
        if self.targets:
            found["targets"] = [leaf.content() for leaf in self.targets]
        if self.columns:
            found["columns"] = list(self.columns)
        if self.target:
            found["target"] = self.target[0] if len(self.target) == 1 else list(self.target)
        return found

    def lines(self) -> list[str]:
        """Return the fields as lines of TOML; long lists have a line for each entry."""
        found: list[str] = []
        for key, value in self.content().items():
            if key in _LISTS and isinstance(value, list):
                found += [f"{key} = [", *(f"  {_inline(entry)}," for entry in value), "]"]
            else:
                found += toml_lines({key: value})
        return found

    def __str__(self) -> str:
        shape = "; ".join(map(str, self.inputs)) if self.inputs else list(self.input_shape)
        loss = {CROSS_ENTROPY: "", SQUARED_ERROR: ", mean squared error"}
        told = f"inputs {shape}, {self.told_targets}{loss.get(self.loss, f', loss {self.loss}')}"
        if self.columns:
            told += f"; columns {ends_of(self.columns)}"
        return told + (f"; target {', '.join(self.target)}" if self.target else "")

    @property
    def told_targets(self) -> str:
        """What is learnt, in words."""
        if self.targets:
            return f"targets {'; '.join(map(str, self.targets))}"
        if self.target_shape is not None:
            return (
                f"targets {list(self.target_shape)}" if self.target_shape else "targets: a number"
            )
        shown = ", ".join(map(str, self.classes[:_MOST_SHOWN]))
        more = ", ..." if len(self.classes) > _MOST_SHOWN else ""
        return f"{self.num_classes} classes" + (f" ({shown}{more})" if self.classes else "")


def column_lines(columns: Sequence[str], target: Sequence[str]) -> list[str]:
    """Return the lines of [data] for a table with these columns; a name that cannot be is refused.

    >>> column_lines(["age", "bmi"], ["label"])
    ['input_shape = [2]', 'columns = [', '  "age",', '  "bmi",', ']', 'target = "label"']
    """
    named = {
        "input_shape": [len(columns)],
        "columns": list(columns),
        "target": target[0] if len(target) == 1 else list(target),
    }
    fields = Fields(named, "data")
    shape = _take_shape(fields, "input_shape", least=1)
    _take_columns(fields, shape, (len(target),))
    kept = DataShape(shape, columns=tuple(columns), target=tuple(target))
    return kept.lines()


def ends_of(names: Sequence[str]) -> str:
    """Return the first and the last names of a list.

    >>> ends_of(["a", "b", "c", "d", "e"])
    'a, b, ... e (5)'
    """
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


def _check_targets(fields: Fields, loss: str, given: Sequence[str]) -> None:
    """Refuse a description of targets that does not go with the loss."""
    fitting = {
        CROSS_ENTROPY: ("num_classes", "classes"),
        SQUARED_ERROR: ("target_shape",),
    }.get(loss, ("num_classes", "classes", "target_shape", "targets"))
    if wrong := [key for key in given if key not in fitting]:
        raise fields.wrong(
            wrong[0],
            fields.take(wrong[0]),
            f'no such field with loss = "{loss}", which goes with {" or ".join(fitting)}',
        )
    classes = [key for key in given if key in ("num_classes", "classes")]
    # The squared error of one number per example needs no words.
    if not given and loss == SQUARED_ERROR:
        return
    if not given and loss == CROSS_ENTROPY:
        fields.take("num_classes")  # says that it is missing
    if len(given) - len(classes) + bool(classes) != 1:
        raise fields.wrong(
            "loss", loss, f"one description of the targets beside it: {' or '.join(fitting)}"
        )


def _take_inputs(fields: Fields) -> tuple[tuple[int, ...], tuple[Leaf, ...]]:
    """Take the shape of a single tensor, or the leaves of a tree."""
    if not fields.has("inputs"):
        return _take_shape(fields, "input_shape", least=1), ()
    if fields.has("input_shape"):
        shape = fields.take("input_shape")
        raise fields.wrong("input_shape", shape, "either input_shape or inputs, not both")
    return (), _take_leaves(fields, "inputs")


def _take_leaves(fields: Fields, key: str) -> tuple[Leaf, ...]:
    values = fields.listed(key, _MOST_LEAVES)
    leaves = [Leaf.take(value, f"data, {key}[{place}]") for place, value in enumerate(values)]
    names = [leaf.name for leaf in leaves]
    if len(set(names)) != len(names) or ("" in names and len(names) > 1):
        raise fields.wrong(key, names, "leaves with different names, or one without a name")
    return tuple(leaves)


def _take_shape(fields: Fields, key: str, least: int = 0) -> tuple[int, ...]:
    sides = fields.take(key)
    expected = f"{least} to {_MOST_SIDES} whole numbers above 0, such as [30]"
    if not isinstance(sides, list) or not least <= len(sides) <= _MOST_SIDES:
        raise fields.wrong(key, sides, expected)
    for side in sides:
        if not isinstance(side, int) or isinstance(side, bool) or not 1 <= side <= _MOST_INPUTS:
            raise fields.wrong(key, sides, expected)
    return tuple(sides)


def _take_classes(fields: Fields) -> tuple[int, tuple[str | int, ...]]:
    """Take the number of classes and their labels; the number follows from these."""
    labels: list[Any] = fields.listed("classes", _MOST_LABELS) if fields.has("classes") else []
    for label in labels:
        if not _is_label(label):
            raise fields.wrong(
                "classes",
                label,
                f"whole numbers, or text of 1 to {_LONGEST_LABEL} letters without blanks at its "
                "ends",
            )
    kinds = {type(label) for label in labels}
    if labels and (len(labels) < 2 or len(set(labels)) != len(labels) or len(kinds) > 1):
        raise fields.wrong("classes", labels, "2 or more different labels, all text or all numbers")
    if not fields.has("num_classes"):
        return len(labels), tuple(labels)
    number = fields.whole("num_classes", 2, _MOST_CLASSES)
    if labels and number != len(labels):
        raise fields.wrong(
            "num_classes", number, f"{len(labels)}, as many as there are classes, or leave it out"
        )
    return number, tuple(labels)


def _take_columns(
    fields: Fields, shape: tuple[int, ...], target_shape: tuple[int, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Take the names of the columns with inputs, and of those with targets.

    `target_shape` is None for targets that are a tree: no columns of one table.
    """
    if not fields.has("columns"):
        if fields.has("target"):
            target = fields.take("target")
            raise fields.wrong("target", target, "columns beside it: the names of the inputs")
        return (), ()
    columns = _take_names(fields, "columns", fields.listed("columns", _MOST_COLUMNS))
    if not shape or len(columns) != math.prod(shape):
        expected = f"as many as input_shape = {list(shape)} says: {math.prod(shape)}"
        raise fields.wrong(
            "columns",
            f"{len(columns)} names",
            expected if shape else "input_shape beside them: they are the columns of one table",
        )
    if not fields.has("target"):
        return columns, ()
    given = fields.take("target")
    target = _take_names(fields, "target", [given] if isinstance(given, str) else given)
    if target_shape is None or len(target) != math.prod(target_shape):
        raise fields.wrong(
            "target", given, "one name, or with target_shape a list of one for each of its numbers"
        )
    if both := set(target) & set(columns):
        raise fields.wrong("target", min(both), "a column that is not among columns")
    return columns, target


def _take_names(fields: Fields, key: str, names: Any) -> tuple[str, ...]:
    """Return names of columns, all different."""
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not _is_label(name):
            raise fields.wrong(
                key,
                name,
                f"names of 1 to {_LONGEST_LABEL} letters, without blanks at their ends",
            )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise fields.wrong(key, repeated[0], "different names: this one stands there twice")
    return tuple(names)


def _is_label(label: Any) -> bool:
    if isinstance(label, int) and not isinstance(label, bool):
        return abs(label) <= _LARGEST_LABEL
    if not isinstance(label, str) or not 1 <= len(label) <= _LONGEST_LABEL:
        return False
    return label.isprintable() and label == label.strip() and label.count(".") <= _MOST_DOTS


def _inline(value: Any) -> str:
    """Return an entry of a list as TOML: a value, or a table in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(toml_lines(value)) + " }"
    return toml_value(value)
