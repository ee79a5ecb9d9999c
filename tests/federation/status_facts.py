"""The facts of a real party that has opened its network, for tests of what shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from running import make_federation, request_of

from dpcsgp.federation.party_run import open_network, prepare_party, results_folder
from dpcsgp.federation.party_status import StatusKeeper


@contextmanager
def kept_status(root: Path, num_parties: int = 3) -> Iterator[StatusKeeper]:
    """Open the network of the first of some parties, and keep its status."""
    roster = make_federation(root, num_parties)
    prepared = prepare_party(request_of(root, 0))
    results = results_folder(prepared.request).path
    with closing(open_network(prepared, results)) as network:
        yield StatusKeeper(root / "status.json", roster, network, 0, prepared.rounds)


def training_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts as they are in the middle of a run."""
    return {
        **facts,
        "phase": "training",
        "round": 4,
        "step": 4,
        "metric": "accuracy",
        "score": 0.5,
        "curve": [(0, 0.1), (2, 0.4), (4, 0.5)],
        "log": ["2026-01-01 00:00:00 saved step 4"],
    }
