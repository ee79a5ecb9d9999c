"""The memory that a plan names is what a run takes, within 30 %."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "make_plan_memory.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_plan_memory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", [*script().CASES, *script().OWN_CASES])
def test_the_predicted_memory_is_right_within_thirty_per_cent(case: str) -> None:
    found = script().in_own_process(case)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.3)
