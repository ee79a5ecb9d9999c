"""Whoever writes to the store without the key may stop a start, and can change neither key nor training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dpcsgp.compression import frames
from dpcsgp.errors import DpcsgpError, WireError
from dpcsgp.network.board import Board, Seal
from dpcsgp.network.handshake import shake_hands
from dpcsgp.network.health import Health
from dpcsgp.network.torch_distributed import Place, serve_store

KEY = bytes(range(32))
SECONDS = 3.0


class Start:
    """A real store and two processes (threads) that meet at it."""

    def __init__(self) -> None:
        self._server = serve_store()
        self.place = Place(0, 2, "127.0.0.1", self._server.port)

    def open_store(self) -> Any:
        return self.place.open_store(10)

    def one(self, rank: int, store: Any) -> bytes | DpcsgpError:
        health = Health(self.open_store, rank, [[0], [1]], SECONDS, lambda text: None)
        try:
            key = shake_hands(Board(store, rank, Seal(KEY)), 2, {"a": 1}, health, SECONDS)
            assert key is not None
            return key
        except DpcsgpError as error:
            return error
        finally:
            health.stop()

    def both(self, stores: Any = None) -> list[bytes | DpcsgpError]:
        """Let both shake hands; return their run keys or errors."""
        stores = stores or [self.open_store(), self.open_store()]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self.one, range(2), stores))

    def hellos(self) -> dict[str, str]:
        """Return what a listener has seen."""
        store = self.open_store()
        names = [f"{kind}/{rank}" for kind in ("hello", "confirm") for rank in range(2)]
        return {name: store.get(name).decode() for name in names if store.check([name])}


class InThePath:
    """A connection to a real store on which somebody replaces what is read."""

    def __init__(self, store: Any, served: dict[str, str]) -> None:
        self._store, self._served = store, served

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._served or self._store.check([key]) for key in keys)

    def get(self, key: str) -> bytes:
        return self._served[key].encode() if key in self._served else self._store.get(key)


@contextmanager
def writing(store: Any, values: dict[str, str]) -> Iterator[None]:
    """Write values to the store in a loop."""
    stopped = threading.Event()

    def loop() -> None:
        while not stopped.is_set():
            for key, value in values.items():
                store.set(key, value)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def first_start() -> tuple[bytes, dict[str, str]]:
    start = Start()
    first, second = start.both()
    assert isinstance(first, bytes) and first == second
    return first, start.hellos()


def test_old_hellos_do_not_bring_back_the_old_run_key() -> None:
    old, taped = first_start()
    frame_F = frames.join([0], 5, torch.ones(1, 1), torch.zeros(1, 8, dtype=torch.uint8), old)
    start = Start()
    for result in start.both([InThePath(start.open_store(), taped) for _ in range(2)]):
        assert result != old
        if isinstance(result, bytes):
            with pytest.raises(WireError, match="keyed tag"):
                frames.split(frame_F, [0], 5, 8, key=result)


def test_a_loop_of_old_hellos_ends_in_one_new_key_or_in_errors() -> None:
    old, taped = first_start()
    for _ in range(4):
        start = Start()
        with writing(start.open_store(), taped):
            results = start.both()
        assert old not in results
        keys = [result for result in results if isinstance(result, bytes)]
        assert not keys or keys[0] == keys[-1]
        assert all("hello/" in str(r) or "confirm/" in str(r) for r in results if not isinstance(r, bytes)), results
