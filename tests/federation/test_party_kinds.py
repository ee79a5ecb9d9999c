"""Parties with numbers to predict, labels that are text, and persons with several rows.

Whole commands in processes of their own, over TLS; `dpcsgp.train` with the same seeds is the twin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from commands import commands
from made_parties import PLAN
from running import SEED, make_federation, request_of, results_of

import dpcsgp
from dpcsgp.config import change_config
from dpcsgp.errors import ConfigError, DataError, DpcsgpError
from dpcsgp.federation.agreement import initial_module
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_run import prepare_party
from dpcsgp.federation.roster import Roster
from dpcsgp.privacy import read_ledgers, releases_by_node
from dpcsgp.privacy.ledger_format import read_ledger

CLASSES = "num_classes = 3"
PERSONS = "\n[privacy]\nmax_rows_per_unit = 3\n"


def make(root: Path, data: str, more: str = "") -> Roster:
    make_federation(root, 2, PLAN.replace(CLASSES, data) + more, examples=40)
    return Roster.load(root / "federation.toml")  # every setting is stated there


def write(path: Path, names: Sequence[str], *columns: Any) -> None:
    rows = zip(*(np.asarray(column, dtype=object) for column in columns), strict=True)
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) if names else "\n".join(lines))


def inputs_of(seed: int, rows: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)


def run_both(root: Path, *words: str, test: str = "public.csv") -> list[dict[str, Any]]:
    """Let both labs take part, each a command in a process of its own; return their summaries."""
    with commands(root) as start:
        both = [
            start("party", "run", "federation.toml", "--folder", f"lab-{node}", "--data",
                  f"{node}.csv", "--test-data", test, "--seed", str(SEED), *words)
            for node in (0, 1)
        ]  # fmt: skip
        for command in both:
            command.ends(0)
    return [json.loads((results_of(root, node) / "summary.json").read_bytes()) for node in (0, 1)]


def check_against_train(
    root: Path, roster: Roster, node_data: list[Any], module: nn.Module | None = None, **words: Any
) -> None:
    """Compare models and ledgers of both parties with those of `dpcsgp.train`."""
    twin = dpcsgp.train(
        module or initial_module(roster.config, roster.data),
        node_data,
        config=change_config(roster.config, {"privacy.seed": SEED}),
        num_examples=[40, 40],
        out=root / "twin",
        **words,
    )
    for node in (0, 1):
        folder = results_of(root, node)
        (mine,) = load_file(folder / "model.safetensors")["node_models"]
        theirs = load_file(twin.folder / "model.safetensors")["node_models"][node]
        assert torch.equal(mine, theirs), node
        assert releases_by_node(read_ledgers(folder / "ledger")) == {node: twin.releases()[node]}


def test_parties_learn_numbers_from_tables(tmp_path: Path) -> None:
    """The squared error stands everywhere where accuracy would mean nothing."""
    roster = make(tmp_path, 'loss = "mse"')
    names = ["a", "y", "b", "c", "d"]
    for name, seed in (("0", 0), ("1", 1), ("public", 2)):
        a, b, c, d = inputs_of(seed).T
        write(tmp_path / f"{name}.csv", names, a, 0.5 * a - b + 3, b, c, d)
    summaries = run_both(tmp_path, "--target", "y")
    for node, summary in enumerate(summaries):
        assert summary["stopped_because"] == "completed" and summary["handed_over"]
        assert summary["metric_directions"] == {"mean_squared_error": "lower"}
        assert 0 < summary["mean_squared_error_node_mean"] < 10
        assert not [key for key in summary if "accuracy" in key]
        status = json.loads((results_of(tmp_path, node) / "status.json").read_bytes())
        assert status["metric"] == "mean_squared_error" and len(status["curve"]) > 1
        page = (results_of(tmp_path, node) / "report.html").read_text()
        assert "mean squared error" in page and "accuracy" not in page.lower()
        text = (tmp_path / f"output-{node}.txt").read_text()
        assert "mean_squared_error, own model" in text and "accuracy" not in text
    table = [
        (inputs, (0.5 * inputs[:, 0] - inputs[:, 1] + 3).astype(np.float32))
        for inputs in map(inputs_of, (0, 1))
    ]
    check_against_train(tmp_path, roster, table, loss="mse")
    model = dpcsgp.load_model(results_of(tmp_path, 0), node=0)
    assert model(torch.zeros(2, 4)).shape == (2, 1)


def test_a_target_may_have_several_columns(tmp_path: Path) -> None:
    make(tmp_path, 'loss = "mse"\ntarget_shape = [2]')
    a, b, c, d = inputs_of(0).T
    write(tmp_path / "data.csv", ["u", "a", "b", "v", "c", "d"], a + b, a, b, c - d, c, d)

    def targets(*names: str) -> Any:
        given = OwnExamples(str(tmp_path / "data.csv"), names or None)
        return prepare_party(request_of(tmp_path, 0, given)).data.parts[0].targets  # type: ignore

    assert targets("v", "u").numpy() == pytest.approx(np.stack([c - d, a + b], 1))
    assert targets().numpy() == pytest.approx(np.stack([c, d], 1))
    for names, problem in (
        (["v"], "--target v: 1 columns, but a target has 2 numbers"),
        (["v", "v"], "every column once"),
        (["v", "w"], "--target w: expected one column of this name"),
    ):
        with pytest.raises(DataError, match=problem):
            targets(*names)
    np.savez(tmp_path / "wide.npz", x=inputs_of(0), y=np.zeros((40, 3)))
    with pytest.raises(DataError, match=r"shape \[3\], the roster says \[2\]"):
        prepare_party(request_of(tmp_path, 0, OwnExamples(str(tmp_path / "wide.npz"))))


def test_text_labels_have_the_order_of_the_roster_at_every_party(tmp_path: Path) -> None:
    """One lab has never seen a sick patient, the other writes no line of names."""
    order = ["well", "sick", "dead"]
    roster = make(tmp_path, f"classes = {json.dumps(order)}")
    labels = [np.where(inputs_of(0)[:, 0] > 0, 0, 2), np.arange(40) % 3]
    names = np.asarray(order)
    for node, header in ((0, ["a", "b", "c", "d", "state"]), (1, [])):
        write(tmp_path / f"{node}.csv", header, *inputs_of(node).T, names[labels[node]])
    np.savez(tmp_path / "public.npz", x=inputs_of(2), y=names[np.arange(40) % 3])
    for summary in run_both(tmp_path, test="public.npz"):
        assert 0 <= summary["accuracy_node_mean"] <= 1 and summary["handed_over"]
    for node in (0, 1):
        kept = json.loads((results_of(tmp_path, node) / "classes.json").read_bytes())
        assert kept == order
    check_against_train(
        tmp_path,
        roster,
        [(inputs_of(node), labels[node]) for node in (0, 1)],
    )


@pytest.mark.parametrize("kind", ["csv", "npz", "parquet"])
def test_a_label_that_nobody_agreed_on_is_refused_where_it_is(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 'classes = ["well", "sick"]')
    labels = np.asarray(["well", "sick"] * 20, dtype="<U9")
    labels[7] = "recovered"
    path = tmp_path / f"data.{kind}"
    if kind == "csv":
        write(path, ["a", "b", "c", "d", "state"], *inputs_of(0).T, labels)
    elif kind == "npz":
        np.savez(path, x=inputs_of(0), y=labels)
    else:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(inputs_of(0), columns=list("abcd")).assign(state=labels)
        path.touch()  # a parquet file without pyarrow: what pandas would read from it
        monkeypatch.setattr(pandas, "read_parquet", lambda source: frame)
    places = {"csv": "line 9, column 'state'", "npz": "example 7"}
    place = places.get(kind, "example 7, column 'state'")
    with pytest.raises(DataError, match=f"{place}: label 'recovered' is not among the 2"):
        prepare_party(request_of(tmp_path, 0, OwnExamples(str(path))))
    assert not (tmp_path / "lab-0" / "runs").exists()


def test_numbers_may_be_labels_too(tmp_path: Path) -> None:
    make(tmp_path, "classes = [7, 3, 5]")
    write(tmp_path / "data.csv", [], *inputs_of(0, 6).T, [3, 5, 7, 3, 5, 7])
    given = OwnExamples(str(tmp_path / "data.csv"))
    data: Any = prepare_party(request_of(tmp_path, 0, given)).data
    assert data.parts[0].targets.tolist() == [1, 2, 0, 1, 2, 0]
    make(tmp_path / "b", "num_classes = 3")
    write(tmp_path / "text.csv", ["a", "b", "c", "d", "y"], *inputs_of(0, 2).T, ["u", "v"])
    with pytest.raises(DataError, match="line 2, column 'y': 'u' is no number"):
        prepare_party(request_of(tmp_path / "b", 0, OwnExamples(str(tmp_path / "text.csv"))))


def visits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the visits of 30 patients: inputs, classes, and whose they are."""
    chance = np.random.default_rng(seed)
    whose = chance.permutation(np.repeat(np.arange(30), chance.integers(1, 6, 30)))
    inputs = inputs_of(seed, len(whose))
    return inputs, (inputs[:, 0] > 0).astype(int), whose


def test_parties_promise_privacy_to_whole_persons(tmp_path: Path) -> None:
    roster = make(tmp_path, CLASSES, PERSONS)
    tables = [visits(seed) for seed in (0, 1)]
    for node, (inputs, labels, whose) in enumerate(tables):
        patients = [f"patient-{number}" for number in whose]
        a, b, c, d = inputs.T
        write(
            tmp_path / f"{node}.csv", ["a", "id", "b", "c", "d", "y"], a, patients, b, c, d, labels
        )
    write(tmp_path / "public.csv", list("abcdy"), *inputs_of(2).T, np.arange(40) % 3)
    relation = "add or remove one person with all rows, declared number unchanged"
    for node, summary in enumerate(run_both(tmp_path, "--unit", "id")):
        assert summary["neighbouring_relation"] == relation and summary["handed_over"]
        folder = results_of(tmp_path, node)
        (ledger,) = (folder / "ledger").glob("node-*.jsonl")
        assert read_ledger(ledger).header.unit == "person"
        # Whose a row is stays where the rows are.
        told = [path for path in folder.rglob("*") if path.is_file()]
        assert told and not [path for path in told if b"patient-" in path.read_bytes()]
    data = [(inputs, labels) for inputs, labels, _ in tables]
    check_against_train(tmp_path, roster, data, unit=[whose for *_, whose in tables])


def test_whose_a_row_is_must_be_said_if_and_only_if_the_roster_asks(tmp_path: Path) -> None:
    make(tmp_path / "a", CLASSES, PERSONS)
    make(tmp_path / "b", CLASSES)
    inputs, labels, whose = visits(0)
    np.savez(tmp_path / "data.npz", x=inputs, y=labels, patient=whose)
    source = str(tmp_path / "data.npz")
    with pytest.raises(ConfigError, match=r"max_rows_per_unit = 3: .* --unit COLUMN"):
        prepare_party(request_of(tmp_path / "a", 0, OwnExamples(source)))
    with pytest.raises(ConfigError, match=r"--unit patient: the roster .* single examples"):
        prepare_party(request_of(tmp_path / "b", 0, OwnExamples(source, unit="patient")))
    with pytest.raises(DataError, match=r"no array 'person.*person=\.\.\."):
        prepare_party(request_of(tmp_path / "a", 0, OwnExamples(source, unit="person")))
    for unit in ("patient", whose.tolist()):  # by name, or as they are
        given = OwnExamples(source, unit=unit)
        data: Any = prepare_party(request_of(tmp_path / "a", 0, given)).data
        assert len(data.units.of(0)) == 30 and data.facts.unit == "person"
    assert not [*tmp_path.glob("*/lab-*/runs")]


def test_the_check_asks_whose_a_row_is(tmp_path: Path) -> None:
    make(tmp_path, 'loss = "mse"', PERSONS)
    inputs, labels, whose = visits(0)
    write(tmp_path / "data.csv", [*"abcd", "id", "y"], *inputs.T, whose, labels + 0.5)
    words = ["party", "check", "federation.toml", "--folder", "lab-0", "--seconds", "1"]

    def found(*more: str) -> str:
        with commands(tmp_path) as start:
            text = start(*words, *more).ends(1)  # the other lab is not up
        return next(line for line in text.splitlines() if " data: " in line)

    told = "inputs [4], targets: a number, mean squared error"
    assert found().startswith("-") and told in found()
    right = found("--data", "data.csv", "--unit", "id")
    assert right.startswith("PASS") and f"{told}; as many persons as declared" in right
    assert found("--data", "data.csv").startswith("FAIL") and "--unit" in found(
        "--data", "data.csv"
    )


def test_a_function_may_return_a_table_that_says_whose_a_row_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, CLASSES, PERSONS)
    (tmp_path / "own_visits.py").write_text(
        "import numpy as np, pandas as pd\n"
        "def load():\n"
        "    table = pd.DataFrame({name: np.arange(9.0) for name in 'abcd'})\n"
        "    return table.assign(id=['p', 'q', 'r'] * 3), np.arange(9) % 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_visits", None)
    given = OwnExamples("own_visits:load", unit="id")
    data: Any = prepare_party(request_of(tmp_path, 0, given)).data
    assert len(data.units.of(0)) == 3 and data.parts[0].inputs.shape == (9, 4)


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (["p", "", "q"], "node 0, example 1: its identifier is missing"),
        (["p", "NaN", "q"], "node 0, example 1: its identifier is missing"),
        ([*range(41)], "41 persons, but the card of lab-0 declares 40"),
    ],
)
def test_persons_that_nobody_can_tell_or_too_many_are_refused(
    tmp_path: Path, cells: list[Any], problem: str
) -> None:
    make(tmp_path, CLASSES, PERSONS)
    rows = inputs_of(0, len(cells)).T
    write(tmp_path / "data.csv", [*"abcd", "id", "y"], *rows, cells, [0] * len(cells))
    source = str(tmp_path / "data.csv")
    with pytest.raises(DpcsgpError, match=problem):
        prepare_party(request_of(tmp_path, 0, OwnExamples(source, unit="id")))
    with pytest.raises(DataError, match="--unit who: expected one column of this name"):
        prepare_party(request_of(tmp_path, 0, OwnExamples(source, unit="who")))
    assert not (tmp_path / "lab-0" / "runs").exists()


def test_a_person_whose_number_is_written_in_two_ways_is_one(tmp_path: Path) -> None:
    make(tmp_path, CLASSES, PERSONS)
    cells = ["7", "7.0", " 7", "8", "8"]
    write(tmp_path / "data.csv", [*"abcd", "id", "y"], *inputs_of(0, 5).T, cells, [0] * 5)
    given = OwnExamples(str(tmp_path / "data.csv"), unit="id")
    data: Any = prepare_party(request_of(tmp_path, 0, given)).data
    assert len(data.units.of(0)) == 2
    write(tmp_path / "data.csv", [*"abcd", "id", "y"], *inputs_of(0, 2).T, ["7", "7a"], [0] * 2)
    data = prepare_party(request_of(tmp_path, 0, given)).data
    assert len(data.units.of(0)) == 2


def test_one_row_of_a_csv_neither_splits_persons_nor_swallows_rows(tmp_path: Path) -> None:
    make(tmp_path, CLASSES, PERSONS)
    given = OwnExamples(str(tmp_path / "data.csv"), unit="id")
    cells = ["7", "7.0", "8", "8.0", "A12"]
    write(tmp_path / "data.csv", [*"abcd", "id", "y"], *inputs_of(0, 5).T, cells, [0] * 5)
    data: Any = prepare_party(request_of(tmp_path, 0, given)).data
    assert len(data.units.of(0)) == 3
    rows = [f"1,2,3,4,0,{name}" for name in ("a", '"b', "c", "d")]
    (tmp_path / "data.csv").write_text("\n".join(["a,b,c,d,y,id", *rows]), encoding="utf-8")
    given = OwnExamples(str(tmp_path / "data.csv"), target="y", unit="id")
    with pytest.raises(DataError, match=r"after line 2: this is no CSV"):
        prepare_party(request_of(tmp_path, 0, given))
    rows[3] += '"'
    (tmp_path / "data.csv").write_text("\n".join(["a,b,c,d,y,id", *rows]), encoding="utf-8")
    with pytest.raises(DataError, match=r"line 5: a cell goes on over several lines"):
        prepare_party(request_of(tmp_path, 0, given))
    (tmp_path / "data.csv").write_bytes("a,b,c,d,y,id\n1,2,3,4,0,J\u00fcrgen\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        prepare_party(request_of(tmp_path, 0, given))
