"""`dpcsgp federation demo`, as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dpcsgp.federation.demonstration import NAMES, STEPS

# A party that waits for another one, started as the demonstration and the benchmarks do.
STARTER = """
import time
from contextlib import suppress
from pathlib import Path
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.demonstration import found_locally, start_party

found_locally(Path("two"), ("amber", "birch"), promise=Promise(750, 4.0, 1e-4))
print(start_party(Path("two"), "amber").pid, flush=True)
time.sleep(100)
"""


def still_runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # one that nobody has asked for its end


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_party_outlives_who_started_it(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("two/amber/runs/*/status.json")):  # it listens
                assert still_runs(pid) and time.monotonic() < deadline
                time.sleep(0.05)
            starter.send_signal(number)
            starter.wait()
            deadline = time.monotonic() + 10
            while still_runs(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not still_runs(pid)
        finally:
            starter.kill()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_five_parties_end_although_one_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    words = [sys.executable, "-m", "dpcsgp", "federation", "demo", "--out", "demo"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 cedar" in done.stdout and "waiting for cedar: " in done.stdout
    assert time.monotonic() - started < 240  # 90 s on two cores that have nothing else to do
    for name in NAMES:
        (summary,) = (tmp_path / "demo" / name / "runs").glob("*/summary.json")
        found = json.loads(summary.read_bytes())
        assert found["releases"] == [STEPS] and found["private"] and found["handed_over"]
        assert len(found["contributions"]) == len(NAMES)
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "something is there already" in again.stderr
