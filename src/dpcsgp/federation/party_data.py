"""A party's own examples, held against what its roster says before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.federation.data_form import check_form, check_loss, in_roster_order
from dpcsgp.federation.roster import Roster
from dpcsgp.runs.data import Downloads, RunData, load_builtin_data
from dpcsgp.runs.data_files import FileExamples, is_file, load_examples
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.table_columns import TableForm
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import loss_and_metrics
from dpcsgp.runs.user_units import Unit, UserUnits, separate_units
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.collating import Collate
from dpcsgp.tasks.node_data import NodeData, count_examples
from dpcsgp.tasks.supervised import OwnMetric


@final
@dataclass(frozen=True)
class OwnExamples:
    """Where a party's examples are, or the examples themselves.

    Attributes:
        data: a file, `module:function`, or the examples; None: those of the roster's data set.
        target: columns of a table that hold the targets; None: those of the roster, or the last.
        test_data: public examples to measure the model on, in the same form; None: none.
        metrics: measured on them beside accuracy.
        unit: whose each row is: a column, or identifiers; None: every example is its own unit.
        loss: the function, where the roster names one of the parties' own; None: the package's.
        collate: brings rows of different lengths to the public shape.
    """

    data: NodeData | str = None
    target: str | Sequence[str] | None = None
    test_data: NodeData | str = None
    metrics: Mapping[str, OwnMetric] | None = None
    unit: Unit | None = None
    loss: str | LossPerExample | None = None
    collate: Collate | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named."""
        return all(value is None for value in vars(self).values())

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the columns with the targets; empty: the last ones."""
        return (self.target,) if isinstance(self.target, str) else tuple(self.target or ())


NO_EXAMPLES: Final = OwnExamples()


@final
@dataclass(frozen=True)
class OwnColumns:
    """Names of a party's columns, in the order in which they are used; None: not known."""

    inputs: tuple[str, ...] | None
    target: tuple[str, ...] | None


def load_own_data(
    roster: Roster,
    node: int,
    given: OwnExamples,
    design: RunDesign,
    downloads: Downloads | None = None,
) -> RunData:
    """Return the data of one party, checked against the roster and the model.

    Raises:
        ConfigError: no data were given, or some for a data set that everybody has; whose a row is
            was not said, or nobody asked for it; the loss is another one than the roster's.
        DataError: shape, number, columns or labels are not those of the roster.
    """
    if roster.config.task.name != "own":
        return _share(roster, node, given, downloads)
    return load_named_data(roster, node, given, design)[0]


def load_named_data(
    roster: Roster, node: int, given: OwnExamples, design: RunDesign
) -> tuple[UserData, OwnColumns]:
    """Return the examples that a party brings, and what is known of their columns."""
    _check_unit(roster, given)
    _check_target(roster, given)
    if given.data is None:
        raise ConfigError(
            f'task.name = "own": every party brings its examples; give --data FILE ({roster.data})'
        )
    loss = check_loss(roster.data, given.loss)
    function, metrics = loss_and_metrics(loss, given.metrics, roster.config.task.class_weights)
    node_data, test, units, columns = _examples(roster, node, given)
    _check_number(roster, node, count_examples(node_data[node], "data"), units)
    data = UserData.collect(
        node_data, [node], test, function, metrics, roster.facts.num_examples,
        roster.config.run.test_examples, roster.data.classes or None, given.collate, units,
    )  # fmt: skip
    check_form(data.form, data.classes, roster.data)
    data.connect(design.module)
    data = data.with_accuracy(design.module)
    data.check(design.module, design.mechanism.expected_batch_sizes)
    return data, columns


def _share(roster: Roster, node: int, given: OwnExamples, downloads: Downloads | None) -> RunData:
    """Return a party's share of a data set that everybody can load."""
    if not given.is_empty:
        raise ConfigError(
            f'task.name = "{roster.config.task.name}": every party takes its share of that data '
            'set; leave --data out, or have a roster made with task.name = "own"'
        )
    data = load_builtin_data(roster.config, downloads).of_node(node)
    _check_number(roster, node, len(data.parts[node]), None)
    return replace(data, facts=roster.facts)


def _check_unit(roster: Roster, given: OwnExamples) -> None:
    """Refuse persons that the roster does not promise, and a promise to persons nobody knows."""
    most = roster.config.privacy.max_rows_per_unit
    if most and given.unit is None:
        raise ConfigError(
            f"privacy.max_rows_per_unit = {most}: the roster promises privacy to whole persons, so "
            "say whose each row is: --unit COLUMN, or take_part(..., unit=...)"
        )
    if not most and given.unit is not None:
        shown = given.unit if isinstance(given.unit, str) else "..."
        raise ConfigError(
            f"--unit {shown}: the roster promises privacy to single examples; leave it out, or "
            "have a roster made with privacy.max_rows_per_unit"
        )


def _check_target(roster: Roster, given: OwnExamples) -> None:
    """Refuse another target than the roster's."""
    public = roster.data.target
    if given.targets and public and given.targets != public:
        raise ConfigError(
            f"--target {' --target '.join(given.targets)}: the roster says that the target is "
            f"{', '.join(public)}; leave --target out, and rename the column if need be"
        )


def _examples(
    roster: Roster, node: int, given: OwnExamples
) -> tuple[list[NodeData], NodeData, UserUnits | None, OwnColumns]:
    """Return the examples in their node's place, public ones, whose rows they are, and columns."""
    own, test = _opened(given, given.data, roster), _opened(given, given.test_data, roster, False)
    node_data: list[NodeData] = [None] * len(roster.parties)
    node_data[node] = own.data
    whose = given.unit if own.identifiers is None else own.identifiers
    # A column of a table is taken out of it; identifiers are those of this node.
    named = whose is None or isinstance(whose, str)
    unit: Unit | None = whose if named else _in_place(whose, node, len(roster.parties))
    cap = roster.config.privacy.max_rows_per_unit
    node_data, public, units = separate_units(unit, node_data, test.data, cap)
    # Tables of Python's have names too, once the column of persons is out of them.
    node_data[node], names = in_roster_order(node_data[node], roster.data, "data")
    public, _ = in_roster_order(public, roster.data, "test_data")
    return node_data, public, units, OwnColumns(own.columns or names, own.target)


def _in_place(identifiers: Any, node: int, num_nodes: int) -> list[Any]:
    return [identifiers if other == node else None for other in range(num_nodes)]


def _opened(
    given: OwnExamples, source: NodeData | str, roster: Roster, private: bool = True
) -> FileExamples:
    """Read a file, or call a function; anything else is examples already."""
    if not isinstance(source, str):
        return FileExamples(source)
    shape = roster.data
    if (shape.inputs or shape.targets) and is_file(source):
        raise DataError(
            f"data {source}: a file is one table, and the roster says {shape}; give "
            "module:function, or dpcsgp.take_part(..., data=...) what `dpcsgp.train` takes"
        )
    form = TableForm(
        given.targets,
        given.unit if isinstance(given.unit, str) else None,
        private,  # public examples need not say whose they are
        shape.packed_shape,
        shape.target_shape,
        shape.classes,
        0 if shape.has_own_loss else shape.num_classes,
        shape.columns,
        shape.target,
    )
    return load_examples(source, form)


def _check_number(roster: Roster, node: int, held: int, units: UserUnits | None) -> None:
    card = roster.parties[node]
    own = units.of(node) if units is not None else None
    what, held = ("examples", held) if own is None else ("persons", len(own))
    if held > card.promised.num_examples:
        raise DataError(
            f"data: {held} {what}, but the card of {card.name} declares "
            f"{card.promised.num_examples} (num_examples); leave some out, or have a roster made "
            "with a card that declares as many"
        )
