"""Real processes with a key file, while a writer without the key attacks their store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from real_processes import TINY, all_end, processes, settings, wait_for

from dpcsgp.network.torch_distributed import ProcessEnvironment
from ports import free_port

pytestmark = pytest.mark.slow

TIMEOUT = 10.0
FALSE_NEWS = {
    "cause of failure": '1 - ["node 1 (rank 1) is to blame", 1]',
    "stop asked": "1 - true",
    "stop at": "soon",
    "progress/0": "junk",
    "beat/1": '1 - [5, 0, ""]',
}
FALSE_VALUES = {"agree/run id/0": '0 - "evil"'}


@contextmanager
def attacker(port: int, values: dict[str, str]) -> Iterator[None]:
    """Write to the store from its first moment to its last."""
    stopped = threading.Event()

    def loop() -> None:
        store = ProcessEnvironment(0, 3, "127.0.0.1", port).open_store(60)
        with suppress(RuntimeError):  # the store ends with the run
            while not stopped.wait(0.001):
                for key, value in values.items():
                    store.set(key, value)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def run(folder: Path, steps: int, values: dict[str, str]) -> list[tuple[int | None, str]]:
    """Run three processes under attack; return exit codes and what they said."""
    folder.mkdir()
    key_file, port = folder / "key", free_port()
    key_file.write_bytes(os.urandom(32))
    given = [
        *TINY,
        f"algorithm.steps={steps}",
        f"network.timeout_seconds={TIMEOUT}",
        f"network.key_file={key_file}",
    ]
    words = ["run", *settings(*given), "--out", str(folder / "out")]
    with processes([words] * 3, folder, port=port) as children, attacker(port, values):
        wait_for(lambda: any(child.code is not None for child in children), 120)
        all_end(children, 3 * TIMEOUT)
        return [(child.code, child.said()) for child in children]


def test_false_causes_stops_and_heartbeats_change_nothing(tmp_path: Path) -> None:
    for name, values in (("alone", {}), ("attacked", FALSE_NEWS)):
        ends = run(tmp_path / name, 100, values)
        assert [code for code, _ in ends] == [0] * 3, ends
    alone, attacked = (
        load_file(tmp_path / name / "out" / "model.safetensors") for name in ("alone", "attacked")
    )
    assert all(torch.equal(alone[name], attacked[name]) for name in alone)


def test_a_launcher_with_a_key_shows_progress(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(os.urandom(32))
    given = [*TINY, "algorithm.steps=40", f"network.key_file={tmp_path / 'key'}"]
    words = ["launch", *settings(*given), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "dpcsgp", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 40/40" in done.stdout


def test_false_values_stop_the_run_at_most_and_are_named(tmp_path: Path) -> None:
    ends = run(tmp_path / "attacked", 50, FALSE_VALUES)
    if any(code for code, _ in ends):
        assert all(code for code, _ in ends)
        assert all("'agree/run id/0'" in said and "Traceback" not in said for _, said in ends), ends
    out = tmp_path / "attacked" / "out"
    assert not [path for path in out.rglob("*.json*") if "evil" in path.read_text()]
