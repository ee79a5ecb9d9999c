"""Reading results folders: strict where the page would lie, tolerant where it can show a dash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dpcsgp.errors import DataError
from dpcsgp.report import write_report
from dpcsgp.report.folders import node_values, read_many, shown_metrics, worst

MakeFolder = Callable[..., Path]


def replace_metric(folder: Path, name: str) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("accuracy_", f"{name}_"))


def test_a_folder_is_read(make_folder: MakeFolder) -> None:
    (run,) = read_many([make_folder()])
    assert run.name == "first"
    assert run.settings["compression.spec"] == "rot:1"
    assert run.column("step").tolist() == [0, 5, 10, 15, 20, 25, 30]
    assert run.metrics == ["accuracy"]
    assert run.remarks == ()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("summary.json", None, ["summary.json does not exist", "--resume"]),
        ("summary.json", "{", ["summary.json cannot be read"]),
        ("summary.json", "[]", ["summary.json is no summary"]),
        (
            "summary.json",
            '{"algorithm": "x", "private": "false"}',
            ["private = 'false'", "expected true or false"],
        ),
        ("metrics.jsonl", None, ["metrics.jsonl does not exist"]),
        ("metrics.jsonl", "", ["metrics.jsonl holds no evaluation"]),
        ("metrics.jsonl", "{\n{}\n", ["metrics.jsonl, line 1 is not JSON"]),
        ("metrics.jsonl", '{"round": 1}\n', ["metrics.jsonl, line 1 has no step"]),
        ("metrics.jsonl", "7\n", ["metrics.jsonl, line 1 has no step"]),
    ],
)
def test_damage_is_named(
    make_folder: MakeFolder, file: str, content: str | None, words: list[str]
) -> None:
    folder = make_folder()
    path = folder / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_many([folder])
    for word in words:
        assert word in str(caught.value)


def test_a_folder_of_runs_is_told_from_a_run(make_folder: MakeFolder, tmp_path: Path) -> None:
    make_folder("grid/one")
    make_folder("grid/two")
    with pytest.raises(DataError, match=r"holds 2 runs of its own.*grid/\*"):
        read_many([tmp_path / "grid"])
    with pytest.raises(DataError, match="there is no such folder; give a results folder"):
        read_many([tmp_path / "nowhere"])


def test_a_torn_last_line_is_left_out(make_folder: MakeFolder) -> None:
    folder = make_folder()
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3')
    assert len(read_many([folder])[0].rows) == 7


def test_missing_settings_are_remarked_on(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "config.toml").write_text("= broken")
    (folder / "environment.json").unlink()
    (run,) = read_many([folder])
    assert run.settings == {}
    assert len(run.remarks) == 2


def test_names_tell_folders_apart_and_each_is_read_once(make_folder: MakeFolder) -> None:
    folders = [make_folder("a/run"), make_folder("b/run"), make_folder("c")]
    assert [run.name for run in read_many([*folders, folders[0]])] == [
        "a/run",
        "b/run",
        folders[2].parent.name + "/c",
    ]


def test_accuracy_is_preferred_and_every_run_has_a_metric_that_is_shown(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    first, second = make_folder("a"), make_folder("b")
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    (first / "metrics.jsonl").write_text(
        "".join(json.dumps({"loss_node_mean": 1.0, **row}) + "\n" for row in rows)
    )
    assert shown_metrics(read_many([first])) == ["accuracy"]
    assert shown_metrics(read_many([first, second])) == ["accuracy"]
    replace_metric(second, "margin")
    assert shown_metrics(read_many([first, second])) == ["accuracy", "margin"]
    page = write_report([first, second], tmp_path / "page.html").read_text()
    assert 'id="figure-steps-1"' in page and "margin" in page


def test_the_worst_node_depends_on_the_metric() -> None:
    values = node_values({"x_nodes": [0.3, 0.1, 0.2]}, "x_nodes")
    assert worst(values, lower_is_better=False) == 0.1
    assert worst(values, lower_is_better=True) == 0.3
    assert math.isnan(worst(node_values({}, "x_nodes"), lower_is_better=False))


def test_a_run_knows_which_way_is_better(make_folder: MakeFolder) -> None:
    told, guessed = read_many(
        [make_folder("a", metric_directions={"margin": "lower"}), make_folder("b")]
    )
    assert told.lower_is_better("margin") and not guessed.lower_is_better("margin")
    assert guessed.lower_is_better("mean_squared_error") and told.lower_is_better("test_loss")
