"""Checks of a user's data before and after they are read: sizes, objects given twice, forms.

Columns of tables are brought into one order.

Refusals name the node, and are raised where the data are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch.utils.data import DataLoader

from dpcsgp.errors import ConfigError, RefusedDataError
from dpcsgp.runs.user_units import UserUnits
from dpcsgp.tasks.node_data import (
    NodeData,
    RowForm,
    count_examples,
)
from dpcsgp.tasks.tables import Names, refuse_other_rows, table_names, with_order


def _count(data: NodeData, node: int, units: UserUnits | None) -> int:
    """Return how many examples a node has; with units, how many persons."""
    found = count_examples(data, f"node {node}")
    if units is None or not found:
        return found
    own = units.of(node)
    if own is None or own.num_rows != found:
        raise RefusedDataError(
            f"node {node}",
            f": {found} examples, but {own.num_rows if own else 'no'} identifiers in unit; give "
            "one identifier per row",
        )
    return len(own)


def declared_sizes(
    node_data: Sequence[NodeData],
    hosted: Sequence[int],
    num_examples: Sequence[int] | None,
    units: UserUnits | None,
) -> tuple[int, ...]:
    """Return the declared number of examples, or of persons, of every node.

    Those of the hosted ones are checked against their data.
    """
    # Without a declaration the lengths are public.
    what = "examples" if units is None else "persons"
    if num_examples is None:
        sizes = tuple(_count(data, node, units) for node, data in enumerate(node_data))
    else:
        sizes = tuple(int(size) for size in num_examples)
        if len(sizes) != len(node_data):
            raise ConfigError(
                f"num_examples has {len(sizes)} values for {len(node_data)} nodes; "
                "give one per node"
            )
        for node in hosted:
            if (found := _count(node_data[node], node, units)) > sizes[node]:
                # How many there are stays on this machine; the others hear whose data it is.
                raise RefusedDataError(
                    f"node {node}",
                    f": its data have {found} {what}, but num_examples[{node}] = {sizes[node]}; "
                    "declare at least as many as there are (the others count as blanks), or leave "
                    f"{what} out",
                )
    if not any(sizes):
        raise ConfigError("node_data: no node has an example; at least one needs a dataset")
    return sizes


def warn_about_shared_data(
    node_data: Sequence[NodeData], test_data: NodeData
) -> tuple[dict[int, int], bool]:
    """Warn where one object is given twice: its examples then pay in both places.

    Returns:
        node -> the first node that was given the same object; whether test data are a node's.
    """
    # Objects are compared here and not their contents (`row_digests` looks at rows).
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    for node, data in enumerate(node_data):
        if data is None:
            continue
        same[node] = first.setdefault(id(data), node)
        if (other := same[node]) != node:
            warnings.warn(
                f"nodes {other} and {node} are given the same data: their examples are released "
                "by both, and the eps of both adds "
                "up for them; give every node examples of its own",
                stacklevel=4,
            )
    if test_data is not None and id(test_data) in first:
        warnings.warn(
            f"test_data are those of node {first[id(test_data)]}: what is measured on them is "
            "published and not private; use "
            "public data for testing",
            stacklevel=4,
        )
    return same, test_data is not None and id(test_data) in first


def warn_about_loaders(node_data: Mapping[str, NodeData], test_data: NodeData) -> None:
    """Say once, whoever gives them, that loaders are not what draws batches."""
    given = {**node_data, "test_data": test_data}
    names = [name for name, data in given.items() if isinstance(data, DataLoader)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{names[0]}{more}: of a DataLoader only its dataset is used; private batches are "
            "drawn anew in every step (its batch size, order, workers and collate function do not "
            "matter)",
            stacklevel=4,
        )


def refuse_differences(known: Mapping[str, RowForm]) -> None:
    """Refuse data whose shapes or number formats differ between nodes, or from the test data's."""
    (first, form), *others = known.items()
    for name, other in others:
        for kind in ("inputs", "targets"):
            here, there = getattr(other, kind), getattr(form, kind)
            if here != there:
                raise RefusedDataError(
                    name,
                    f": {kind} are {here}, those of {first} {there}; all nodes and the test data "
                    "need the same",
                )


def tables_in_order(
    node_data: Sequence[NodeData], hosted: Sequence[int], test_data: NodeData
) -> tuple[list[NodeData], NodeData, Names]:
    """Return the data with the columns of all tables in one order, and that order.

    It is that of the test data, which all processes have, otherwise that of the first node with a
    table; of nodes that are not hosted here only the names are looked at.
    """
    everywhere = {"test_data": test_data}
    everywhere |= {f"node {node}": data for node, data in enumerate(node_data)}
    wanted: Names = {}
    whose = ""
    for where, data in everywhere.items():
        for path, names in table_names(data, where).items():
            whose = whose or where
            wanted.setdefault(path, names)
    here = ["test_data", *(f"node {node}" for node in hosted)]
    for where in here:
        refuse_other_rows(everywhere[where], where)
        everywhere[where] = with_order(everywhere[where], wanted, where, whose)
    nodes = [everywhere[f"node {node}"] for node in range(len(node_data))]
    return nodes, everywhere["test_data"], wanted
