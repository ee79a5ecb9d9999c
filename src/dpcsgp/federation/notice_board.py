"""The notice board of a party: everybody's notices, on disk, bounded, and passed on in order.

Of each party those notices are kept that some step may need: a newer start that counts from no
later step on makes an older one useless. What a hostile party can do here is spoil the noise that
it shares itself; whatever it sends, it takes a bounded place and a bounded share of time.

A notice is on disk before any frame that came after it is taken, so a party that starts again knows
what it knew.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Final, final

from cryptography.hazmat.primitives.asymmetric import ec

from dpcsgp.errors import JournalError, RestoredBackupError, WireError
from dpcsgp.federation.notices import Notice, check_notice, read_notice, signed_notice
from dpcsgp.federation.roster import Roster
from dpcsgp.privacy.pair_keys import PublicHalf
from dpcsgp.records.files import write_atomically

MOST_KEPT: Final = 32  # notices of one party; an honest one needs as many as it starts within a lag
_SECONDS: Final = 1.0  # between new notices of one party, beyond `MOST_KEPT` that may come at once
_LOG = logging.getLogger(__name__)


@final
class NoticeBoard:
    """Everybody's notices as one party knows them; any thread may call.

    Args:
        path: the file; it is made with the first notice.
        roster: what all agreed on.
        node: this party's node.

    Raises:
        JournalError: the file is damaged.
    """

    def __init__(self, path: Path, roster: Roster, node: int) -> None:
        self._path, self._roster, self._node = path, roster, node
        self._lock = threading.RLock()
        self._kept: dict[int, list[Notice]] = {}  # by node, the newest start last
        self._place: dict[Notice, int] = {}  # in which order they came
        self._count = 0
        self._due: dict[int, float] = {}  # until when each party's notices have used up their time
        self._named: set[int] = set()  # parties whose contradictions were logged
        for notice in _read(path, roster):
            self._keep(notice, write=False)

    def announce(
        self, key: ec.EllipticCurvePrivateKey, half: PublicHalf, valid_from: int, seeded: bool
    ) -> Notice:
        """Write the notice of this start; it may be passed on when this returns.

        Args:
            key: the party's own, for the signature.
            half: fresh public key and nonce.
            valid_from: first step in which others can know it; not used by a first start.
            seeded: whether the secrets come from a seed; then every start is the first.

        Raises:
            JournalError: the disk does not take it.
        """
        with self._lock:
            mine = self._kept.get(self._node, [])
            start = 1 if seeded or not mine else mine[-1].start + 1
            if mine and mine[-1].says()[1:] == (start, 0, half, seeded):
                return mine[-1]
            first = 0 if start == 1 else valid_from
            notice = signed_notice(key, self._roster, self._node, start, first, half, seeded)
            self._keep(notice)
            return notice

    def accept(self, body: bytes) -> Notice | None:
        """Take what a neighbour passed on; return it if it is news.

        Raises:
            WireError: it is no notice, of another roster, or not signed by whom it names.
            RestoredBackupError: it is of this party, and of a start that this folder does not know.
            JournalError: the disk does not take it.
        """
        notice = read_notice(body, self._roster)
        known = self._known(notice)
        if known is not None and known.says() == notice.says():
            return None
        check_notice(notice, self._roster)
        with self._lock:
            if notice.node == self._node:
                self._check_own(notice)
                return None
            known = self._known(notice)  # another line may have brought one meanwhile
            if known is not None and known.says() == notice.says():
                return None
            if known is not None:
                # Whoever passed it on cannot know: the first is kept, and the line stays open.
                self._say_contradiction(notice)
                return None
            return notice if self._in_time(notice.node) and self._keep(notice) else None

    def after(self, place: int) -> tuple[int, list[bytes]]:
        """Return what came after a place of the order, and the place of the last of it."""
        with self._lock:
            news = sorted((at, notice) for notice, at in self._place.items() if at > place)
            return self._count, [notice.text(self._roster) for _, notice in news]

    def valid_at(self, node: int, step: int) -> Notice | None:
        """Return a party's newest notice that counts in a step; None: it has given none."""
        with self._lock:
            known = [it for it in self._kept.get(node, ()) if it.valid_from <= step]
            return known[-1] if known else None

    def _known(self, notice: Notice) -> Notice | None:
        """Return the notice of the same start."""
        with self._lock:
            found = (it for it in self._kept.get(notice.node, ()) if it.start == notice.start)
            return next(found, None)

    def _in_time(self, node: int) -> bool:
        """Count a new notice; False: too many came, and this one is neither kept nor passed on.

        Nobody waits: the line that brought it may be that of an honest neighbour.
        """
        now = time.monotonic()
        due = max(self._due.get(node, -math.inf), now - MOST_KEPT * _SECONDS) + _SECONDS
        if due > now:
            return False
        self._due[node] = due
        return True

    def _keep(self, notice: Notice, write: bool = True) -> bool:
        """Add a notice, on disk first; say whether any step may need it."""
        kept = _needed([*self._kept.get(notice.node, ()), notice])[-MOST_KEPT:]
        if notice not in kept:
            return False
        all_kept = {**self._kept, notice.node: kept}
        if write:
            self._write(all_kept)
        self._count += 1
        self._place = {
            it: self._place.get(it, self._count) for all_ in all_kept.values() for it in all_
        }
        self._kept = all_kept
        return True

    def _check_own(self, notice: Notice) -> None:
        """Refuse to go on if the own signature stands below a start that is unknown here."""
        mine = self._kept.get(self._node, [])
        newest = mine[-1].start if mine else 0
        if notice.start > newest or self._known(notice) is not None:
            raise RestoredBackupError(
                f"others know a start {notice.start} of this party that its folder does not know "
                f"(the newest here is {newest}). The folder is older than what this party has "
                "told, or was used in two places; restore its newest copy, or have the federation "
                "amended"
            )

    def _say_contradiction(self, notice: Notice) -> None:
        if notice.node not in self._named:
            self._named.add(notice.node)
            name = self._roster.parties[notice.node].name
            _LOG.warning(
                "%s told two different keys for its start %d: it runs twice, was restored from a "
                "backup, or lies; the first is kept",
                name,
                notice.start,
            )

    def _write(self, kept: dict[int, list[Notice]]) -> None:
        lines = [it.text(self._roster).decode() for all_ in kept.values() for it in all_]
        try:
            write_atomically(self._path, json.dumps(lines).encode())
        except OSError as error:
            raise JournalError(
                f"{self._path} cannot be written ({error.strerror}); free space"
            ) from error


def _needed(notices: list[Notice]) -> list[Notice]:
    """Return the notices that some step may need: none that a newer one replaces everywhere."""
    ordered = sorted(notices, key=lambda it: it.start)
    return [
        it
        for place, it in enumerate(ordered)
        if all(newer.valid_from > it.valid_from for newer in ordered[place + 1 :])
    ]


def _read(path: Path, roster: Roster) -> list[Notice]:
    if not path.exists():
        return []
    try:
        found = [read_notice(line.encode(), roster) for line in json.loads(path.read_bytes())]
        for notice in found:
            check_notice(notice, roster)
    except (WireError, ValueError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{path} cannot be read ({error}); restore the results folder from a backup"
        ) from error
    return found
