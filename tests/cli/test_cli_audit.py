"""`dpcsgp audit` as a user meets it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli

QUICK = ["--trials", "300", "--set", "algorithm.steps=4", "--set", "privacy.seed=1", "--set", "compression.spec=none"]


@pytest.mark.slow
def test_the_demos_promise_holds() -> None:
    done = CliRunner().invoke(cli, ["audit", *QUICK])
    assert done.exit_code == 0, done.output
    assert "passed" in done.output
    assert "reported eps" in done.output
    assert "lower bound on eps (95 %)" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["noise", "clipping", "order"])
def test_a_broken_mechanism_ends_with_exit_code_1(fault: str) -> None:
    done = CliRunner().invoke(cli, ["audit", *QUICK, "--break", fault, "--json"])
    assert done.exit_code == 1, done.output
    answer = json.loads(done.output)
    assert answer["fault"] == fault
    assert answer["passed"] is False
    assert answer["epsilon_lower_bound"] > answer["epsilon_claimed"]
    assert answer["neighbouring_relation"] == "add or remove one example"


def test_wrong_arguments_are_refused() -> None:
    done = CliRunner().invoke(cli, ["audit", "--break", "gravity", *QUICK[2:]])
    assert "expected one of noise, clipping, order" in str(done.exception)
    assert CliRunner().invoke(cli, ["audit", "--trials", "3"]).exit_code == 2
