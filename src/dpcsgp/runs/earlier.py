"""What was done before the settings of a run were changed: steps, and the releases of each node.

Only federations change settings on the way (`dpcsgp federation amend`). Budgets count what was
released before, and steps go on where they stood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from dpcsgp.privacy.events import ReleaseEvent

Releases = tuple[tuple[ReleaseEvent, int], ...]


@final
@dataclass(frozen=True)
class Earlier:
    """What was done under earlier settings.

    Attributes:
        steps: gradient steps, with all their rounds.
        releases: per node each kind of release with its count, oldest first; empty: none at all.
    """

    steps: int = 0
    releases: tuple[Releases, ...] = ()


NOTHING_EARLIER: Final = Earlier()
