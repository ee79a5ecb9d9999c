"""Parties that share noise: it cancels between them, and no stream ever meets two sums."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from running import DIGITS, check_twin, make_federation, running

SHARED = DIGITS + "\n[privacy]\nmax_colluders = 1\n"


def test_seeded_parties_share_the_noise_of_the_simulator(tmp_path: Path) -> None:
    """A ring of four: opposite parties have no edge, and agree all the same."""
    roster = make_federation(tmp_path, 4, SHARED)
    with running(tmp_path, 4) as parties:
        parties.start()
        parties.wait()
    check_twin(tmp_path, roster)
