"""Tables with named columns: brought into one order by name, for a model knows places only.

Tables are known by `columns` and `to_numpy`, so that pandas and the like are not needed here. One
whose columns are numbered from 0 on, as pandas does without names, has no names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpcsgp.errors import RefusedDataError
from dpcsgp.tasks.node_data import TARGET_NAMES

Path = tuple[Any, ...]  # keys and places on the way to a leaf
Names = dict[Path, list[Any]]  # of the columns of the tables in a tree
_MOST_NAMES = 20


def names_of(table: Any) -> list[Any] | None:
    """Return the names of a table's columns; None: it is no table, or has no names."""
    if isinstance(table, Mapping) or not hasattr(table, "to_numpy"):
        return None
    names = getattr(table, "columns", None)
    if names is None or list(names) == list(range(len(names))):
        return None
    return list(names)


def in_order(table: Any, wanted: Sequence[Any], where: str, whose: str) -> Any:
    """Return a table with its columns in the wanted order; `whose` order it is, for errors.

    Raises:
        RefusedDataError: names every column that is missing, there twice or too many.
    """
    names = names_of(table)
    if names is None or names == list(wanted):
        return table
    counts, known = Counter(names), set(wanted)
    missing = [name for name in wanted if not counts[name]]
    more = [name for name in counts if name not in known]
    twice = [name for name in wanted if counts[name] > 1]
    told = {"no column": missing, "unexpected columns": more, "more than one column": twice}
    faults = [f"{fault} {_listed(found)}" for fault, found in told.items() if found]
    if faults:
        raise RefusedDataError(
            where,
            f": {'; '.join(faults)}. Columns are taken by the names of {whose}: rename, add or "
            "remove columns, so that all have the same names",
        )
    return table[list(wanted)]


def _listed(names: Sequence[Any]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


def table_names(data: Any, where: str) -> Names:
    """Return the names in all tables of a node's columns, by their paths; refuse repeated ones."""
    found: Names = {}
    for path, leaf in _leaves(data):
        names = names_of(leaf)
        if names is None or (len(names) == 1 and _is_target(path, data)):
            continue  # a target that is one column has one place
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise RefusedDataError(
                where, f": more than one column {_listed(twice)}; rename or remove it"
            )
        found[path] = names
    return found


def with_order(data: Any, wanted: Names, where: str, whose: str) -> Any:
    """Return a node's columns with those tables in order whose paths have a wanted order."""
    if not table_names(data, where).keys() & wanted.keys():
        return data
    return _rebuilt(data, (), wanted, where, whose)


def _rebuilt(tree: Any, path: Path, wanted: Names, where: str, whose: str) -> Any:
    if path in wanted:
        return in_order(tree, wanted[path], where, whose)
    if isinstance(tree, Mapping):
        return {
            key: _rebuilt(part, (*path, key), wanted, where, whose) for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        parts = enumerate(tree)
        return tuple(_rebuilt(part, (*path, key), wanted, where, whose) for key, part in parts)
    return tree


def refuse_other_rows(data: Any, where: str) -> None:
    """Refuse tables of one node whose rows have the same names in another order.

    Rows are taken by their places, so every input would get the target of another row.
    """
    indexes = [(path, leaf.index) for path, leaf in _leaves(data) if _has_index(leaf)]
    for path, index in indexes[1:]:
        first_path, first = indexes[0]
        if index.equals(first) or len(index) != len(first):
            continue
        if Counter(index) == Counter(first):
            raise RefusedDataError(
                where,
                f": {_told(path, data)} and {_told(first_path, data)} have the same index in "
                "another order, and rows are taken by their places; give targets.loc[inputs.index],"
                " or, if the places are right, .reset_index(drop=True) of both",
            )


def _has_index(leaf: Any) -> bool:
    return hasattr(leaf, "to_numpy") and hasattr(getattr(leaf, "index", None), "equals")


def _told(path: Path, data: Any) -> str:
    return "targets" if _is_target(path, data) else "inputs"


def _is_target(path: Path, data: Any) -> bool:
    """Tell whether a leaf belongs to the targets of a pair or a dict."""
    if isinstance(data, Mapping):
        return bool(path) and path[0] == next((key for key in TARGET_NAMES if key in data), None)
    return path[:1] == (1,)


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return what a node's pair or dict of columns holds; of datasets nothing."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(tree, tuple):
        for place, part in enumerate(tree):
            yield from _leaves(part, (*path, place))
    elif path:
        yield path, tree
