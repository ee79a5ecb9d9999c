"""Parties behind an HTTP proxy: calls go through its CONNECT, and it sees no more than TLS."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parties import ROSTER, federation, open_network
from raw_caller import RING, SIZE

from dpcsgp.federation.peers import Peer, Self


class ConnectProxy:
    """A proxy that lets CONNECT through, and keeps what it sees."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self.seen = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            head = caller.recv(4096)
            self.asked.append(head.split(b"\r\n")[0])
            host, _, port = head.split(b" ")[1].decode().rpartition(":")
            try:
                called = socket.create_connection((host, int(port)))
            except OSError:
                caller.close()  # nobody listens there
                continue
            caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            for ends in ((caller, called), (called, caller)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                self.seen += piece
                sink.sendall(piece)
        except OSError:
            pass
        finally:
            sink.close()


CALL = """
import pickle, sys
from dpcsgp.federation.transport import check_peer
check_peer(*pickle.load(sys.stdin.buffer))
"""


def call(own: Self, peer: Peer, **variables: str) -> None:
    """Call a peer from a process of its own that has these variables from its start.

    gRPC's threads read the environment: to change it under them could end this process.
    """
    environment = os.environ | {"no_proxy": ""} | variables
    given = pickle.dumps((own, peer, ROSTER))
    words = [sys.executable, "-c", CALL]
    done = subprocess.run(words, input=given, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
def proxy() -> Iterator[ConnectProxy]:
    proxy = ConnectProxy()
    yield proxy
    proxy.listener.close()


def test_calls_go_through_a_proxy_that_sees_tls_only(tmp_path: Path, proxy: ConnectProxy) -> None:
    selves, peers = federation(4)
    bert = open_network(selves[1], peers, RING, tmp_path, SIZE)
    try:
        # gRPC takes the first of grpc_proxy, https_proxy and http_proxy that is set.
        call(selves[0], peers[1], grpc_proxy=proxy.address, no_grpc_proxy="")
        assert proxy.asked[0].startswith(f"CONNECT {peers[1].address} ".encode())
        # The name in the first message of TLS is the same for all parties.
        assert len(proxy.seen) > 1000 and b"party.invalid" in proxy.seen
        assert not any(name in proxy.seen for name in (b"dpcsgp", b"anna", b"bert"))
        asked = len(proxy.asked)
        call(selves[0], peers[1], grpc_proxy=proxy.address, no_grpc_proxy="127.0.0.1")
        assert len(proxy.asked) == asked  # excepted
    finally:
        bert.close()
