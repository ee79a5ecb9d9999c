"""A small TCP forwarder that listens in, and cuts connections after random numbers of bytes."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress


class Forwarder:
    """Forwards one port to another until it is closed.

    Args:
        target: HOST:PORT to forward to.
        cut_after: mean bytes of a connection before it is cut; None: never.
        seed: of the cuts.
    """

    def __init__(self, target: str, cut_after: int | None = None, seed: int = 0) -> None:
        host, port = target.split(":")
        self._target, self._cut_after = (host, int(port)), cut_after
        self._chance = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.captured = bytearray()
        self.cuts = 0
        self.flowing = threading.Event()  # cleared: nothing gets through, nobody is told
        self.flowing.set()
        self.answering = threading.Event()  # cleared: what the target says is lost
        self.answering.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                left = [self._chance.expovariate(1 / self._cut_after)] if self._cut_after else None
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, left, source is far), daemon=True
                    ).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        left: list[float] | None,
        is_answer: bool,
    ) -> None:
        with suppress(OSError):
            while content := source.recv(4096):
                self.captured += content
                if left is not None:
                    left[0] -= len(content)
                    if left[0] < 0:
                        self.cuts += 1
                        break
                if is_answer and not self.answering.is_set():
                    self.answering.wait()
                    break  # bytes are missing: the connection is of no more use
                self.flowing.wait()
                sink.sendall(content)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
