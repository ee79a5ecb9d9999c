"""docs/design.md is true: rooms, walks and answers are those of the code.

Every walk is a table `hop | file | function | what happens`. Its functions exist, it never climbs
to a higher floor of the import layers, and a traced run enters them in that order.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest

from dpcsgp.cli.run import run
from dpcsgp.runtime.requests import BuiltinRequest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dpcsgp"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
RUN, LAUNCH, TRAIN, STEP = (
    "`dpcsgp run`, to the first byte",
    "`dpcsgp launch`, to the loop",
    "`dpcsgp.train`, to the session",
    "One training step",
)
MOST_HOPS = 12
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| .{10,} \|$", re.MULTILINE)
# Who else asks a task for examples, and why that is no leak.
RANDOM_EXAMPLES = {
    "benchmarking/workload.py": "times gradients on random examples that it made",
}


class Hop(NamedTuple):
    """One row of a walk."""

    file: str
    function: str  # with its class


def section(title: str, level: str = "###") -> str:
    """Return the text between a heading and the next one."""
    _, found, rest = PAGE.partition(f"\n{level} {title}\n")
    assert found, f"docs/design.md has no section {title!r}"
    return re.split(r"^#{2,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def walk(title: str) -> list[Hop]:
    text = section(title)
    rows = ROW.findall(text)
    assert len(rows) == text.count("\n| ") - 1, f"{title}: a row is not of the form of a hop"
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [Hop(file, function) for _, file, function in rows]


def functions(file: str) -> set[str]:
    """Return the functions and methods of a file, by qualified name."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{node.name}.")

    return set(names(ast.parse((SOURCE / file).read_text(encoding="utf-8")).body, ""))


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    """The script that draws the picture."""
    sys.path.insert(0, str(ROOT / "docs" / "figures"))
    try:
        return import_module("make_rooms")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def floors(rooms: ModuleType) -> dict[str, int]:
    """Room -> number of its floor, counted from above."""
    return {room: floor for floor, found in enumerate(rooms.layers()) for room in found}


def test_every_room_has_one_line(floors: dict[str, int]) -> None:
    listed = re.findall(r"^\| `(\w+)` \| .{10,} \|$", section("The rooms", "##"), re.MULTILINE)
    there = {
        path.stem
        for path in SOURCE.iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    }
    assert sorted(listed) == sorted(there)
    assert set(listed) == set(floors), "pyproject.toml gives every room a layer"
    assert [floors[room] for room in listed] == sorted(floors[room] for room in listed)


def test_the_picture_of_the_rooms_is_drawn_from_todays_layers(rooms: ModuleType) -> None:
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.drawn(rooms.layers())


@pytest.mark.parametrize("title", [RUN, LAUNCH, TRAIN, STEP])
def test_every_hop_is_a_function_of_its_file(title: str) -> None:
    missing = [hop for hop in walk(title) if hop.function not in functions(hop.file)]
    assert not missing


@pytest.mark.parametrize("title", [RUN, LAUNCH, TRAIN])
def test_walks_are_short_and_never_climb(title: str, floors: dict[str, int]) -> None:
    hops = walk(title)
    assert len(hops) <= MOST_HOPS
    levels = [floors[hop.file.split("/")[0].removesuffix(".py")] for hop in hops]
    assert levels == sorted(levels), list(zip(hops, levels, strict=True))


def used_names(file: str) -> set[str]:
    """Return the names and attributes that the code of a file uses."""
    nodes = list(ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("title", [LAUNCH, TRAIN])
def test_every_hop_is_used_by_the_file_of_an_earlier_one(title: str) -> None:
    """These walks cross processes, or start in a script: they are not traced."""
    hops = walk(title)
    for number, hop in enumerate(hops[1:], start=1):
        used = set[str]().union(*(used_names(earlier.file) for earlier in hops[:number]))
        assert hop.function.split(".")[-1] in used, hop


def test_the_three_ways_meet() -> None:
    common = walk(RUN)
    assert walk(TRAIN)[-1] == common[1]
    assert walk(LAUNCH)[-1] == common[5]


def test_the_three_answers_name_what_is_there() -> None:
    text = section("Three answers", "##")
    answers = [part for part in text.strip().split("\n\n") if part.startswith("> **Where")]
    assert len(answers) == 3
    for answer in answers:
        files = re.findall(r"`([\w/]+\.py)`", answer)
        known = {name for file in files for name in functions(file)}
        named = re.findall(r"`((?:[A-Z]\w+\.)?_?[a-z]\w*)`", answer)
        assert files and named
        assert set(named) <= known, set(named) - known


def test_private_examples_are_fetched_by_the_privacy_room_alone() -> None:
    callers = [
        path.relative_to(SOURCE).as_posix()
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("examples", "read_examples")
    ]
    # in memory or read row by row, by one function; the task itself asks on behalf of its callers
    asking = ["privacy/fetching.py"] * 2 + ["tasks/lazy_task.py", "tasks/units.py"]
    asking += ["auditing/canaries.py"]  # canaries, as persons of several rows
    assert sorted(callers) == sorted([*asking, *RANDOM_EXAMPLES])
    for file in RANDOM_EXAMPLES:  # neither can open a data set
        text = (SOURCE / file).read_text(encoding="utf-8")
        assert "torch.rand" in text
        assert "load_dataset" not in text and "load_builtin_data" not in text


@contextmanager
def entered() -> Iterator[list[Hop]]:
    """Note every function of the package in the order in which they are entered."""
    seen: list[Hop] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            file = Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()
            seen.append(Hop(file, frame.f_code.co_qualname))

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[Hop]:
    """The functions of `dpcsgp run`, with two steps of digits on four nodes."""
    settings = {
        "task.name": "digits",
        "graph.num_nodes": 4,
        "privacy.epsilon": 4,
        "algorithm.steps": 2,
        "run.evaluate_every": 1,
        "run.checkpoint_every": 1,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    with entered() as seen:
        run(settings=words, out=tmp_path_factory.mktemp("traced") / "run", as_json=True)
    return seen


def in_order_of_entry(trace: list[Hop], hops: list[Hop]) -> list[Hop]:
    wanted = set(hops)
    return list(dict.fromkeys(hop for hop in trace if hop in wanted))


@pytest.mark.slow
def test_a_run_walks_as_the_page_says(trace: list[Hop]) -> None:
    hops = walk(RUN)
    assert in_order_of_entry(trace, hops) == hops


@pytest.mark.slow
def test_a_step_walks_as_the_page_says(trace: list[Hop]) -> None:
    hops = walk(STEP)
    assert in_order_of_entry(trace[trace.index(hops[0]) :], hops) == hops


def test_a_request_is_a_plain_record() -> None:
    """Workers are handed it by multiprocessing: nothing in it but paths, texts and flags."""
    request = BuiltinRequest(Path("a.toml"), ("run.seed=1",), Path("out"), True)
    assert {type(value).__name__ for value in vars(request).values()} <= {
        "PosixPath", "WindowsPath", "tuple", "bool",
    }  # fmt: skip
