"""Fixed vectors for every test: statistical laws are checked on the same draws each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dpcsgp.randomness import torch_seed


@pytest.fixture(autouse=True)
def fixed_vectors() -> Iterator[None]:
    with torch_seed(0, "compression tests"):
        yield
