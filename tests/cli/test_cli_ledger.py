"""`dpcsgp ledger head` and `--expect-head`: heads kept elsewhere expose an older copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy.accounting import ReleaseEvent, composed_epsilon
from dpcsgp.privacy.ledger import LedgerBook

EVENT = ReleaseEvent("poisson", 0.25, 8.0)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        cli, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def record(folder: Path, steps: int) -> Path:
    book = LedgerBook(folder / "ledger", [0, 1], "9f3c", deltas=[1e-4] * 2)
    for step in range(steps):
        book.record(step, 0, {0: EVENT, 1: EVENT})
    book.close()
    return folder


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """A results folder with 7 releases per node; `older` beside it has the first 4 of them."""
    shutil.copytree(record(tmp_path / "newest", 4), tmp_path / "older")
    return record(tmp_path / "newest", 3)


@pytest.fixture(params=["file", "words"])
def expected(request: pytest.FixtureRequest, newest: Path, tmp_path: Path) -> list[str]:
    """The heads of the newest folder, as options."""
    if request.param == "file":
        (tmp_path / "heads.json").write_text(run("ledger", "head", newest, "--json"))
        return ["--expect-head", str(tmp_path / "heads.json")]
    words = [line.split()[1] for line in run("ledger", "head", newest).splitlines()[1:]]
    return [option for word in words for option in ("--expect-head", word)]


def test_heads_are_printed_node_by_node(newest: Path) -> None:
    rows = json.loads(run("ledger", "head", newest, "--json"))["ledgers"]
    assert [(row["run_id"], row["node"], row["count"]) for row in rows] == [
        ("9f3c", 0, 7),
        ("9f3c", 1, 7),
    ]
    lines = run("ledger", "head", newest).splitlines()
    assert lines[1:] == [f"9f3c {row['node']}:7:{row['head']}" for row in rows]


def test_account_refuses_an_older_copy(newest: Path, expected: list[str]) -> None:
    assert json.loads(run("account", newest, *expected, "--json"))["nodes"][1]["releases"] == 7
    with pytest.raises(LedgerError, match=r"node 0: .*older copy"):
        run("account", newest.with_name("older"), *expected)
    run("account", newest.with_name("older"), newest, *expected)  # the newest is among them


@pytest.mark.parametrize("command", ["run", "launch"])
def test_resume_refuses_an_older_copy(newest: Path, expected: list[str], command: str) -> None:
    with pytest.raises(LedgerError, match=r"node 0: .*older copy"):
        run(command, "--resume", "--out", newest.with_name("older"), *expected)
    with pytest.raises(
        ConfigError, match="holds no run"
    ):  # the ledgers are right, the next check refuses
        run(command, "--resume", "--out", newest, *expected)


def test_bad_heads_are_named(newest: Path, tmp_path: Path) -> None:
    for name, text in (
        ("words", "hello"),
        ("list", "[]"),
        ("none", '{"ledgers": []}'),
        ("row", '{"ledgers": [1]}'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"--expect-head = .*{name}: holds no heads"):
            run("account", newest, "--expect-head", tmp_path / name)
    with pytest.raises(ConfigError, match="expected NODE:COUNT:HEAD"):
        run("account", newest, "--expect-head", "0:7:abc")
    with pytest.raises(ConfigError, match="--expect-head: give the ledgers"):
        run(
            "account",
            "--expect-head",
            "0:7:abc",
            "--epsilon",
            "1",
            "--sampling-rate",
            "0.1",
            "--steps",
            "3",
        )
    for command in ("run", "launch"):
        with pytest.raises(ConfigError, match="--expect-head: only with --resume"):
            run(command, "--out", tmp_path / "new", "--expect-head", "0:7:abc")


def test_account_adds_forks_and_says_so(newest: Path) -> None:
    older = record(newest.with_name("older"), 5)
    answer = json.loads(run("account", newest, older, "--json"))
    assert answer["epsilon"] == composed_epsilon([(EVENT, 4 + 3 + 5)], 1e-4)
    assert [(row["runs"], row["releases"]) for row in answer["nodes"]] == [(1, 12), (1, 12)]
    text = " ".join(run("account", newest, older).split())
    assert text.count("note: fork:") == 2
    assert "after 4 releases; its 3 further releases are added" in text


def test_account_names_a_ledger_that_was_started_again(newest: Path) -> None:
    again = record(newest.with_name("again"), 2)
    answer = json.loads(run("account", newest, again, "--json"))
    assert answer["epsilon"] == composed_epsilon([(EVENT, 7 + 2)], 1e-4)
    assert len([note for note in answer["notes"] if "share no line" in note]) == 2
