"""The page of real runs: live facts, and a run that does not notice who looks."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import Command, commands, until
from running import DIGITS, SEED, check_twin, make_federation, results_of

from dpcsgp.runtime.logs import open_logs

RUN = ("party", "run", "federation.toml", "--seed", str(SEED), "--page", "0", "--folder")


def url_of(command: Command) -> str:
    until(lambda: "status page: http" in command.text)
    return command.text.split("status page: ")[1].split()[0]


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def waiting_for(url: str) -> list[str]:
    """Return who is waited for; nobody before the run has begun."""
    with suppress(urllib.error.HTTPError):
        return json.loads(read(f"{url}status.json"))["waiting_for"]
    return []


def annoy(url: str, over: threading.Event, seen: list[dict[str, Any]]) -> None:
    """Ask as fast as it answers, leave lines open, send rubbish; keep the facts that came."""
    place = ("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
    idle = []
    while not over.is_set():
        with suppress(OSError):
            seen.append(json.loads(read(f"{url}status.json")))
            read(f"{url}metrics")
            line = socket.create_connection(place, timeout=5)
            line.sendall(b"GET / HTTP/1.1\r\nX: " + 20_000 * b"y")
            idle.append(line)
            if len(idle) > 50:
                idle.pop(0).close()
        over.wait(0.01)
    for line in idle:
        line.close()


@pytest.mark.slow
def test_whoever_looks_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    roster = make_federation(tmp_path, 2, DIGITS.replace("steps = 12", "steps = 40"))
    over, seen = threading.Event(), []
    with commands(tmp_path) as start:
        both = [start(*RUN, "lab-0")]
        url = url_of(both[0])
        until(lambda: waiting_for(url) == ["lab-1"])
        watch = start("party", "status", "--folder", "lab-0", "--watch")
        both.append(start(*RUN, "lab-1"))
        crowd = [threading.Thread(target=annoy, args=(url, over, seen)) for _ in range(4)]
        for each in crowd:
            each.start()
        for command in both:
            command.ends(0)
        over.set()
        for each in crowd:
            each.join()
        assert "lab-1" in watch.ends(0) and "ended" in watch.text
    check_twin(tmp_path, roster)
    rounds = [facts["round"] for facts in seen if "round" in facts]
    assert len(set(rounds)) > 1 and max(rounds) <= 42
    assert any(facts["waiting_for"] == ["lab-1"] for facts in seen)
    # In the end the status file has the last evaluation, as the summary does.
    folder = results_of(tmp_path, 0)
    status, summary = (
        json.loads((folder / name).read_bytes()) for name in ("status.json", "summary.json")
    )
    assert status["score"] == summary["accuracy_node_mean"] and status["phase"] == "ended"
    assert status["releases"] == 40 and len(status["curve"]) > 5


def test_a_log_file_of_a_party_is_bounded(tmp_path: Path) -> None:
    package, path = logging.getLogger("dpcsgp"), tmp_path / "logs" / "party.log"
    level, handlers = package.level, list(package.handlers)
    try:
        open_logs(False, path, most_bytes=10_000)
        for step in range(2000):
            logging.getLogger("dpcsgp.test").info("saved step %d", step)
    finally:
        for handler in set(package.handlers) - set(handlers):
            package.removeHandler(handler)
            handler.close()
        package.setLevel(level)
    sizes = [file.stat().st_size for file in path.parent.iterdir()]
    assert len(sizes) == 4 and max(sizes) <= 10_000
    assert path.read_text().rstrip().endswith("saved step 1999")
