"""A thin link in front of a party: its bytes arrive late, and not more than so many a second.

Connections to the link are passed on to the party. What goes in either direction shares the rate
of that direction, whoever sent it, as on the line that joins an organisation to the internet. The
link works on the bytes of TCP connections: headers of packets are not counted, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, Final, final

_CHUNK: Final = 8192
_QUEUE_SECONDS: Final = 0.1  # that a link keeps bytes waiting before it takes no more


@final
class ThinLink:
    """Passes connections on until it is closed; runs in a thread of its own.

    Args:
        target: HOST:PORT of the party.
        bits_per_second: in each direction.
        delay: seconds from one end to the other.

    Attributes:
        address: HOST:PORT, where others call the party.
    """

    def __init__(self, target: str, bits_per_second: float, delay: float) -> None:
        self._host, _, port = target.rpartition(":")
        self._port, self._delay = int(port), delay
        self._directions = (_Direction(bits_per_second), _Direction(bits_per_second))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Take no more connections and end those that are open."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._pass_on, "127.0.0.1", 0, limit=_CHUNK)

    def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        # Cancelled tasks need a turn of the loop to end.
        self._loop.call_soon(lambda: self._loop.call_soon(self._loop.stop))

    async def _pass_on(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection(self._host, self._port, limit=_CHUNK)
        except OSError:
            back.close()
            return
        inward, outward = self._directions
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._carry(near, forth, inward), self._carry(far, back, outward))

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: _Direction
    ) -> None:
        """Carry one direction of a connection."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.ensure_future(_arrive(under_way, sink))
        try:
            with contextlib.suppress(OSError):
                while content := await source.read(_CHUNK):
                    leaves = direction.send(len(content))
                    under_way.put_nowait((leaves + self._delay, content))
                    await asyncio.sleep(leaves - time.monotonic() - _QUEUE_SECONDS)
            under_way.put_nowait((time.monotonic() + self._delay, b""))
            await arriving
        finally:
            arriving.cancel()
            sink.close()


@final
class _Direction:
    """What one direction of the link has to carry."""

    def __init__(self, bits_per_second: float) -> None:
        self._rate, self._free_at = bits_per_second / 8, 0.0

    def send(self, num_bytes: int) -> float:
        """Return when so many bytes, which come now, have left."""
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
        return self._free_at


async def _arrive(under_way: asyncio.Queue[tuple[float, bytes]], sink: Any) -> None:
    """Hand over what is under way when its time has come; nothing: the end."""
    with contextlib.suppress(OSError):
        while True:
            when, content = await under_way.get()
            await asyncio.sleep(when - time.monotonic())
            if not content:
                return
            sink.write(content)
            await sink.drain()
