"""A local page about a running party: who may look, and a server that cannot disturb the run.

It serves a few fixed files, the public facts of the status file as JSON, and metrics. All of it is
read only and lives in one thread of its own; every connection is bounded in time and size, and so
is the number of answers a second. There is no log-in: the page listens on this machine only unless
its operator says otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final, Self, final

from dpcsgp.errors import ConfigError
from dpcsgp.federation.status_metrics import METRICS_TYPE, metrics_text

Facts = Callable[[], Mapping[str, Any]]

_MOST_CONNECTIONS: Final = 32
_MOST_BYTES: Final = 8192  # of a request, all its headers included
_SECONDS: Final = 5.0  # for a whole connection, however slow the other end
_PAUSE: Final = 0.01  # at most a hundred answers a second, whoever asks
_HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, no frame around it, nothing sent on.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
# Path on the page: file below the package, and its type.
_FILES: Final = {
    "/": ("federation/page/page.html", "text/html; charset=utf-8"),
    "/page.js": ("federation/page/page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("federation/page/page.css", "text/css; charset=utf-8"),
    # The look is that of the report.
    "/report.css": ("report/templates/report.css", "text/css; charset=utf-8"),
    "/icon.svg": ("federation/page/icon.svg", "image/svg+xml"),
}
_FIRST: Final = b'<script type="application/json" id="first">'  # a block of data, never run


@final
@dataclass(frozen=True)
class PageAddress:
    """Where the page listens.

    Attributes:
        host: a name or number of this machine.
        port: 0: any free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, anyone: bool = False) -> PageAddress:
        """Read [HOST:]PORT; an address that others can reach needs `anyone`.

        >>> PageAddress.parse("8080")
        PageAddress(host='127.0.0.1', port=8080)

        Raises:
            ConfigError: it is no address, or one that others can reach.
        """
        host, _, port = text.rpartition(":")
        host = host.strip("[]").lower() or "127.0.0.1"
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise ConfigError(
                f"--page {text}: expected PORT or HOST:PORT such as 8080 or 127.0.0.1:8080; "
                "0 takes a free port"
            )
        address = cls(host, int(port))
        if not (anyone or address.is_local):
            raise ConfigError(
                f"--page {text}: others can reach this address, and the page has no log-in; leave "
                "out the host and use an SSH tunnel, or say --page-anyone as well"
            )
        return address

    @property
    def is_local(self) -> bool:
        """Tell whether this machine alone can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@final
class StatusPage:
    """Serves the page inside of a `with` block; binds its address when it is made.

    Args:
        address: where to listen.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, address: PageAddress) -> None:
        self._socket = _listener(address)
        self._names = {"localhost", address.host}
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self._facts: Facts = dict
        self._open = 0
        self._contents = {path: _content(name) for path, (name, _) in _FILES.items()}
        self._loop, self._serving = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="status page", daemon=True)

    def show(self, facts: Facts) -> None:
        """Say where the facts come from; whatever it returns is shown to whoever asks."""
        self._facts = facts

    def __enter__(self) -> Self:
        self._thread.start()
        self._serving.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        self._turn = asyncio.Lock()
        start = asyncio.start_server(self._answer, sock=self._socket, limit=_MOST_BYTES)
        server = self._loop.run_until_complete(start)
        self._serving.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and hang up; whatever goes wrong ends this connection only."""
        if self._open >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(_SECONDS):
                request = await _read_request(reader)
                async with self._turn:  # one after the other, with a pause
                    await asyncio.sleep(_PAUSE)
                    writer.write(self._response(request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open -= 1
            writer.transport.abort()

    def _response(self, request: bytes | None) -> bytes:
        if request is None:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        try:
            method, target, hosts = _parsed(request)
        except ValueError:
            return _response(HTTPStatus.BAD_REQUEST)
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return _response(HTTPStatus.MISDIRECTED_REQUEST)
        if method != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, extra={"Allow": "GET"})
        return self._page(target.partition("?")[0])

    def _page(self, path: str) -> bytes:
        if path in self._contents:
            content = self._contents[path]
            if path == "/" and (found := self._facts()):
                content = content.replace(_FIRST, _FIRST + _embedded(found), 1)
            return _response(HTTPStatus.OK, content, _FILES[path][1])
        if path == "/status.json":
            found = self._facts()
            if not found:  # the run has not begun
                return _response(HTTPStatus.SERVICE_UNAVAILABLE)
            return _response(HTTPStatus.OK, _as_json(found), "application/json")
        if path == "/metrics":
            return _response(HTTPStatus.OK, metrics_text(self._facts(), time.time()), METRICS_TYPE)
        return _response(HTTPStatus.NOT_FOUND)

    def _is_ours(self, host: str) -> bool:
        """Tell whether a Host header names this machine.

        A name of somebody else's that points here (DNS rebinding) would let a foreign page read
        this one in the operator's browser. Numbers cannot be pointed elsewhere.
        """
        name = host.lower()
        head, colon, port = name.rpartition(":")
        if colon and port.isdigit() and not head.endswith(":"):
            name = head
        name = name.removeprefix("[").removesuffix("]")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


@contextmanager
def opened_page(address: PageAddress | None) -> Iterator[StatusPage | None]:
    """Serve a page inside of a block, if there is to be one."""
    if address is None:
        yield None
        return
    with StatusPage(address) as page:
        yield page


def _listener(address: PageAddress) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(place[:2], family=family, backlog=_MOST_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"--page {address.host}:{address.port}: cannot be listened on ({error.strerror}); "
            "choose another port, or 0 for a free one"
        ) from None


def _as_json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps({**facts, "now": time.time()}).encode()


def _embedded(facts: Mapping[str, Any]) -> bytes:
    """Return facts for a block of data inside of the page: no text of theirs can end the block."""
    return _as_json(facts).replace(b"<", b"\\u003c")


def _content(name: str) -> bytes:
    return files("dpcsgp").joinpath(name).read_bytes()


async def _read_request(reader: asyncio.StreamReader) -> bytes | None:
    """Return the head of a request; None: it is too long."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None


def _parsed(request: bytes) -> tuple[str, str, list[str]]:
    """Return method, target and all Host headers.

    Raises:
        ValueError: this is no request of HTTP 1.
    """
    first, *rest = request.decode("ascii").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers = [line.partition(":") for line in rest]
    return method, target, [value.strip() for name, _, value in headers if name.lower() == "host"]


def _response(
    status: HTTPStatus,
    body: bytes = b"",
    kind: str = "text/plain; charset=utf-8",
    extra: Mapping[str, str] | None = None,
) -> bytes:
    body = body or f"{status.value} {status.phrase}\n".encode()
    headers = {**_HEADERS, **(extra or {}), "Content-Type": kind, "Content-Length": len(body)}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
