"""What many ledgers add up to: copies count once, forks are added, older copies can be refused.

A line's checksum covers all lines before it, so two ledgers with the same checksum at some line are
equal up to there. What several copies of a ledger hold together is then the set of their lines.

fork    what a copy of a ledger holds that was continued beside the ledger itself
head    the checksum after `count` releases: whoever wrote it down elsewhere can tell later that a
        ledger was taken back to an older state
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.ledger_format import (
    Fork,
    LedgerContents,
    LedgerHeader,
    ledger_files,
    read_ledger,
    replaces_torn,
)

_HEAD_WORD: Final = re.compile(r"(\d{1,9}):(\d{1,12}):([0-9a-f]{32})")

Paths = Path | str | Iterable[Path | str]


@dataclass(frozen=True)
class LedgerHead:
    """Where a node's ledger stood; written down elsewhere, it tells later if a ledger went back.

    Args:
        node: number of the node.
        count: number of whole records.
        head: checksum of the last of them, 32 hex digits; it covers all lines before.
        run_id: public name of the run, if known.
    """

    node: int
    count: int
    head: str
    run_id: str = ""

    def __str__(self) -> str:
        return f"{self.node}:{self.count}:{self.head}"

    @classmethod
    def parse(cls, word: str) -> LedgerHead:
        """Read NODE:COUNT:HEAD, as `str` writes it.

        Raises:
            ConfigError: for anything else.

        >>> LedgerHead.parse("3:12:" + "0f" * 16).count
        12
        """
        match = _HEAD_WORD.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"--expect-head = {word!r}: expected NODE:COUNT:HEAD with 32 hex digits, or a "
                "file; `dpcsgp ledger head FOLDER` prints them"
            )
        return cls(int(match[1]), int(match[2]), match[3])


def read_ledgers(paths: Paths, heads: Iterable[LedgerHead] = ()) -> list[LedgerContents]:
    """Read and verify ledgers without changing them.

    Copies of one ledger count once. A fork (a copy that was continued on its own) is added and
    named in `forks`.

    Args:
        paths: one or several ledger files, `ledger` folders or results folders.
        heads: where some of these ledgers are known to have stood.

    Returns:
        One entry per ledger, with its header, its releases with their counts, and its forks.

    Raises:
        LedgerError: for a ledger that was damaged or edited, or does not contain an expected head.
        ConfigError: for a path that does not exist or holds no ledger.
    """
    found = _read_all(paths)
    _refuse_older(found, heads)
    groups: dict[tuple[str, int, bytes], list[LedgerContents]] = {}
    for ledger in found:  # without a common header there is no common line: they add up as runs do
        key = ledger.header.run_id, ledger.header.node, bytes(ledger.digests[:16])
        groups.setdefault(key, []).append(ledger)
    return [_joined(group) for group in groups.values()]


def ledger_heads(folder: Path | str) -> list[LedgerHead]:
    """Return where the ledgers of a folder stand now, for a later `check_heads`.

    Args:
        folder: a results folder, its `ledger` folder, or one ledger file.

    Returns:
        One head per ledger, in the order of the files.

    Raises:
        LedgerError: for a ledger that was damaged or edited.
        ConfigError: for a path that does not exist or holds no ledger.
    """
    return [
        LedgerHead(ledger.header.node, len(ledger.events), ledger.head, ledger.header.run_id)
        for ledger in _read_all(folder)
    ]


def check_heads(folder: Path | str, heads: Iterable[LedgerHead]) -> None:
    """Refuse a folder whose ledgers do not contain these heads.

    Args:
        folder: a results folder, its `ledger` folder, or one ledger file.
        heads: what `ledger_heads` returned earlier.

    Raises:
        LedgerError: for an older, edited or foreign ledger.
        ConfigError: for a path that does not exist or holds no ledger.
    """
    _refuse_older(_read_all(folder), heads)


def _read_all(paths: Paths) -> list[LedgerContents]:
    given = [paths] if isinstance(paths, Path | str) else list(paths)
    return [read_ledger(file) for path in given for file in ledger_files(Path(path))]


def _refuse_older(ledgers: Sequence[LedgerContents], heads: Iterable[LedgerHead]) -> None:
    for head in heads:
        # One copy that goes through the head is enough: older copies beside it do no harm.
        own = [ledger for ledger in ledgers if ledger.header.node == head.node]
        if any(ledger.continues(head.head, head.count) for ledger in own):
            continue
        found = "; ".join(f"{ledger.path} has {len(ledger.events)} releases" for ledger in own)
        raise LedgerError(
            f"node {head.node}: no ledger here contains the expected head ({head.count} releases, "
            f"{head.head[:8]}...; {found or 'there is no ledger of this node'}): it is an older "
            "copy, was edited or belongs to another run. Restore the newest copy"
        )


def _joined(copies: Sequence[LedgerContents]) -> LedgerContents:
    """Return the longest of several copies, with what the others have of their own added."""
    # The longest stands for all; of equal ones, the one with a torn line more.
    ordered = sorted(copies, key=lambda copy: (len(copy.events), copy.count), reverse=True)
    longest, *others = ordered
    counts, forks = Counter(longest.counts), list[Fork]()
    # Each copy adds what no longer copy has: the lines behind the last one they share.
    for place, copy in enumerate(others, start=1):
        known = ordered[:place]
        common = max(_releases_in_common(copy, other) for other in known)
        own = copy.events[common:]
        if copy.torn_event is not None and not any(_knows_torn(other, copy) for other in known):
            own.append(copy.torn_event)
        if own:
            counts.update(own)
            forks.append(Fork(copy.path, common, len(own)))
    return replace(longest, counts=counts, forks=tuple(forks))


def _releases_in_common(first: LedgerContents, second: LedgerContents) -> int:
    """Return how many releases two ledgers share, by bisection: equal once, equal before."""
    # Checksums cover all lines before, so they agree up to one place and never again.
    equal, different = 0, min(len(first.events), len(second.events)) + 1
    while different - equal > 1:
        middle = (equal + different) // 2
        if second.continues(first.digests[16 * middle : 16 * middle + 16].hex(), middle):
            equal = middle
        else:
            different = middle
    return equal


def _knows_torn(ledger: LedgerContents, torn: LedgerContents) -> bool:
    """Say whether a ledger has the torn last line of another: whole, repaired or torn as well."""
    count = len(torn.events)
    if _releases_in_common(ledger, torn) < count:
        return False
    # The other went on: its next line is the torn one in full, or was written in its place.
    if len(ledger.events) > count:
        line = ledger.path.read_bytes().split(b"\n", count + 2)[count + 1] + b"\n"
        return replaces_torn(line, torn.torn)
    # Both end here: one fragment is the beginning of the other.
    shorter, longer = sorted((ledger.torn, torn.torn), key=len)
    return shorter != b"" and longer.startswith(shorter)


def releases_by_node(
    ledgers: Iterable[LedgerContents],
) -> dict[int, list[tuple[ReleaseEvent, int]]]:
    """Return the releases of all ledgers of each node together: runs on the same data add up.

    Args:
        ledgers: what `read_ledgers` returned.

    Returns:
        Node -> events with their counts, for `composed_epsilon`; nodes in ascending order.
    """
    by_node: dict[int, list[tuple[ReleaseEvent, int]]] = {}
    for ledger in ledgers:
        by_node.setdefault(ledger.header.node, []).extend(ledger.releases())
    return dict(sorted(by_node.items()))


def common_delta(delta: float | None, headers: Iterable[LedgerHeader]) -> float:
    """Return the given delta, or the one that all headers name."""
    # Eps of different deltas cannot be put side by side.
    found = {header.delta for header in headers} if delta is None else {delta}
    value = found.pop() if len(found) == 1 else None
    if value is None:
        raise ConfigError(
            "delta: the ledgers do not name one common value; give --delta, such as 1e-4"
        )
    return value
