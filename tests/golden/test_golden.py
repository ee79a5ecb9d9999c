"""What seeded runs compute is pinned: a change of rooms, names or order of code may not change one
bit of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DIGESTS = HERE / "digests.json"
sys.path.insert(0, str(HERE))


def digests(folder: Path) -> dict[str, Any]:
    """Return the digests of all runs, made in a process with portable arithmetic."""
    from record import PORTABLE

    done = subprocess.run(
        [sys.executable, str(HERE / "record.py"), str(folder)],
        env={**os.environ, **PORTABLE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return digests(tmp_path_factory.mktemp("golden"))


@pytest.fixture
def pinned(found: dict[str, Any]) -> dict[str, Any]:
    wanted = json.loads(DIGESTS.read_text())
    if found["processor"] != wanted["processor"]:
        pytest.skip(
            f"plain torch rounds otherwise on this {platform.machine()} processor than where "
            "digests were pinned"
        )
    return wanted


NAMES = [
    name
    for name in json.loads(DIGESTS.read_text() if DIGESTS.exists() else "{}")
    if name != "processor"
]


@pytest.mark.parametrize("name", NAMES)
def test_a_seeded_run_repeats_bit_for_bit(
    name: str, found: dict[str, Any], pinned: dict[str, Any]
) -> None:
    assert found[name] == pinned[name]


def test_a_resumed_run_sends_and_learns_the_same(found: dict[str, Any]) -> None:
    for kind in ("frames", "model", "rows"):
        assert found["resumed"][kind] == found["rotated, one bit"][kind]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        DIGESTS.write_text(json.dumps(digests(Path(scratch)), indent=2) + "\n")
