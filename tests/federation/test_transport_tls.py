"""TLS 1.3 for every call, seen with another TLS library and HTTP/2 by hand."""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parties import pair
from raw_caller import Scene


def tls_connection(scene: Scene, tmp_path: Path, version: ssl.TLSVersion, ciphers: str) -> Any:
    """Connect as Anna with another TLS library."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
    (tmp_path / "anna.pem").write_bytes(b"".join(pair("anna")))
    context.load_cert_chain(tmp_path / "anna.pem")
    context.set_alpn_protocols(["h2"])
    host, port = (scene.peer.address or "").split(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=5))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_tls_is_never_below_1_2_nor_without_forward_secrecy(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        tls_connection(scene, tmp_path, ssl.TLSVersion.TLSv1_1, "ALL")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        tls_connection(scene, tmp_path, ssl.TLSVersion.TLSv1_2, "kRSA:kECDHe:!kECDHE:PSK")
    with tls_connection(scene, tmp_path, ssl.TLSVersion.TLSv1_2, "ALL") as connection:
        assert connection.cipher()[0].startswith("ECDHE-ECDSA-")
    with tls_connection(scene, tmp_path, ssl.TLSVersion.TLSv1_3, "ALL") as connection:
        assert connection.version() == "TLSv1.3"


def http2_frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def call_by_hand(connection: Any, path: bytes) -> bytes:
    """Make a call with an empty request by HTTP/2 frames of our own; return what comes back."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", path),
        (b":authority", b"bert"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    headers = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs
    )
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0, b""))
    connection.sendall(http2_frame(1, 4, 1, headers))  # HEADERS; more would follow
    connection.settimeout(1.0)
    heard = b""
    try:
        while content := connection.recv(4096):
            heard += content
    except TimeoutError:
        pass
    return heard


def test_a_call_over_tls_1_2_is_refused(scene: Scene, tmp_path: Path) -> None:
    text = b"TLS 1.3 is required"
    for version, refused in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, False)):
        with tls_connection(scene, tmp_path, version, "ALL") as connection:
            assert (text in call_by_hand(connection, b"/dpcsgp.Party/push")) is refused
