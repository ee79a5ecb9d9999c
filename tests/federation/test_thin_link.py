"""A thin link passes everything on, late and slowly; curves over it are read rightly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpcsgp.federation.link_trial import DEMO_LINK, LinkCurve, link_title
from dpcsgp.federation.overhead import _proportional_bytes, _timed
from dpcsgp.federation.thin_link import ThinLink
from dpcsgp.report.link_figure import write_link_figure


@pytest.fixture
def echo() -> Iterator[str]:
    """Return the address of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        while content := connection.recv(65536):
            connection.sendall(content)
        connection.close()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def call(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def there_and_back(connection: socket.socket, content: bytes) -> float:
    """Send, read as many bytes back, and return the seconds that it took."""
    began, heard = time.monotonic(), b""
    threading.Thread(target=connection.sendall, args=(content,), daemon=True).start()
    while len(heard) < len(content):
        heard += connection.recv(65536)
    assert heard == content
    return time.monotonic() - began


def test_bytes_come_late_and_not_faster_than_the_link(echo: str) -> None:
    with closing(ThinLink(echo, bits_per_second=1.6e6, delay=0.1)) as link:
        with call(link.address) as connection:
            assert there_and_back(connection, b"x") >= 0.2
            # 200 kB are one second each way; the ways overlap.
            assert there_and_back(connection, bytes(200_000)) >= 1.0 + 0.2
        # All connections share the link.
        with call(link.address) as one, call(link.address) as other:
            noise = threading.Thread(target=there_and_back, args=(other, bytes(100_000)))
            noise.start()
            assert there_and_back(one, bytes(100_000)) >= 0.85
            noise.join()


def test_a_link_to_nobody_closes_the_call_and_one_that_is_closed_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with closing(ThinLink(address, 1e6, 0.0)) as link, call(link.address) as connection:
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        call(link.address)


def test_an_accuracy_is_reached_by_learning_or_never(tmp_path: Path) -> None:
    curve = LinkCurve("rot:1", (0.0, 2.0, 4.0), (0.9, 0.5, 0.8), 1000)
    assert curve.reached(0.7) == 4.0 and curve.reached(0.85) is None
    path = tmp_path / "link.png"
    write_link_figure(path, [curve.as_dict()], *link_title(quick=False))
    assert path.stat().st_size > 1000
    assert link_title(quick=False)[1].endswith("4 Mbit/s, 50 ms")
    assert DEMO_LINK.bits_per_second == 4e6


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_time_and_memory_of_processes_are_read(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "sum(range(3_000_000))"]
    wall, cpu = _timed([lambda: subprocess.Popen(words)] * 2, tmp_path)
    assert wall > 0 and cpu > 0.02
    assert _proportional_bytes(os.getpid()) > 20e6


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", ["federation", "link"])
def test_the_benchmarks_of_parties_run(group: str) -> None:
    from typer.testing import CliRunner

    from dpcsgp.cli.main import cli

    done = CliRunner().invoke(cli, ["benchmark", group, "--quick", "--json"])
    assert done.exit_code == 0, done.output
