"""Whose rows belong together in a user's own data: a column by name, or identifiers per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import DataLoader, Dataset

from dpcsgp.errors import ConfigError, RefusedDataError
from dpcsgp.tasks.examples import refuse_kept_views
from dpcsgp.tasks.node_data import NodeData
from dpcsgp.tasks.units import UnitRows

# a column's name, or for every node the identifiers of its rows (None: not known here)
Unit = str | Sequence[Any]


@final
@dataclass(frozen=True)
class UserUnits:
    """The units of the nodes whose identifiers are known here, and the public cap on their rows."""

    by_node: dict[int, UnitRows]
    max_rows: int

    def of(self, node: int) -> UnitRows | None:
        """Return the units of a node; None: it has no data, or is another process's."""
        return self.by_node.get(node)


def separate_units(
    unit: Unit | None, node_data: Sequence[NodeData], test_data: NodeData, max_rows: int
) -> tuple[list[NodeData], NodeData, UserUnits | None]:
    """Return the data without the column that says whose a row is, and what it says.

    Args:
        unit: name of a column, or identifiers per node; None: every example is its own unit.
        node_data: what the caller gave for each node.
        test_data: public data, which may have the column too.
        max_rows: `privacy.max_rows_per_unit`.

    Raises:
        ConfigError: if the cap is missing, or there is nothing that it would cap.
        RefusedDataError: for identifiers that do not fit a node's rows.
    """
    if unit is None:
        return list(node_data), test_data, None
    if max_rows < 1:
        raise ConfigError(
            "unit: set privacy.max_rows_per_unit, the public number of a person's rows that count "
            'in one step, such as settings={"privacy.max_rows_per_unit": 8}; of persons with more '
            "rows so many are drawn anew in every step"
        )
    identifiers: Sequence[Any]
    if isinstance(unit, str):
        split = [_without(data, unit, f"node {node}") for node, data in enumerate(node_data)]
        node_data, identifiers = [data for data, _ in split], [found for _, found in split]
        test_data = _without(test_data, unit, "test_data", needed=False)[0]
    else:
        identifiers = list(unit)
        if len(identifiers) != len(node_data):
            raise ConfigError(
                f"unit has {len(identifiers)} entries for {len(node_data)} nodes; give one per "
                "node, each with one identifier per row (None: no data), or the name of a column"
            )
    by_node = {
        node: UnitRows.of(found, f"node {node}")
        for node, found in enumerate(identifiers)
        if found is not None and node_data[node] is not None
    }
    return list(node_data), test_data, UserUnits(by_node, max_rows)


def _without(data: Any, column: str, where: str, needed: bool = True) -> tuple[Any, Any]:
    """Return data without a column, and the column; None where there are no data."""
    if data is None:
        return None, None
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Mapping) or hasattr(data, "columns"):
        found = _taken_out(data, column)
    elif isinstance(data, tuple) and len(data) == 2:
        found = _taken_out(data[0], column)
        found = None if found is None else ((found[0], data[1]), found[1])
    elif hasattr(data, "__getitem__") and not len(data):
        found = data, []
    elif hasattr(data, "__getitem__") and _in_row(_row(data, 0, where), column):
        found = WithoutColumn(data, column), _column_of_rows(data, column, where)
    else:
        found = None
    if found is not None:
        return found
    if not needed:
        return data, None
    raise RefusedDataError(
        where,
        f": unit = {column!r}, but there is no such column; give a dict of columns, a table, or "
        "rows that are dicts with this name, or unit=[identifiers of every node]",
    )


def _taken_out(columns: Any, name: str) -> tuple[Any, Any] | None:
    """Return a dict or table without one of its columns, and that column."""
    if isinstance(columns, Mapping):
        rest = {key: value for key, value in columns.items() if key != name}
        return (rest, columns[name]) if name in columns else None
    if hasattr(columns, "columns") and name in columns.columns:
        return columns[[key for key in columns.columns if key != name]], columns[name]
    return None


def _in_row(row: Any, name: str) -> bool:
    return isinstance(_fields(row), Mapping) and name in _fields(row)


def _fields(row: Any) -> Any:
    """Return the dict of a row's inputs."""
    return row[0] if isinstance(row, tuple | list) and len(row) == 2 else row


def _row(data: Any, index: int, where: str) -> Any:
    try:
        return data[index]
    except Exception as error:
        raise RefusedDataError(
            f"{where}, example {index}", f": cannot be read ({type(error).__name__}: {error})"
        ) from error


def _column_of_rows(data: Any, name: str, where: str) -> list[Any]:
    """Return a field of every row."""
    refuse_kept_views(lambda index: _row(data, index, where), len(data), where)
    found: list[Any] = []
    for index in range(len(data)):
        row = _row(data, index, where)
        if not _in_row(row, name):
            raise RefusedDataError(
                f"{where}, example {index}",
                f": has no field {name!r}, which says whose it is; give every row one",
            )
        found.append(_fields(row)[name])
    return found


class WithoutColumn(Dataset[Any]):
    """A map-style dataset whose rows lack one field."""

    def __init__(self, data: Any, column: str) -> None:
        self._data, self._column = data, column

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        """Return a row without the field."""
        row = self._data[index]
        rest = {key: value for key, value in _fields(row).items() if key != self._column}
        return rest if isinstance(row, Mapping) else (rest, *row[1:])
