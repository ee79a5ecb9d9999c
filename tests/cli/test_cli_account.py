"""`dpcsgp account`: ledgers, planned releases, calibration, the paper's rule; tables and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dpcsgp.cli.account import account
from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy.accounting import ReleaseEvent, composed_epsilon
from dpcsgp.privacy.ledger import LedgerBook

EVENT = ReleaseEvent("poisson", 0.25, 8.0)
PLAN = [
    "--noise-multiplier",
    "1.1",
    "--sampling-rate",
    "0.01",
    "--steps",
    "1000",
    "--delta",
    "1e-5",
]

app = typer.Typer(pretty_exceptions_enable=False)
app.command("account")(account)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def as_json(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, steps in (("first", 4), ("second", 9)):
        book = LedgerBook(
            tmp_path / name / "ledger", [0, 1], name, deltas=[1e-4] * 2, private=name == "first"
        )
        for step in range(steps):
            book.record(step, 0, {0: EVENT, 1: EVENT} if step else {1: EVENT})
        book.close()
    return tmp_path


def test_planned_releases() -> None:
    answer = as_json(*PLAN)
    assert answer["epsilon"] == pytest.approx(1.515, abs=0.01)
    assert answer["neighbouring_relation"] == "add or remove one example, declared number unchanged"
    assert "add or remove one example" in run(*PLAN)
    assert "1.52" in run(*PLAN)


def test_uniform_sampling_states_its_relation_and_costs_more() -> None:
    answer = as_json(*PLAN, "--sampling", "uniform")
    assert answer["neighbouring_relation"] == "replace one example"
    assert answer["epsilon"] > as_json(*PLAN)["epsilon"]


def test_calibration_accepts_a_fraction() -> None:
    answer = as_json("--epsilon", "0.5", "--sampling-rate", "2048/6000", "--steps", "30")
    assert answer["delta"] == 1e-4
    assert 0.495 < answer["epsilon"] <= 0.5
    assert answer["noise_multiplier"] == pytest.approx(11.2, abs=0.1)


def test_the_papers_rule_shows_claimed_beside_verified() -> None:
    arguments = ("--paper", "--epsilon", "0.5", "--num-examples", "6000", "--steps", "10000")
    answer = as_json(*arguments)
    assert answer["epsilon_claimed"] == 0.5
    assert answer["epsilon"] >= 300
    assert answer["noise_multiplier"] == pytest.approx(0.1012, abs=1e-4)
    assert answer["noise_multiplier_needed"] == pytest.approx(0.547, abs=0.003)
    output = run(*arguments)
    assert "eps claimed" in output
    assert "no meaningful privacy: above 50" in output


def test_one_run(results: Path) -> None:
    answer = as_json(results / "first")
    assert [row["releases"] for row in answer["nodes"]] == [3, 4]
    assert (
        answer["epsilon"] == answer["nodes"][1]["epsilon"] == composed_epsilon([(EVENT, 4)], 1e-4)
    )
    assert (answer["delta"], answer["private"], answer["notes"]) == (1e-4, True, [])


def test_several_runs_add_up_and_a_seeded_one_is_named(results: Path) -> None:
    answer = as_json(results / "first", results / "second", "--delta", "1e-5")
    assert answer["epsilon"] == composed_epsilon([(EVENT, 13)], 1e-5)
    assert [row["runs"] for row in answer["nodes"]] == [2, 2]
    assert answer["private"] is False
    output = run(results / "first", results / "second")
    assert "eps spent, per node" in output
    assert "came from a seed" in " ".join(output.split())


def test_a_torn_record_is_mentioned(results: Path) -> None:
    path = results / "first" / "ledger" / "node-0000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    before = path.read_bytes()
    answer = as_json(results / "first")
    assert answer["nodes"][0]["releases"] == 3
    assert "torn and counts as spent" in answer["notes"][0]
    assert path.read_bytes() == before  # reading repairs nothing


def test_no_noise_is_null_in_json_and_a_word_in_the_table(tmp_path: Path) -> None:
    arguments = ("--noise-multiplier", "0", "--sampling-rate", "0.5", "--steps", "3")
    assert as_json(*arguments)["epsilon"] is None
    assert "infinite (no privacy)" in run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give ledgers, or --noise-multiplier, or --epsilon"),
        (["--noise-multiplier", "1"], "--sampling-rate: needed"),
        (["--noise-multiplier", "1", "--epsilon", "1"], "one of them"),
        (
            ["--epsilon", "0.5", "--sampling-rate", "half", "--steps", "3"],
            "--sampling-rate = 'half'",
        ),
        (["--epsilon", "0.5", "--sampling-rate", "1/0", "--steps", "3"], "--sampling-rate = '1/0'"),
        (["--epsilon", "-1", "--sampling-rate", "0.5", "--steps", "3"], r"privacy\.epsilon = -1"),
        ([*PLAN[:-1], "2"], r"privacy\.delta = 2"),
        ([*PLAN, "--sampling", "shuffle"], r"privacy\.sampling = 'shuffle'"),
        (["--paper", "--epsilon", "0.5", "--steps", "10"], "--num-examples: needed with --paper"),
        (
            ["--paper", "--epsilon", "0.5", "--steps", "10", "--num-examples", "0"],
            "num_examples = 0",
        ),
        (
            ["--paper", "--epsilon", "1", "--steps", "9", "--num-examples", "9", "--delta", "0"],
            r"privacy\.delta = 0",
        ),
        (["nowhere"], "no such file or folder"),
        (["nowhere", "--steps", "3"], "--steps: not used with ledgers"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2


def test_a_damaged_ledger_is_refused(results: Path) -> None:
    path = results / "first" / "ledger" / "node-0001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":5'))
    with pytest.raises(LedgerError, match=r"node-0001\.jsonl, line 3"):
        run(results / "first")


def test_help_has_examples_and_imports_nothing_heavy() -> None:
    assert "dpcsgp account --paper" in run("--help")
    heavy = {"torch", "scipy", "numpy", "dp_accounting"}
    code = f"import sys, dpcsgp.cli.account; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
