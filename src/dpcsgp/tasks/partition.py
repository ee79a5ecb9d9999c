"""Deal the examples of a data set out to nodes: evenly, by a Dirichlet law, or in sorted shards.

Every example goes to exactly one node, and every node gets at least one. The deal follows from a
public seed: who holds how many examples of which number is public, which pictures they are is not.

Legend: E examples, n nodes.
References: Dirichlet split, Hsu, Qi, Brown (2019), arXiv 1909.06335; shards, McMahan et al. (2017),
arXiv 1602.05629.
"""

from __future__ import annotations

import difflib
import math
from typing import Final

import numpy as np

from dpcsgp.errors import ConfigError
from dpcsgp.randomness import numpy_generator

PARTITION_CHOICES: Final = "'iid', 'dirichlet:0.5', 'shards:2'"


def partition(labels: np.ndarray, num_nodes: int, spec: str, seed: int) -> list[np.ndarray]:
    """Return the sorted example numbers of each node.

    * "iid": shuffled and cut; sizes differ by at most one;
    * "dirichlet:a": the examples of each class are shared in proportions drawn from Dirichlet(a,
      ..., a), so small a means skewed labels and uneven sizes; a node left without any example
      takes one from the largest node;
    * "shards:s": sorted by label, cut into n * s shards of equal size, s random shards per node.

    Args:
        labels: Class of each example, (E,).
        num_nodes: n.
        spec: As in `task.partition`.
        seed: Public; the same seed gives the same deal.

    Raises:
        ConfigError: No such partition, or fewer examples than parts.
    """
    kind, parameter = _parse(spec)
    labels = np.asarray(labels)
    pieces = num_nodes * int(parameter) if kind == "shards" else num_nodes
    if num_nodes < 1:
        raise ConfigError(f"graph.num_nodes = {num_nodes}: expected at least one node")
    if len(labels) < pieces:
        raise ConfigError(
            f"graph.num_nodes = {num_nodes}, task.partition = {spec!r}: {len(labels)} examples "
            f"cannot be cut into {pieces} parts; "
            f"use at most {len(labels) * num_nodes // pieces} nodes"
        )
    random = numpy_generator(seed, "partition")
    if kind == "dirichlet":
        parts = _dirichlet(labels, num_nodes, parameter, random)
    elif kind == "shards":
        parts = _shards(labels, num_nodes, int(parameter), random)
    else:
        parts = np.array_split(random.permutation(len(labels)), num_nodes)
    return [np.sort(part).astype(np.int64) for part in parts]


def _parse(spec: str) -> tuple[str, float]:
    """Return the kind and its parameter (0 for "iid")."""
    kind, colon, text = spec.partition(":")
    if kind == "iid" and not colon:
        return "iid", 0.0
    if kind == "dirichlet":
        concentration = _number(text)
        if not (0 < concentration < math.inf):
            raise ConfigError(
                f"task.partition = {spec!r}: expected a concentration above 0; try 'dirichlet:0.5'"
            )
        return "dirichlet", concentration
    if kind == "shards":
        shards = _number(text)
        if not (shards >= 1 and shards == int(shards)):
            raise ConfigError(
                f"task.partition = {spec!r}: expected a whole number of shards per node; try "
                "'shards:2'"
            )
        return "shards", shards
    near = difflib.get_close_matches(kind, ("iid", "dirichlet", "shards"), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "no such partition;"
    raise ConfigError(f"task.partition = {spec!r}: {hint} choose from {PARTITION_CHOICES}")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _shards(
    labels: np.ndarray, num_nodes: int, per_node: int, random: np.random.Generator
) -> list[np.ndarray]:
    # Sort by label, in random order within a label; cut; deal the shards out at random.
    shuffled = random.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(by_label, num_nodes * per_node)
    deal = random.permutation(num_nodes * per_node).reshape(num_nodes, per_node)
    return [np.concatenate([shards[shard] for shard in row]) for row in deal]


def _dirichlet(
    labels: np.ndarray, num_nodes: int, concentration: float, random: np.random.Generator
) -> list[np.ndarray]:
    owner = np.empty(len(labels), np.int64)
    # Each class is shared out on its own, in proportions of its own.
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(num_nodes, concentration))
        if not np.isfinite(shares).all():  # a tiny concentration underflows: one node gets all
            shares = np.eye(num_nodes)[random.integers(num_nodes)]
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for node, piece in enumerate(np.split(members, cuts)):
            owner[piece] = node
    _fill_empty_nodes(owner, num_nodes)
    return [np.flatnonzero(owner == node) for node in range(num_nodes)]


def _fill_empty_nodes(owner: np.ndarray, num_nodes: int) -> None:
    """Give every node without an example the first example of the node that has most."""
    for node in np.flatnonzero(np.bincount(owner, minlength=num_nodes) == 0):
        largest = np.bincount(owner, minlength=num_nodes).argmax()
        owner[np.flatnonzero(owner == largest)[0]] = node
