"""Parties leave and join while others run: real processes, killed around the switch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from amended import (
    first_version,
    ledger_of,
    new_party,
    next_version,
    party,
    running,
    steps_of,
    summary_of,
)

from dpcsgp.federation.amending import Amendment
from dpcsgp.privacy import composed_epsilon


@pytest.mark.slow
def test_one_leaves_and_another_joins(tmp_path: Path) -> None:
    """Rounds 0 to 3 by a, b, c; 4 to 7 by a, b; 8 to 12 by a, b, d."""
    one = first_version(tmp_path, "abc")
    two = next_version(tmp_path, one, Amendment(4, leave=("c",)))
    new_party(tmp_path, "d")
    three = next_version(tmp_path, two, Amendment(8, join=(party(tmp_path, "d").card,)))
    with running(tmp_path, pause=0.6) as parties:
        # a has the newest version at once; b and c begin with the first.
        parties.start("v1.toml", "a", "b", "c")
        parties.until("c", step=1)
        parties.kill("a", "b", "c")
        parties.start("v2.toml", "a", "b", "c")
        parties.wait("c")
        parties.until("b", version=2)
        parties.kill("b")
        parties.pause = 0.0
        parties.start("v3.toml", "b", "d")
        parties.kill("a")
        parties.start("v3.toml", "a")
        parties.wait("a", "b", "d")
    expected = {"a": list(range(12)), "b": list(range(12)), "c": [0, 1, 2, 3], "d": [8, 9, 10, 11]}
    assert {name: steps_of(tmp_path, name) for name in expected} == expected
    for name in "abd":
        summary, ledger = summary_of(tmp_path, name), ledger_of(tmp_path, name)
        assert summary["handed_over"] and summary["version"] == three.version
        assert summary["rounds"] == 13 and summary["releases"] == [len(expected[name])]
        found = composed_epsilon(ledger.releases(), 1e-3)
        assert summary["epsilon"] == pytest.approx(found) and found <= 4.0
    left = summary_of(tmp_path, "c")
    assert left["stopped_because"].startswith("completed: left after round 4")
    assert [v["version"] for v in summary_of(tmp_path, "a")["versions"]] == [1, 2, 3]
