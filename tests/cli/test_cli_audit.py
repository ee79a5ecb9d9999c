"""`dpcsgp audit` as a user meets it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli

QUICK = [
    "--trials",
    "300",
    "--set",
    "algorithm.steps=4",
    "--set",
    "privacy.seed=1",
    "--set",
    "compression.spec=none",
]
# With two steps and few trials the attack says nothing: what follows is about the mechanism.
DRAWN = ["--trials", "80", "--set", "algorithm.steps=2", *QUICK[4:], "--set", "privacy.epsilon=1"]
PLANTED = [
    "rate",
    "double-rate",
    "reused-noise",
    "same-batch",
    "mean-clipping",
    "drawn-size",
    "copied-noise",
]


def test_a_bound_of_zero_is_not_sold_as_passed() -> None:
    done = CliRunner().invoke(cli, ["audit", *DRAWN, "--draws", "10000"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert (
        "not informative at this eps: a bound of 0.00 beside 1.00; the mechanism audit below is "
        "what" in words
    )
    assert "most that these trials can show" in words
    assert "reported eps" in words
    assert "lower bound on eps (95 %)" in words
    assert "the attack on the messages was not informative" in words
    assert "noise: steps 2k, 2k+1" in words
    assert "attacked" not in words  # messages of SGD are what is sent
    assert "false alarm in one audit out of 100000" in words
    assert max(len(line) for line in done.output.splitlines()) <= 80
    assert "…" not in done.output  # nothing was cut


def test_what_is_attacked_is_said_where_messages_are_not_those_of_sgd() -> None:
    line = ["audit", *DRAWN, "--draws", "10000", "--set", "algorithm.optimizer=adam"]
    told = CliRunner().invoke(cli, line, env={"COLUMNS": "80"}).output
    words = " ".join(told.replace("│", " ").split())
    assert "attacked the releases, as SGD would send them" in words
    assert "made of the same releases by Adam, a public rule" in words
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_that_the_attack_misses_at_eps_1_end_with_exit_code_1(fault: str) -> None:
    done = CliRunner().invoke(
        cli, ["audit", *DRAWN, "--draws", "10000", "--break", fault, "--json"]
    )
    assert done.exit_code == 1, done.output
    answer = json.loads(done.output)
    assert answer["passed"] is answer["mechanism"]["passed"] is False
    assert any(check["flagged"] for check in answer["mechanism"]["checks"])
    assert set(answer["mechanism"]["checks"][0]) == {
        "name",
        "unit",
        "seen",
        "smallest",
        "p_value",
        "flagged",
    }


@pytest.mark.slow
def test_the_demos_promise_holds() -> None:
    done = CliRunner().invoke(cli, ["audit", *QUICK])
    assert done.exit_code == 0, done.output
    assert "passed: the mechanism keeps its law" in done.output
    assert "FLAGGED" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["noise", "clipping", "order"])
def test_a_broken_mechanism_ends_with_exit_code_1(fault: str) -> None:
    done = CliRunner().invoke(cli, ["audit", *QUICK, "--break", fault, "--json"])
    assert done.exit_code == 1, done.output
    answer = json.loads(done.output)
    assert answer["fault"] == fault
    assert answer["passed"] is False
    assert answer["epsilon_lower_bound"] > answer["epsilon_claimed"]
    assert answer["neighbouring_relation"] == "add or remove one example, declared number unchanged"


def test_a_flagged_check_is_named_in_the_table() -> None:
    done = CliRunner().invoke(
        cli, ["audit", *DRAWN, "--draws", "10000", "--break", "drawn-size"], env={"COLUMNS": "80"}
    )
    assert done.exit_code == 1, done.output
    assert "BROKEN ON PURPOSE" in done.output
    assert "drawn-size: divided by the drawn batch" in done.output  # the cell wraps after this
    row = next(line for line in done.output.splitlines() if line.startswith("drawn size: release"))
    assert row.rstrip().endswith("FLAGGED")
    assert "FAILED: mechanism" in done.output
    assert "passed" not in done.output


def test_wrong_arguments_are_refused() -> None:
    done = CliRunner().invoke(cli, ["audit", "--break", "gravity", *QUICK[2:]])
    assert "expected one of noise, clipping, order, rate, double-rate" in str(done.exception)
    assert CliRunner().invoke(cli, ["audit", "--trials", "3"]).exit_code == 2
    assert CliRunner().invoke(cli, ["audit", "--draws", "3"]).exit_code == 2


def test_help_names_every_fault_that_can_be_planted() -> None:
    from dpcsgp.auditing import FAULTS

    done = CliRunner().invoke(cli, ["audit", "--help"], env={"COLUMNS": "100"})
    assert all(fault in done.output for fault in FAULTS)
    assert "dpcsgp audit --draws 400000 --trials 80" in done.output
