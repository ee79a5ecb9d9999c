"""Values in the store: an invalid tag or form is never accepted, and the error names the key."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dpcsgp.errors import DpcsgpError
from dpcsgp.network.agreed import fault_of
from dpcsgp.network.board import LAUNCHER, Board, Seal, StoreValueError
from dpcsgp.network.health import (
    CAUSE,
    STOP_ASKED,
    Health,
    SilentPeerError,
    announce,
    exit_barrier,
    known_cause,
)
from dpcsgp.network.torch_distributed import ProcessEnvironment, serve_store
from dpcsgp.records.ending import Stop
from dpcsgp.runtime.pacing import AgreedStop, Pace
from dpcsgp.runtime.signals import StopSignal

KEY = bytes(range(32))


@pytest.fixture
def place() -> Iterator[ProcessEnvironment]:
    server = serve_store()
    yield ProcessEnvironment(0, 2, "127.0.0.1", server.port)
    del server


def board(place: ProcessEnvironment, rank: int = 0, key: bytes | None = KEY) -> Board:
    return Board(place.open_store(10), rank, Seal(key))


def test_only_the_value_that_its_author_wrote_under_this_name_is_taken(
    place: ProcessEnvironment,
) -> None:
    mine, store = board(place), place.open_store(10)
    assert mine.look("a") is None
    board(place, 1).put("a", [1, 2])
    assert mine.look("a", 1) == (1, [1, 2])
    taped = mine.text("a")
    assert taped is not None
    forgeries = {
        "another value": ("a", taped.replace("[1, 2]", "[1, 3]")),
        "another author": ("a", "0" + taped[1:]),
        "another name": ("b", taped),
        "no tag": ("a", "1 - [1, 2]"),
        "another key": ("a", Board(store, 1, Seal(bytes(32))).sealed("a", [1, 2])),
        "another start": ("a", Board(store, 1, Seal(KEY, "other")).sealed("a", [1, 2])),
    }
    for kind, (name, text) in forgeries.items():
        store.set(name, text)
        assert mine.peek(name) is None, kind
        with pytest.raises(StoreValueError, match=f"under '{name}': its tag does not fit"):
            mine.look(name)
    store.set("a", taped)
    with pytest.raises(StoreValueError, match="not by rank 0"):
        mine.look("a", 0)


def test_a_key_of_this_start_makes_values_of_an_earlier_start_unreadable(
    place: ProcessEnvironment,
) -> None:
    mine, theirs = board(place), board(place, 1)
    theirs.put("a", 1)
    mine.seal.advance(bytes(32))
    assert mine.peek("a") is None
    launched = Board(place.open_store(10), LAUNCHER, Seal(KEY, "drawn by the launcher"))
    worker = Board(place.open_store(10), 0, Seal(KEY, "drawn by the launcher"))
    # a start with a launcher is bound already: it can still read what workers say
    worker.seal.advance(bytes(32))
    worker.put("b", 1)
    assert launched.look("b") == (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "0",
        "0 -",
        "0 - soon",
        "x - 1",
        "\u00b2 - 1",
        "99999999999999 - 1",
        "0 - " + "[" * 10**5,
    ],
)
def test_without_a_key_anything_else_than_a_value_is_refused_by_name(
    place: ProcessEnvironment, text: str
) -> None:
    place.open_store(10).set("a", text)
    with pytest.raises(StoreValueError, match="under 'a'"):
        board(place, key=None).look("a")


@pytest.mark.parametrize(
    ("name", "mine", "right", "wrong"),
    [
        ("run id", None, ["0123abcd"], ["../../etc", "", None, 5, "a/b", "a" * 65]),
        ("name of this start", "ab", ["0123"], ["..", "a.b", None]),
        ("whole checkpoints", [], [[], [0, 5]], [5, ["a"], [-1], [True], None]),
        ("remaining releases", 3, [0, 10], ["soon", -1, True, 2.5, None, 10**30]),
        ("ready", True, [True], [1, "yes", None]),
        (
            "results",
            {"rows": [{"a": 1.5, "b": [1]}]},
            [{"rows": [{"a": "inf", "b": [2, 3]}]}],
            [
                {},
                {"rows": []},
                {"rows": [{"a": "soon", "b": [1]}]},
                {"rows": [{"a": 1}]},
                {"rows": [5]},
                None,
            ],
        ),
    ],
)
def test_agreed_values_have_a_form(
    name: str, mine: Any, right: list[Any], wrong: list[Any]
) -> None:
    assert all(fault_of(name, mine, 0)(value) is None for value in right)
    assert all(fault_of(name, mine, 0)(value) for value in wrong)


def test_nobody_without_the_key_can_tell_a_cause_or_hide_one(place: ProcessEnvironment) -> None:
    mine, store = board(place), place.open_store(10)
    for text in ("junk", json.dumps(["rank 1 is to blame", 1]), '1 - ["rank 1 is to blame", 1]'):
        store.set(CAUSE, text)
        assert known_cause(mine) is None
    assert announce(mine, "the true cause", 1) == ("the true cause", 1)
    assert known_cause(board(place, 1)) == ("the true cause", 1)


def test_a_foreign_goodbye_does_not_make_the_host_of_the_store_leave(
    place: ProcessEnvironment,
) -> None:
    place.open_store(10).set("gone/1", "1 - true")
    began = time.monotonic()
    exit_barrier(board(place), 2, 0.5)
    assert time.monotonic() - began > 0.4


def test_a_port_where_nobody_listens_is_reported_at_the_time_that_is_said() -> None:
    server = serve_store()
    port = server.port
    del server
    began = time.monotonic()
    with pytest.raises(SilentPeerError, match="within 2 s"):
        ProcessEnvironment(1, 2, "127.0.0.1", port).open_store(2)
    assert time.monotonic() - began < 2.5


class Counting:
    """A connection to a real store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)


class Ring:
    """Threads on a directed ring: step t needs the predecessor's message of step t."""

    SIZE, PACE, STEPS = 3, Pace(lead=3), 4000

    def __init__(self, place: ProcessEnvironment, key: bytes | None, steps: int = STEPS) -> None:
        self._steps, self._failed = steps, False
        self._made = [0] * self.SIZE
        self._changed = threading.Condition()
        self.kinds: dict[int, Stop] = {}
        seal = Seal(key)
        nodes = [[rank] for rank in range(self.SIZE)]
        self.healths = [
            Health(lambda: place.open_store(10), rank, nodes, 4, lambda text: None, seal)
            for rank in range(self.SIZE)
        ]
        self.stores: list[Any] = [Counting(place.open_store(10)) for _ in range(self.SIZE)]
        self.boards = [Board(self.stores[rank], rank, seal) for rank in range(self.SIZE)]

    def run(
        self, rank: int, asked_at: int | None = None, answer: object = True
    ) -> int | DpcsgpError:
        """Go on until the agreed step and return it, or the error."""
        stop = StopSignal(
            also=lambda step: answer if asked_at is not None and step >= asked_at else None
        )
        agreed = AgreedStop(self.boards[rank], self.SIZE, self.healths[rank], stop, self.PACE)
        for step in range(self._steps):
            try:
                if kind := agreed.is_set(step):
                    self.kinds[rank] = kind
                    return step
            except DpcsgpError as error:
                self._failed = True
                return error
            self._exchange(rank, step)
        return self._steps

    def _exchange(self, rank: int, step: int) -> None:
        with self._changed:
            self._made[rank] = step + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or self._made[rank - 1] > step, 5)
        time.sleep(0.001)

    def all(
        self, *asked_at: int | None, answers: tuple[object, ...] = (True, True, True)
    ) -> list[int | DpcsgpError]:
        with ThreadPoolExecutor(self.SIZE) as pool:
            results = list(pool.map(self.run, range(self.SIZE), asked_at, answers))
        for health in self.healths:
            health.stop()
        return results


@pytest.mark.parametrize("asked_at", [(None, None, 20), (20, None, None), (20, 25, 23), (0, 0, 0)])
def test_all_processes_stop_at_the_same_step(
    place: ProcessEnvironment, asked_at: tuple[int | None, ...]
) -> None:
    ends = Ring(place, KEY).all(*asked_at)
    assert (
        isinstance(ends[0], int)
        and min(step for step in asked_at if step is not None) < ends[0] < Ring.STEPS
    )
    assert len(set(ends)) == 1


@pytest.mark.parametrize(
    ("asked_at", "answers", "kind"),
    [
        ((None, None, 20), (None, None, "finish"), Stop.FINISH),
        ((20, None, None), ("finish", None, None), Stop.FINISH),
        ((None, 0, 0), (None, True, True), Stop.PAUSE),
        ((20, 20, None), ("finish", True, None), None),  # who is heard first is open
    ],
)
def test_all_processes_make_the_same_kind_of_stop(
    place: ProcessEnvironment, asked_at: Any, answers: Any, kind: Stop | None
) -> None:
    ring = Ring(place, KEY)
    assert len(set(ring.all(*asked_at, answers=answers))) == 1
    assert ring.kinds == dict.fromkeys(range(Ring.SIZE), kind or ring.kinds[0])


def test_nobody_asks_the_store_in_a_step_that_nobody_wants_to_stop_at(
    place: ProcessEnvironment,
) -> None:
    ring = Ring(place, KEY, 50)
    assert ring.all(None, None, None) == [50] * 3
    assert [store.asked for store in ring.stores] == [0] * 3


def test_a_foreign_request_to_stop_is_ignored_with_a_key(place: ProcessEnvironment) -> None:
    ring, store = Ring(place, KEY, 800), place.open_store(10)
    store.set(STOP_ASKED, "1 - true")
    store.set("stop at", "0 - 30")
    assert ring.all(None, None, None) == [800] * 3


def test_a_stop_at_no_step_is_an_error_that_names_the_key_of_the_store(
    place: ProcessEnvironment,
) -> None:
    ring = Ring(place, None)
    place.open_store(10).set("stop at", "soon")
    results = ring.all(None, None, 20)
    assert any("holds 'soon' under 'stop at'" in str(result) for result in results)
