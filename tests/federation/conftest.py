"""A party that is open to attacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parties import federation, open_network
from raw_caller import RING, SIZE, Scene, pushed


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Bert, and after the test the proof that he still takes what is right."""
    selves, peers = federation(4)
    bert = open_network(selves[1], peers, RING, tmp_path, SIZE)
    scene = Scene(bert, peers[1], selves)
    yield scene
    before = scene.received()
    with scene.anna() as caller:
        assert pushed(caller.greet(), 1, SIZE).rounds == before + 1
    bert.close()
