"""`dpcsgp reproduce` at the terminal."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError
from dpcsgp.reproduction import EXPERIMENTS


def test_list_names_every_experiment() -> None:
    done = CliRunner().invoke(cli, ["reproduce", "list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in EXPERIMENTS)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(cli, ["reproduce", "fig9"])
    assert isinstance(done.exception, ConfigError)
    assert "fig9" in str(done.exception) and "frontier" in str(done.exception)


@pytest.mark.slow
def test_privacy_writes_table_figure_and_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["reproduce", "privacy", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "privacy" / "table.csv").open()))
    assert len(rows) == 6
    found = {(row["claimed_eps"], row["steps"]): float(row["verified_eps"]) for row in rows}
    assert found["0.5", "10000"] == pytest.approx(345, rel=0.01)
    assert found["0.2", "100000"] == pytest.approx(0.29, rel=0.01)
    page = (tmp_path / "privacy" / "README.md").read_text()
    assert "dpcsgp reproduce privacy --quick --repeats 1" in page and "Shortened" in page
    assert all(
        (tmp_path / "privacy" / f"figure.{ending}").stat().st_size > 1000
        for ending in ("png", "svg", "pdf")
    )
