"""`dpcsgp report` as a person or a script calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dpcsgp.cli.report import report
from dpcsgp.errors import DataError

app = typer.Typer()
app.command()(report)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "summary.json").write_text('{"algorithm": "dp-csgp", "private": true, "epsilon": 0.5}')
    (path / "metrics.jsonl").write_text(
        '{"step": 0, "accuracy_node_mean": 0.1}\n{"step": 5, "accuracy_node_mean": 0.8}\n'
    )
    return path


def test_it_prints_where_the_page_is(folder: Path) -> None:
    result = CliRunner().invoke(app, [str(folder)])
    assert result.exit_code == 0
    assert Path(result.stdout.strip()) == folder / "report.html"
    assert "80.0\xa0%" in (folder / "report.html").read_text()


def test_json_names_the_page_and_the_folders(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, [str(folder), "--out", str(out), "--json"])
    assert json.loads(result.stdout) == {"report": str(out), "folders": [str(folder)]}
    assert out.exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(result.exception, DataError)
    assert result.exception.exit_code == 2


def test_help_has_an_example_and_no_folder_is_bad_input() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "dpcsgp report runs/first" in result.stdout
    assert CliRunner().invoke(app, []).exit_code == 2


def test_help_needs_neither_torch_nor_matplotlib() -> None:
    heavy = {"torch", "matplotlib", "jinja2"}
    code = f"import dpcsgp.cli.report, sys; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
