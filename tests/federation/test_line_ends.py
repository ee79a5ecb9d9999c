"""When one half of a line ends, the other half ends too, whatever it is in the middle of."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dpcsgp.federation.transport_ends import LineClosedError, first_to_end
from dpcsgp.federation.transport_grpc import GrpcLine


class Stream:
    """A call whose first message gets through when told; later ones at once."""

    def __init__(self, gate: asyncio.Future[None]) -> None:
        self._gate = gate

    async def write(self, message: bytes) -> None:
        await self._gate


async def beat(line: GrpcLine) -> None:
    while True:
        await line.send(b"b", 5.0)
        await asyncio.sleep(0.01)


async def fall_silent(gate: asyncio.Future[None], hops: int) -> None:
    await gate
    for _ in range(hops):
        await asyncio.sleep(0)
    raise LineClosedError("nothing was heard")


@pytest.mark.parametrize("hops", range(8))
def test_a_half_that_is_just_done_with_a_message_ends_with_the_other(hops: int) -> None:
    """A cancellation that comes together with a result must not be lost."""

    async def play() -> None:
        gate = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, gate.set_result, None)
        halves = beat(GrpcLine(Stream(gate))), fall_silent(gate, hops)
        with pytest.raises(LineClosedError, match="nothing was heard"):
            await asyncio.wait_for(first_to_end(*halves), 2.0)

    asyncio.run(play())


def test_a_half_that_ignores_being_ended_once_is_ended_again() -> None:
    """Libraries below may swallow a cancellation."""
    swallowed = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            swallowed.append(True)
        await asyncio.sleep(60)

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise LineClosedError("gone")

    async def play() -> None:
        with pytest.raises(LineClosedError, match="gone"):
            await asyncio.wait_for(first_to_end(stubborn(), fail()), 10.0)

    asyncio.run(play())
    assert swallowed


def test_a_farewell_is_short_even_if_the_other_end_goes_on_to_speak() -> None:
    class Talker(Stream):
        async def read(self) -> bytes:
            await asyncio.sleep(0.01)
            return b"b"

        async def done_writing(self) -> None:
            return

    async def play() -> None:
        line = GrpcLine(Talker(asyncio.get_running_loop().create_future()))
        await asyncio.wait_for(line.finish(0.2), 2.0)

    asyncio.run(play())
