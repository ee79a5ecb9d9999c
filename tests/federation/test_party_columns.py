"""Columns by name: whatever the order in a party's table, the model sees that of the roster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from commands import commands
from made_parties import PLAN
from running import SEED, make_federation, request_of, results_of

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError, DataError
from dpcsgp.federation.data_shape import DataShape
from dpcsgp.federation.files import Fields, parse_table
from dpcsgp.federation.party_check import check_party
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_run import prepare_party
from dpcsgp.federation.roster import Roster

NAMES = ["age", "bmi", "pulse", "size"]
NAMED = 'columns = ["age", "bmi", "pulse", "size"]\ntarget = "label"'
PERMUTED = ["size", "label", "pulse", "age", "bmi"]


def make(root: Path, data: str = NAMED, more: str = "") -> Roster:
    return make_federation(root, 2, PLAN.replace("= 3\n", f"= 3\n{data}\n") + more, examples=40)


def table(seed: int = 0, rows: int = 40) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(rows, 4)).astype(np.float32), columns=NAMES)
    return frame.assign(label=random.integers(0, 3, rows))


def inputs_of(root: Path, data: Any, **words: Any) -> np.ndarray:
    source = str(data) if isinstance(data, Path) else data
    found: Any = prepare_party(request_of(root, 0, OwnExamples(source, **words))).data
    return found.parts[0].inputs.numpy()


def findings(root: Path, data: Path) -> dict[str, str]:
    found = check_party(request_of(root, 0, OwnExamples(str(data))), 0.1)
    return {each.subject: f"{each.word} {each.detail}" for each in found}


def test_a_party_with_permuted_columns_ends_with_the_same_bits(tmp_path: Path) -> None:
    make(tmp_path)
    models = []
    for number, order in enumerate(([*NAMES, "label"], PERMUTED)):
        root = tmp_path / f"{number}"
        root.mkdir()
        for name in ("lab-0", "lab-1", "federation.toml"):
            (root / name).symlink_to(tmp_path / name)
        table(0).to_csv(root / "0.csv", index=False)
        table(1)[order].to_csv(root / "1.csv", index=False)
        with commands(root) as start:
            both = [
                start("party", "run", "federation.toml", "--folder", f"lab-{node}", "--data",
                      f"{node}.csv", "--seed", str(SEED))
                for node in (0, 1)
            ]  # fmt: skip
            for command in both:
                command.ends(0)
        models.append(
            [load_file(results_of(root, n) / "model.safetensors")["node_models"] for n in (0, 1)]
        )
        for node in (0, 1):  # the next run begins anew
            (root / f"lab-{node}" / "runs").rename(root / f"runs-{node}")
    for one, other in zip(*models, strict=True):
        assert torch.equal(one, other)


def test_files_and_frames_are_taken_by_name(tmp_path: Path) -> None:
    make(tmp_path)
    frame = table()
    wanted = frame[NAMES].to_numpy()
    frame[PERMUTED].to_csv(tmp_path / "data.csv", index=False)
    assert np.array_equal(inputs_of(tmp_path, tmp_path / "data.csv"), wanted)
    pair = frame[["size", "bmi", "age", "pulse"]], frame["label"]
    assert np.array_equal(inputs_of(tmp_path, pair), wanted)
    assert np.array_equal(inputs_of(tmp_path, (wanted, frame["label"].to_numpy())), wanted)
    with pytest.raises(DataError, match=r"data: no column 'age'; unexpected columns 'Age'"):
        inputs_of(tmp_path, (frame[NAMES].set_axis(["Age", *NAMES[1:]], axis=1), frame["label"]))


def test_names_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    make(tmp_path, 'columns = ["1", "2", "3", "4"]\ntarget = "5"')
    rows = ["4,5,2,1,3", *("40,0,20,10,30" for _ in range(9))]
    (tmp_path / "data.csv").write_text("\n".join(rows))
    assert inputs_of(tmp_path, tmp_path / "data.csv")[0].tolist() == [10, 20, 30, 40]


def test_persons_and_a_target_that_nobody_named_are_found_beside_the_columns(
    tmp_path: Path,
) -> None:
    make(tmp_path, NAMED.partition("\n")[0], "\n[privacy]\nmax_rows_per_unit = 3\n")
    frame = table().assign(patient=np.arange(40) // 2)
    frame[["patient", *PERMUTED]].to_csv(tmp_path / "data.csv", index=False)
    found = inputs_of(tmp_path, tmp_path / "data.csv", unit="patient")
    assert np.array_equal(found, frame[NAMES].to_numpy())
    with pytest.raises(DataError, match="--unit age: the roster says that this column is an input"):
        inputs_of(tmp_path, tmp_path / "data.csv", unit="age")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: f.drop(columns="bmi"), "no column 'bmi'.*rename or add"),
        (lambda f: f.drop(columns="label"), "no column 'label'"),
        (
            lambda f: f.assign(id=1).rename(columns={"age": "Age"}),
            "no column 'age'; unexpected columns 'Age', 'id'.*remove them, or have the roster made",
        ),
        (lambda f: f.rename(columns={"label": "age"}), "no column 'label'; more than one .*'age'"),
    ],
)
def test_missing_and_unexpected_columns_are_refused_by_name(
    tmp_path: Path, change: Any, problem: str
) -> None:
    make(tmp_path)
    change(table()).to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(DataError, match=problem):
        inputs_of(tmp_path, tmp_path / "data.csv")
    table().to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(ConfigError, match="--target age: the roster says that the target is label"):
        inputs_of(tmp_path, tmp_path / "data.csv", target="age")
    assert not (tmp_path / "lab-0" / "runs").exists()


def test_the_check_says_by_what_columns_were_compared(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "data.csv"
    table()[PERMUTED].to_csv(path, index=False)
    told = findings(tmp_path, path)["columns"]
    assert told == "PASS taken by name: age, bmi, ... size (4); target label"
    table().to_csv(path, index=False, header=False)
    told = findings(tmp_path, path)
    assert told["columns"].startswith("WARN the data have no names of columns")
    assert "age, bmi, ... size (4)" in told["columns"] and told["data"].startswith("PASS")
    np.savez(tmp_path / "data.npz", x=table()[NAMES], y=table()["label"])
    assert findings(tmp_path, tmp_path / "data.npz")["columns"].startswith("WARN the data have no")
    make(tmp_path / "b", "")
    table().to_csv(path, index=False)
    told = findings(tmp_path / "b", path)["columns"]
    assert told.startswith("WARN compared by number only (here: age, bmi, ... size (4); target")


def test_a_new_federation_without_columns_says_so_and_a_command_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    cards = [f"lab-{node}/lab-{node}.card.toml" for node in (0, 1)]

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli, list(words), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.stdout

    told = run("federation", "new", "plan.toml", *cards, "--out", "named.toml")
    assert "columns age, bmi, ... size (4); target label" in told and "note:" not in told
    Path("bare.toml").write_text(PLAN)
    told = run("federation", "new", "bare.toml", *cards, "--out", "bare-roster.toml")
    assert "note: [data] has no columns" in told
    # Only the first line is read: what follows need not even be text.
    Path("data.csv").write_bytes(b"age,bmi,label,pulse,size\n" + b"1," * 9000 + b"\n\xff\xfe")
    lines = run("federation", "columns", "data.csv", "--target", "label")
    shape = DataShape.take(Fields(parse_table(lines + "num_classes = 3", "plan"), "data"))
    assert shape == Roster.load(Path("named.toml")).data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ('columns = ["a"]', r"columns = '1 names': expected as many as input_shape = \[4\] says"),
        ('columns = ["a", "a", "b", "c"]', "columns = 'a': expected different names"),
        ('columns = ["a", "b", "c", 4]', "columns = 4: expected names"),
        ('target = "y"', "target = 'y': expected columns beside it"),
        ('columns = ["a", "b", "c", "d"]\ntarget = "a"', "a column that is not among columns"),
        ('columns = ["a", "b", "c", "d"]\ntarget = ["x", "y"]', "expected one name"),
        ('columns = ["a", "b", "c", "d"]\ntarget = 4', "target = 4: expected names"),
    ],
)
def test_names_that_do_not_fit_the_shape_are_refused(data: str, problem: str) -> None:
    text = f"input_shape = [4]\nnum_classes = 3\n{data}"
    with pytest.raises(ConfigError, match=problem):
        DataShape.take(Fields(parse_table(text, "plan"), "plan, data"))


def test_a_roster_with_columns_is_read_back_as_written(tmp_path: Path) -> None:
    roster = make(tmp_path)
    assert Roster.parse(roster.text()) == roster and roster.data.columns == tuple(NAMES)
    assert roster.content()["data"]["target"] == "label"
    several = 'input_shape = [2]\nloss = "mse"\ntarget_shape = [2]\ncolumns = ["a", "b"]\n'
    shape = DataShape.take(Fields(parse_table(several + 'target = ["v", "u"]', "p"), "data"))
    lines = "\n".join(shape.lines())
    assert DataShape.take(Fields(parse_table(lines, "p"), "data")) == shape


def write(path: Path, *rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [["y", "a", "b", "c", "d"], [0, 1, 2, 3, 17.33]],
            r"column 'd' \(the last\) was taken as target, and line 2 holds 17.33 there, no whole "
            r"number; name the target with --target NAME \(columns: 'y', 'a'",
        ),
        (
            [["a", "b", "c", "d", "y"], [1, "", 3, 4, 0]],
            "line 2, column 'b': '' is no number; fill",
        ),
        (
            [["a", "b", "c", "d", "y"], [1, "m", 3, 4, 0]],
            "line 2, column 'b': 'm' is no number; enc",
        ),
        ([[1, 2, 3, 4, 0], [1, "m", 3, 4, 0]], "line 2, column 2: 'm' is no number"),
        ([[1, 2, 3, 4, 0], [1, 1e300, 3, 4, 0]], "line 2, column 2: the value is not finite"),
        (
            [["y", "a", "b", "c", "d"], [0, 1, 2, 3, "x"]],
            r"column 'd': 'x' is no number, and column 'd' \(the last\) was taken as target; name",
        ),
        (
            [["a", "b", "c", "d", "y"], [1, 2, 3, 4, 2], [1, 2, 3, 4, 3]],
            "data.csv, line 3, column 'y': label 3, but there are 3 classes: .* from 0 to 2",
        ),
    ],
)
def test_errors_name_the_line_and_the_column(
    tmp_path: Path, rows: list[list[Any]], problem: str
) -> None:
    make(tmp_path, "")
    with pytest.raises(DataError, match=problem):
        inputs_of(tmp_path, write(tmp_path / "data.csv", *rows))


def test_a_table_of_pythons_with_wrong_columns_is_named_when_it_is_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    frame = table()[PERMUTED]
    path = tmp_path / "data.parquet"
    path.touch()
    monkeypatch.setattr(pd, "read_parquet", lambda _: frame)  # pyarrow need not be there
    assert np.array_equal(inputs_of(tmp_path, path), np.asarray(frame[NAMES]))
    frame = frame.assign(bmi="m")
    with pytest.raises(DataError, match="column 'bmi': it holds no numbers"):
        inputs_of(tmp_path, path)
    frame = frame.assign(bmi=[*[1.0] * 39, np.nan])
    with pytest.raises(DataError, match=r"example 39, column 'bmi': .* \(1 of 40 examples"):
        inputs_of(tmp_path, path)
