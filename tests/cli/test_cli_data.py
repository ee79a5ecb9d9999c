"""`dpcsgp data` lists and fetches, and imports nothing heavy before it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.data import app
from dpcsgp.errors import ConfigError

runner = CliRunner()


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DPCSGP_CACHE", str(tmp_path))
    return tmp_path


def test_list_as_json(empty_cache: Path) -> None:
    result = runner.invoke(app, ["list", "--json"])
    assert result.exit_code == 0
    listing = json.loads(result.stdout)
    assert listing["cache"] == str(empty_cache)
    states = {row["name"]: row["state"] for row in listing["datasets"]}
    assert states == {
        "mnist": "not fetched",
        "fashion_mnist": "not fetched",
        "cifar10": "not fetched",
        "digits": "ready",
    }


def test_list_as_table(empty_cache: Path) -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    for word in ("mnist", "cifar10", "digits", "ready", "not fetched", "60,000", "cache folder"):
        assert word in result.stdout


def test_fetch_what_needs_no_file(empty_cache: Path) -> None:
    result = runner.invoke(app, ["fetch", "digits"])
    assert result.exit_code == 0
    assert "nothing to fetch" in result.stdout
    assert not list(empty_cache.iterdir())


def test_fetch_without_a_name_or_with_a_wrong_one() -> None:
    assert isinstance(runner.invoke(app, ["fetch"]).exception, ConfigError)
    wrong = runner.invoke(app, ["fetch", "mnst"])
    assert isinstance(wrong.exception, ConfigError)
    assert "did you mean 'mnist'" in str(wrong.exception)


@pytest.mark.parametrize("command", ["list", "fetch"])
def test_help_has_an_example(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"dpcsgp data {command}" in result.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, dpcsgp.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
