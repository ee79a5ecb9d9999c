"""A writer without the key may stop a start, but can change neither key nor training."""

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
from dpcsgp.network.handshake import handshake
from dpcsgp.network.health import Health
from dpcsgp.network.torch_distributed import ProcessEnvironment, serve_store

KEY = bytes(range(32))
SECONDS = 2.0


class Start:
    """A real store and two processes (threads) that meet at it."""

    def __init__(self) -> None:
        self._server = serve_store()
        self.place = ProcessEnvironment(0, 2, "127.0.0.1", self._server.port)

    def open_store(self) -> Any:
        return self.place.open_store(10)

    def one(self, rank: int, store: Any, key: bytes | None = KEY) -> bytes | DpcsgpError | None:
        health = Health(self.open_store, rank, [[0], [1]], SECONDS, lambda text: None)
        try:
            return handshake(Board(store, rank, Seal(key)), 2, {"a": 1}, health, SECONDS)
        except DpcsgpError as error:
            return error
        finally:
            health.stop()

    def both(self, stores: Any = None) -> list[bytes | DpcsgpError | None]:
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
    hellos = {name: text for name, text in taped.items() if name.startswith("hello")}
    for served in (
        taped,
        hellos,
    ):  # somebody in the path, who has all of the first start, or shows half of it
        for result in start.both([InThePath(start.open_store(), served) for _ in range(2)]):
            assert isinstance(result, DpcsgpError)
            assert "handshake: rank" in str(result) and "'confirm/" in str(result)
    new = Start().both()[0]
    assert isinstance(new, bytes)
    with pytest.raises(WireError, match="keyed tag"):
        frames.split(frame_F, [0], 5, 8, key=new)


def test_a_mixture_of_old_and_new_hellos_ends_in_errors_everywhere() -> None:
    _, taped = first_start()
    start = Start()
    stores = [InThePath(start.open_store(), {"hello/1": taped["hello/1"]}), start.open_store()]
    results = start.both(stores)  # rank 0 alone is lied to: both must notice
    assert all(isinstance(result, DpcsgpError) for result in results)
    assert any("'confirm/" in str(result) for result in results)


def test_a_loop_of_old_hellos_ends_in_one_new_key_or_in_errors() -> None:
    old, taped = first_start()
    for _ in range(4):
        start = Start()
        with writing(start.open_store(), taped):
            results = start.both()
        assert old not in results
        keys = [result for result in results if isinstance(result, bytes)]
        assert len(set(keys)) <= 1
        assert all(
            "hello/" in str(r) or "confirm/" in str(r) for r in results if not isinstance(r, bytes)
        ), results


@pytest.mark.parametrize(
    "text", ["soon", "[1]", '{"facts": {"a": 1}, "fresh": "00"}', '{"facts": 1}', "[" * 10**5]
)
def test_what_is_no_hello_is_ignored_once_and_named_if_it_stays(text: str) -> None:
    start = Start()
    start.open_store().set("hello/1", text)  # rank 1 writes its own over it
    first, second = start.both()
    assert isinstance(first, bytes) and first == second
    start = Start()
    result = start.one(0, InThePath(start.open_store(), {"hello/1": text}))
    assert isinstance(result, DpcsgpError) and "'hello/1' in the store" in str(result)


def test_a_hello_of_another_rank_or_key_is_not_taken() -> None:
    _, taped = first_start()
    start = Start()
    result = start.one(0, InThePath(start.open_store(), {"hello/1": taped["hello/0"]}))
    assert "'hello/1' in the store of the run carries no right tag" in str(result)
    start = Start()
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(
                start.one, range(2), [start.open_store(), start.open_store()], [KEY, bytes(32)]
            )
        )
    assert all("another key in network.key_file" in str(result) for result in results)


def test_without_a_key_a_rank_that_was_restarted_alone_is_told_so() -> None:
    start = Start()
    with ThreadPoolExecutor(2) as pool:
        assert (
            list(
                pool.map(
                    start.one, range(2), [start.open_store(), start.open_store()], [None, None]
                )
            )
            == [None] * 2
        )
    assert "rank 0 met other processes than this one" in str(start.one(1, start.open_store(), None))
