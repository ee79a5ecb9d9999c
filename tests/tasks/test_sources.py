"""Sources deliver files or say why they cannot, quickly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.tasks.downloads import sources
from dpcsgp.tasks.downloads.sources import Folder, Mirror, SourceError, no_progress, run_command


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=tmp_path))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_mirror_downloads_and_reports_progress(server: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000
    (tmp_path / "a.gz").write_bytes(content)
    seen: list[tuple[int, int | None]] = []
    files = Mirror(server, ("a.gz",)).files(lambda what, done, total: seen.append((done, total)))
    assert files == {"a.gz": content}
    assert seen[0] == (0, None)
    assert seen[-1] == (len(content), len(content))


def test_a_file_that_is_too_large_is_refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST_FILE", 1000)
    (tmp_path / "fits").write_bytes(bytes(1000))
    (tmp_path / "large").write_bytes(bytes(1001))
    assert Mirror(server, ("fits",)).files(no_progress) == {"fits": bytes(1000)}
    with pytest.raises(SourceError, match="large is larger than 1000 bytes"):
        Mirror(server, ("large",)).files(no_progress)


def test_mirror_without_the_file(server: str) -> None:
    with pytest.raises(SourceError, match="HTTP Error 404"):
        Mirror(server, ("missing.gz",)).files(no_progress)


def test_mirror_that_nobody_serves() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        with pytest.raises(SourceError, match="refused"):
            Mirror(f"http://127.0.0.1:{unused.getsockname()[1]}", ("a",)).files(no_progress)


def test_silent_mirror_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(SourceError, match=r"no answer|timed out"):
            Mirror(f"http://127.0.0.1:{silent.getsockname()[1]}", ("a",), answer_seconds=0.3).files(
                no_progress
            )
        assert time.monotonic() - start < 5


def test_cut_off_download_is_noticed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(SourceError, match="9 of 100 bytes"):
            Mirror(f"http://127.0.0.1:{listener.getsockname()[1]}", ("a",)).files(no_progress)


def test_folder_reads_plain_and_gz_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b.gz").write_bytes(b"2")
    assert Folder(tmp_path, ("a", "b")).files(no_progress) == {"a": b"1", "b.gz": b"2"}
    with pytest.raises(SourceError, match="no c"):
        Folder(tmp_path, ("a", "c")).files(no_progress)


def test_commands_that_cannot_run_give_their_reason() -> None:
    with pytest.raises(SourceError, match="not installed"):
        run_command(["no-such-program-anywhere"])
    with pytest.raises(SourceError, match="last words"):
        run_command(["sh", "-c", "echo first >&2; echo last words >&2; exit 3"])
    assert run_command(["sh", "-c", "echo good"]) == b"good\n"
