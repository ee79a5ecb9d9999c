"""Models in a results folder, and whose they are.

A folder of a machine that shares no disk with the others holds the models of its own nodes only.
`nodes` in the file numbers them; folders of earlier releases have no such list, and there the
ledgers, one per hosted node, tell.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from dpcsgp.config import Config
from dpcsgp.errors import DataError


def stored_model(folder: Path, config: Config, node: int | None) -> Tensor:
    """Return the flat parameters of one node (None: of the average model).

    Raises:
        DataError: if the folder does not hold this model, with those that it holds.
    """
    path = folder / "model.safetensors"
    if not path.exists():
        raise DataError(
            f"{path} is missing: the run has not ended yet; continue it with resume=True"
        )
    tensors = load_file(path)
    if node is None and "average_model" in tensors:
        return tensors["average_model"]
    nodes = _nodes(folder, config, tensors)
    listed = ", ".join(map(str, nodes))
    if node is None:
        raise DataError(
            f"{path} holds the models of some nodes only (of {config.num_nodes}), so no average; "
            f"give node=k with one of {listed}"
        )
    if node not in nodes:
        raise DataError(f"node = {node}: {path} holds the models of these nodes: {listed}")
    return tensors["node_models"][nodes.index(node)]


def _nodes(folder: Path, config: Config, tensors: dict[str, Tensor]) -> list[int]:
    """Return the number of the node that each model belongs to."""
    count = len(tensors["node_models"])
    if "nodes" in tensors:
        return tensors["nodes"].tolist()
    if count == config.num_nodes:
        return list(range(count))
    ledgers = (folder / "ledger").glob("node-*.jsonl")
    nodes = sorted(int(file.stem.removeprefix("node-")) for file in ledgers)
    if len(nodes) != count:
        raise DataError(
            f"{folder} holds {count} models and the ledgers of {len(nodes)} nodes, so whose models "
            "they are is not known; take the folder as the run left it"
        )
    return nodes
