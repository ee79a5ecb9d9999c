"""Are private rows given twice: as test data, or to two nodes of this process?

Rows are compared by 64-bit digests under a key that dies with this process. What is found is said
on the machine that holds the rows, before anything is released; it is written nowhere, sent to
nobody, and changes nothing.

Rows may be alike by chance: a table of a few yes-or-no columns has few different rows. So a row
counts as found only where it occurs once on either side. Of the n rows looked through let N2 be the
values that occur exactly twice; a further row of the same kind equals one that occurs once with a
probability of about 2 N2 / n (Good and Turing), and finds must be far more frequent than that.

Legend: J rows, B bytes, W words of four bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpcsgp.runs.telling import tell
from dpcsgp.tasks.examples import NodeExamples, StackedExamples

MOST_ROWS: Final = 200_000  # of a node, or of the test data
MOST_BYTES: Final = 2**28  # of all rows together: some tenths of a second
_BYTES_AT_A_TIME: Final = 2**22
_SHARE: Final = 0.5  # of the rows, before it is said
_MOST_COMPARED: Final = 32  # nodes whose rows are looked for at others
_TEST: Final = -1  # no node has this number
_KEY: Final = int.from_bytes(os.urandom(8), "little")

Digests = NDArray[np.uint64]


@final
@dataclass(frozen=True)
class _Known:
    """Rows to look through: digests that occur once, and how likely a find by chance is."""

    once: Digests  # sorted
    chance: float

    @classmethod
    def of(cls, digests_J: Digests) -> _Known:
        values, counts = np.unique(digests_J, return_counts=True)
        twice = int((counts == 2).sum())
        # One more on either side: a few rows that all differ prove little.
        return cls(values[counts == 1], min((2 * twice + 1) / (len(digests_J) + 1), 1.0))

    def holds_most(self, rows: int, found: int) -> bool:
        """Tell whether at least half of so many rows are found, far more than by chance."""
        expected = rows * self.chance
        return found >= _SHARE * rows and found > expected + 3 * math.sqrt(expected)


def warn_about_rows_given_twice(
    parts: Mapping[int, NodeExamples],
    test: StackedExamples | None,
    same: Mapping[int, int] | None = None,
) -> None:
    """Warn where private rows are test data, or rows of two nodes of this process.

    Args:
        parts: node -> its examples; those in memory are looked at.
        test: public test data; None: there are none, or they are known to be a node's.
        same: node -> the first node that was given the same object; of these it was said before.
    """
    digests = _digests({**parts, _TEST: test} if test else parts)
    tested_J = digests.pop(_TEST, None)
    if tested_J is not None and digests:
        _warn_about_test_rows(digests, tested_J)
    objects = dict(same or {})
    pairs = [
        (one, other)
        for one, other in _shared_pairs(digests)
        if objects.get(one, one) != objects.get(other, other)
    ]
    if pairs:
        (one, other), others = pairs[0], len(pairs) - 1
        more = f" (and {others} more such pairs of nodes)" if others else ""
        tell(
            f"nodes {one} and {other}: at least half of the rows of one are rows of the other, too"
            f"{more}. Both release them, so the eps of both adds up for the people in them; give "
            "every node rows of its own, or give both half the eps"
        )


def _warn_about_test_rows(digests: Mapping[int, Digests], tested_J: Digests) -> None:
    # All nodes as one, for test data taken from everybody; each alone, where nodes share rows.
    groups = [np.concatenate(list(digests.values())), *digests.values()]
    once = _Known.of(tested_J).once
    for known in map(_Known.of, groups):
        if known.holds_most(len(tested_J), int(np.isin(once, known.once).sum())):
            break
    else:
        return
    tell(
        "test_data: at least half of the rows are private rows of node_data, too. What is measured "
        "on them is published and not private, and it says nothing about new examples; test on "
        "public rows that no node trains on"
    )


def _shared_pairs(digests: Mapping[int, Digests]) -> list[tuple[int, int]]:
    """Return pairs of nodes of which one holds most rows of the other."""
    known = {node: _Known.of(rows_J) for node, rows_J in digests.items()}
    if len(known) < 2:
        return []
    # Once-only digests of all nodes, sorted, with whose they are.
    values = np.concatenate([rows.once for rows in known.values()])
    owners = np.repeat(list(known), [len(rows.once) for rows in known.values()])
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    same = values[1:] == values[:-1]
    if not same.any():
        return []
    shared = np.unique(values[1:][same])
    pairs: set[tuple[int, int]] = set()
    candidates = [node for node in known if np.isin(digests[node], shared).mean() >= _SHARE]
    for node in candidates[:_MOST_COMPARED]:
        rows_J = digests[node]
        holders, found = np.unique(owners[np.isin(values, known[node].once)], return_counts=True)
        for holder, count in zip(holders.tolist(), found.tolist(), strict=True):
            smaller = len(rows_J) <= len(digests[holder])
            if holder != node and smaller and known[holder].holds_most(len(rows_J), count):
                pairs.add((min(node, holder), max(node, holder)))
    return sorted(pairs)


def _digests(parts: Mapping[int, NodeExamples]) -> dict[int, Digests]:
    """Return digests of the rows in memory, of at most `MOST_BYTES` altogether."""
    stacked = {node: part for node, part in parts.items() if isinstance(part, StackedExamples)}
    room = MOST_BYTES // max(len(stacked), 1)
    return {node: _digests_of(part, room) for node, part in stacked.items() if len(part)}


def _digests_of(part: StackedExamples, room: int) -> Digests:
    columns = (part.inputs, part.targets)
    width = sum(values[:1].numel() * values.element_size() for values in columns)
    rows = min(len(part), MOST_ROWS, max(room // max(width, 1), 1))
    total_J = np.zeros(rows, dtype=np.uint64)
    for salt, values in enumerate(columns):
        total_J += _hashed(values[:rows], salt)
    return total_J


def _hashed(values: Tensor, salt: int) -> Digests:
    """Return sum_w key_w x_w mod 2^64 of every row, x_w its words of four bytes (or its bytes)."""
    if not values[:1].numel():
        return np.zeros(len(values), dtype=np.uint64)
    width = values[:1].numel() * values.element_size()
    at_a_time, parts = max(1, _BYTES_AT_A_TIME // width), []
    for some in values.detach().cpu().split(at_a_time):
        bytes_JB = some.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(len(some), width)
        words_JW = bytes_JB.view(np.uint32) if width % 4 == 0 else bytes_JB
        parts.append(np.einsum("jw,w->j", words_JW, _keys(words_JW.shape[1], salt)))
    return np.concatenate(parts)


def _keys(count: int, salt: int) -> Digests:
    """Return odd factors of this process, one per word (splitmix64)."""
    with np.errstate(over="ignore"):
        place = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt << 40)
        mixed = np.uint64(_KEY) + place * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
