"""What both sides of a gRPC connection share: options, certificates, and a call as a `Line`.

gRPC speaks TLS 1.3, or 1.2 with ECDHE and AES-GCM only (tried with grpcio 1.85; there is no option
to demand 1.3). So a server looks at the version of every call and refuses what is not 1.3.
Certificates must be P-256: gRPC's TLS library takes no Ed25519.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dpcsgp.errors import ConfigError
from dpcsgp.federation.identity import ANY_PARTY
from dpcsgp.federation.peers import Method
from dpcsgp.federation.transport_ends import LineClosedError
from dpcsgp.federation.transport_messages import MOST_BYTES, foreign_text

# The C library reports every failed handshake on stderr, where a stranger could flood it. It reads
# this when the first channel or server is made.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

SERVICE: Final = "dpcsgp.Party"
# Connections that are still in their handshake, or of nobody: each takes a file descriptor, and a
# party that cannot open its ledger or its checkpoint has to end.
_MOST_STRANGERS: Final = 256

# Bounds of every connection. Beats of our own go through every line, so pings are rare.
_COMMON: Final = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.max_metadata_size", 8192),
    # Only "identity": no message may unpack to more than it is.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
)


def client_options() -> list[tuple[str, Any]]:
    """Return the options of a channel to a party."""
    return [
        *_COMMON,
        # Not the party's own name, nor its address: this one is seen by whoever listens in.
        ("grpc.ssl_target_name_override", ANY_PARTY),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # The limit of one attempt to connect, whatever its name: the system sends the first packet
        # again after ever longer pauses, and a new attempt begins with short ones.
        ("grpc.min_reconnect_backoff_ms", 4000),
    ]


def server_options(handshake_seconds: float, neighbours: int) -> list[tuple[str, Any]]:
    """Return the options of a server.

    Args:
        handshake_seconds: that a stranger has for its handshake.
        neighbours: number of parties that may call.
    """
    return [
        *_COMMON,
        ("grpc.so_reuseport", 0),  # another process on this port is an error
        ("grpc.max_concurrent_streams", 8),  # calls per connection
        ("grpc.max_allowed_incoming_connections", _MOST_STRANGERS + 4 * neighbours),
        ("grpc.server_handshake_timeout_ms", round(1000 * handshake_seconds)),
        ("grpc.max_connection_idle_ms", 60_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def path_of(method: Method) -> str:
    """Return the name of a call on the wire."""
    return f"/{SERVICE}/{method.value}"


def der_of(certificate_pem: bytes, owner: str) -> bytes:
    """Return a certificate in the one form that can be compared byte by byte.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise ConfigError(
            f"certificate of '{owner}': not a PEM certificate; ask for its card again"
        ) from error
    return certificate.public_bytes(serialization.Encoding.DER)


_FAULTS: Final = {
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not the one in the roster: another party, or an interceptor, answers "
        "there; compare addresses and fingerprints"
    ),
    "WRONG_VERSION_NUMBER": (
        "what answers there speaks no TLS: another program on this port, or a proxy in between"
    ),
    "Connection refused": "connection refused: nobody listens there",
}


class GrpcLine:
    """A call, seen from either side, that carries messages both ways.

    Args:
        stream: context of a server's handler, or a client's call: both read and write.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def receive(self, seconds: float) -> bytes:
        """Return the next message.

        Raises:
            LineClosedError: nothing came in time, or the other end closed the call.
        """
        message = await self._within(self._stream.read(), seconds, "nothing was heard")
        if not isinstance(message, bytes):  # the end of the stream
            raise LineClosedError(await self._reason())
        return message

    async def send(self, message: bytes, seconds: float) -> None:
        """Hand over a message; waits while the other end does not read.

        Raises:
            LineClosedError: it did not get through in time, or the other end closed the call.
        """
        await self._within(self._stream.write(message), seconds, "nothing was read")

    async def refuse(self, message: bytes, seconds: float) -> None:
        """Send a caller's last message, if it still gets through."""
        with contextlib.suppress(LineClosedError):
            await self.send(message, seconds)
            await self.finish(seconds)

    async def finish(self, seconds: float) -> None:
        """Let a caller's last messages get through: the other end closes the call after them."""
        with contextlib.suppress(LineClosedError, TimeoutError):
            # In all: an end that goes on to speak is not listened to for ever.
            async with asyncio.timeout(seconds):
                await self._within(self._stream.done_writing(), seconds, "nothing was read")
                while True:
                    await self.receive(seconds)

    async def _within(self, work: Any, seconds: float, fault: str) -> Any:
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with a result.
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise LineClosedError(f"{fault} for {seconds:g} s") from None
        except asyncio.CancelledError:
            # gRPC says so too when the call itself is gone; this work was not cancelled then.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LineClosedError("the call was cancelled") from None
        except grpc.aio.AioRpcError as error:
            raise LineClosedError(described(error.code(), error.details())) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            raise LineClosedError(await self._reason()) from None

    async def _reason(self) -> str:
        """Say why the other end closed the call; only a client is told."""
        if isinstance(self._stream, grpc.aio.Call):
            return described(await self._stream.code(), await self._stream.details())
        return "the other end closed the call"


def described(code: grpc.StatusCode, details: str | None) -> str:
    """Return what the other end said, or what gRPC says of a connection that failed."""
    if code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        return "the other end closed the call"
    details = details or code.name.lower()
    # The library's own words for a connection that never came about help no operator.
    plain = next((words for sign, words in _FAULTS.items() if sign in details), details)
    return foreign_text(plain)
