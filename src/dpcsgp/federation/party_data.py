"""A party's own examples, held against what its roster says before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, final

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.federation.roster import Roster
from dpcsgp.runs.data import Downloads, RunData, load_builtin_data
from dpcsgp.runs.data_files import load_examples
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import loss_and_metrics
from dpcsgp.tasks.node_data import NodeData, count_examples
from dpcsgp.tasks.supervised import OwnMetric


@final
@dataclass(frozen=True)
class OwnExamples:
    """Where a party's examples are, or the examples themselves.

    Attributes:
        data: a file, `module:function`, or the examples; None: those of the roster's data set.
        target: column of a table that holds the targets; None: the last one.
        test_data: public examples to measure the model on, in the same form; None: none.
        metrics: measured on them beside accuracy.
    """

    data: NodeData | str = None
    target: str | None = None
    test_data: NodeData | str = None
    metrics: Mapping[str, OwnMetric] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named."""
        given = (self.data, self.target, self.test_data, self.metrics)
        return all(value is None for value in given)


NO_EXAMPLES: Final = OwnExamples()


def load_own_data(
    roster: Roster,
    node: int,
    given: OwnExamples,
    design: RunDesign,
    downloads: Downloads | None = None,
) -> RunData:
    """Return the data of one party, checked against the roster and the model.

    Raises:
        ConfigError: no data were given, or some for a data set that everybody has.
        DataError: shape, number or labels are not those of the roster.
    """
    if roster.config.task.name != "own":
        return _share(roster, node, given, downloads)
    if given.data is None:
        raise ConfigError(
            'task.name = "own": every party brings its examples; give --data FILE ('
            f"inputs {list(roster.data.input_shape)}, {roster.data.num_classes} classes)"
        )
    examples, test = (_opened(given, source, roster) for source in (given.data, given.test_data))
    _check_number(roster, node, count_examples(examples, "data"))
    sizes = roster.facts.num_examples
    node_data: list[NodeData] = [None] * len(sizes)
    node_data[node] = examples
    weights = roster.config.task.class_weights
    loss, metrics = loss_and_metrics("cross_entropy", given.metrics, weights)
    looked_at = roster.config.run.test_examples
    data = UserData.collect(node_data, [node], test, loss, metrics, sizes, looked_at)
    _check_form(data, roster)
    data.check(design.module, design.mechanism.expected_batch_sizes)
    return data


def _share(roster: Roster, node: int, given: OwnExamples, downloads: Downloads | None) -> RunData:
    """Return a party's share of a data set that everybody can load."""
    if not given.is_empty:
        raise ConfigError(
            f'task.name = "{roster.config.task.name}": every party takes its share of that data '
            'set; leave --data out, or have a roster made with task.name = "own"'
        )
    data = load_builtin_data(roster.config, downloads).of_node(node)
    _check_number(roster, node, len(data.parts[node]))
    return replace(data, facts=roster.facts)


def _opened(given: OwnExamples, source: NodeData | str, roster: Roster) -> NodeData:
    """Read a file, or call a function; anything else is examples already."""
    if not isinstance(source, str):
        return source
    return load_examples(source, given.target, roster.data.input_shape)


def _check_form(data: UserData, roster: Roster) -> None:
    """Refuse examples of another form than the roster's; no text here quotes an example."""
    inputs, targets, shape = data.form.inputs, data.form.targets, roster.data.input_shape
    if inputs.skeleton is not None or tuple(inputs.shape) != shape:
        raise DataError(
            f"data: inputs have the shape {list(inputs.shape)}, the roster says {list(shape)}; "
            "bring them into that shape, or have another roster made"
        )
    # Every party would number text in an order of its own.
    one_number = targets.skeleton is None and not targets.shape
    if data.classes is not None or not one_number or targets.dtype.is_floating_point:
        raise DataError(
            f"data: targets are {targets.dtype} of shape {list(targets.shape)}; expected one class "
            f"from 0 to {roster.data.num_classes - 1} per example, numbered alike by all parties"
        )


def _check_number(roster: Roster, node: int, held: int) -> None:
    card = roster.parties[node]
    if held > card.promised.num_examples:
        raise DataError(
            f"data: {held} examples, but the card of {card.name} declares "
            f"{card.promised.num_examples} (num_examples); leave some out, or have a roster made "
            "with a card that declares as many"
        )
