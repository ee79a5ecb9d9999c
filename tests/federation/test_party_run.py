"""`dpcsgp party run | check | status` with own data: what is refused, with nothing spent."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))
from made_parties import PLAN
from running import make_federation, request_of

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError, DataError, DpcsgpError
from dpcsgp.federation import roster as roster_module
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_run import prepare_party, results_folder
from dpcsgp.federation.roster import Roster
from dpcsgp.runs.data import BuiltinData, load_builtin_data
from dpcsgp.tasks import Supervised

SHAPE = (80, 4)


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in words], env={"COLUMNS": "100"})
    if isinstance(result.exception, DpcsgpError):
        raise result.exception
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two parties that approved a roster for data of their own."""
    monkeypatch.chdir(tmp_path)
    make_federation(tmp_path, 2, PLAN, examples=90)
    save()
    return tmp_path


def save(x: np.ndarray | None = None, y: np.ndarray | None = None) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=SHAPE) if x is None else x
    np.savez("data.npz", x=x, y=random.integers(0, 3, len(x)) if y is None else y)


def start(data: str = "data.npz", *more: str) -> Result:
    return run("party", "run", "federation.toml", "--folder", "lab-0", "--data", data, *more)


def forget_consent() -> None:
    shutil.rmtree("lab-0/consents")


def let_it_end() -> None:
    text = Path("federation.toml").read_text()
    ends = str(Roster.parse(text).ends)
    Path("federation.toml").write_text(text.replace(f"ends = {ends}", "ends = 2020-01-01"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (forget_consent, "has not approved this roster"),
        (let_it_end, "has not approved|ended on"),
        (lambda: save(np.zeros((80, 5))), r"shape \[5\], the roster says \[4\]"),
        (lambda: save(np.zeros((91, 4))), "91 examples, but the card of lab-0 declares 90"),
        (lambda: save(y=np.full(80, 3)), "data.npz, example 0: label 3, but there are 3 classes"),
        (lambda: save(y=np.full(80, 0.5)), "no whole number"),
        (lambda: save(y=np.zeros(79)), "80 inputs but 79 targets"),
        (lambda: save(y=np.array(["a"] * 80)), "targets are no numbers"),
        (lambda: save(np.array([{}] * 80)), "cannot be read"),
        (lambda: Path("data.npz").write_bytes(b"nothing"), "cannot be read"),
        (lambda: np.savez("data.npz", a=np.zeros(3)), "no array"),
        (lambda: os.remove("data.npz"), "no such file"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_spent(
    here: Path, spoil: Callable[[], object], problem: str
) -> None:
    spoil()
    with pytest.raises((ConfigError, DataError), match=problem) as caught:
        start()
    assert caught.value.exit_code == 2
    assert not (here / "lab-0" / "runs").exists()


def test_an_expired_roster_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = datetime.date.today() + datetime.timedelta(days=400)
    monkeypatch.setattr(roster_module, "utc_today", lambda: late)
    with pytest.raises(ConfigError, match=r"ended on|valid from"):
        start()
    assert not (here / "lab-0" / "runs").exists()


def test_own_data_must_be_named_and_those_of_a_data_set_must_not(here: Path) -> None:
    with pytest.raises(ConfigError, match="give --data FILE"):
        run("party", "run", "federation.toml", "--folder", "lab-0")
    make_federation(here / "b", 2)
    with pytest.raises(ConfigError, match="takes its share"):
        prepare_party(request_of(here / "b", 0, OwnExamples("data.npz")))


def test_a_party_forgets_the_examples_of_others(here: Path) -> None:
    make_federation(here / "b", 2)
    one, other = (prepare_party(request_of(here / "b", node)).data for node in (0, 1))
    assert isinstance(one, BuiltinData) and isinstance(other, BuiltinData)
    whole = load_builtin_data(request_of(here / "b", 0).roster.config)
    for node, data in enumerate((one, other)):
        own = whole.parts[node]
        assert torch.equal(data.inputs, whole.inputs[own]) and len(own) < len(whole.inputs)
        assert torch.equal(data.labels, whole.labels[own])
        assert data.inputs.untyped_storage().nbytes() < whole.inputs.untyped_storage().nbytes()
    task = one.task(nn.Identity(), [0])
    assert isinstance(task, Supervised) and torch.equal(task.inputs, one.inputs)


def test_checkpoints_are_needed(here: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every = 0"):
        make_federation(here / "b", 2, PLAN + "[run]\ncheckpoint_every = 0\n", examples=90)


def test_a_roster_has_one_results_folder(here: Path) -> None:
    """A second one would have an empty ledger, and everything would be released again."""
    request = request_of(here, 0, OwnExamples("data.npz"))
    place = results_folder(request)
    assert results_folder(request) == place
    with pytest.raises(ConfigError, match="a second folder would release everything again"):
        start("data.npz", "--out", "elsewhere")
    with pytest.raises(ConfigError, match=r"privacy.seed = 6: the run in .* began with 5"):
        start("data.npz", "--seed", "6")
    # Moved: found where it is said to be. Gone: nothing is begun anew.
    place.path.rename(here / "moved")
    with pytest.raises(ConfigError, match="is gone, and with it the ledger"):
        start("data.npz", "--seed", "5")
    moved = request_of(here, 0, OwnExamples("data.npz"))
    assert results_folder(replace(moved, out=here / "moved")).path == here / "moved"
    assert results_folder(moved).path == here / "moved"


def test_tables_are_read_with_names_and_without(here: Path) -> None:
    rows = ["a,kind,b,c,d", *(f"{i},{i % 3},1.5,2,-3e-1" for i in range(20))]
    Path("data.csv").write_text("\n".join(rows))
    data = prepare_party(request_of(here, 0, OwnExamples("data.csv", "kind"))).data
    inputs, targets = data.parts[0].inputs, data.parts[0].targets  # type: ignore[attr-defined]
    assert inputs[4].tolist() == pytest.approx([4, 1.5, 2, -0.3])
    assert targets.tolist() == [i % 3 for i in range(20)]
    Path("data.csv").write_text("\n".join(f"{i},1.5,2,-3e-1,{i % 3}" for i in range(20)))
    data = prepare_party(request_of(here, 0, OwnExamples("data.csv"))).data
    assert data.parts[0].targets.tolist() == targets.tolist()  # type: ignore[attr-defined]


def test_parquet_is_read_where_pandas_can(here: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({name: np.arange(9.0) for name in "abcd"})
    frame.assign(kind=np.arange(9) % 3).to_parquet("data.parquet")
    data = prepare_party(request_of(here, 0, OwnExamples("data.parquet", "kind"))).data
    assert len(data.parts[0]) == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        ("a,b\n1,x\n", None, "line 2, column 'b': 'x' is no number"),
        ("a,b\n1,\n", None, "line 2, column 'b': '' is no number"),
        ("a,b\n1,2,3\n", None, "line 2: 3 values, the first line has 2"),
        ("a,b\n1,nan\n", None, "'nan' is no number"),
        ("a,b\n1,2\n", "c", "expected one column of this name"),
        (",".join(f"f{n}" for n in range(30)) + ",y\n", "c", r"f19, \.\.\. y \(31 columns\)"),
        ("1,2\n", "c", "has no line of names"),
        ("a\n1\n", None, "one column"),
        ("", None, "is empty"),
    ],
)
def test_wrong_tables_are_refused(here: Path, text: str, target: str | None, problem: str) -> None:
    Path("data.csv").write_text(text)
    with pytest.raises(DataError, match=problem):
        prepare_party(request_of(here, 0, OwnExamples("data.csv", target)))


def test_a_function_gives_the_data(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import numpy as np\ndef load():\n    return np.zeros((9, 4)), np.arange(9) % 3\n"
    Path("own_examples.py").write_text(text)
    with pytest.raises(DataError, match="put its folder on PYTHONPATH"):
        prepare_party(request_of(here, 0, OwnExamples("own_examples:missing")))
    monkeypatch.syspath_prepend(here)
    sys.modules.pop("own_examples", None)
    data = prepare_party(request_of(here, 0, OwnExamples("own_examples:load"))).data
    assert len(data.parts[0]) == 9  # type: ignore[attr-defined]


def test_the_check_names_what_fails_and_the_remedy(here: Path) -> None:
    words = ("party", "check", "federation.toml", "--folder", "lab-0", "--data")
    result = run(*words, "data.npz")
    assert result.exit_code == 1
    lines = dict(line[6:].split(": ", 1) for line in result.stdout.splitlines())
    assert "is its `party run` up" in lines["lab-1"]
    assert "can be listened on" in lines["own address"] and "MB free" in lines["disk"]
    assert [line[:4] for line in result.stdout.splitlines()] == [
        *["PASS"] * 5, "WARN", *["PASS"] * 2, "FAIL",
    ]  # fmt: skip
    save(np.zeros((80, 5)))
    found = json.loads(run(*words, "data.npz", "--json").stdout)
    failed = {each["subject"] for each in found["findings"] if each["passed"] is False}
    assert failed == {"data", "lab-1"} and not found["passed"]
    forget_consent()
    assert "FAIL  consent" in run(*words, "data.npz").stdout


def test_there_is_no_status_before_the_first_start(here: Path) -> None:
    with pytest.raises(ConfigError, match="has not run a roster yet"):
        run("party", "status", "--folder", "lab-0")
