"""`dpcsgp config new`: the file explains every setting and is the defaults."""

from __future__ import annotations

import itertools
from pathlib import Path

from typer.testing import CliRunner

from dpcsgp.cli.main import cli
from dpcsgp.config import Config, load_config
from dpcsgp.errors import ConfigError
from dpcsgp.runs.starting_config import EXPLAINED


def test_a_new_file_holds_the_defaults_and_explains_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    done = CliRunner().invoke(cli, ["config", "new", str(file)])
    assert done.exit_code == 0 and "dpcsgp run" in done.stdout
    assert load_config(file).flat() == Config().flat()
    assert set(EXPLAINED) == set(Config().flat()) - {"privacy.seed"}
    lines = file.read_text().splitlines()
    for line, after in itertools.pairwise(lines):
        if " = " in after and not after.startswith("#"):
            assert line.startswith("# "), after


def test_changes_are_checked_and_nothing_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    words = ["config", "new", str(file), "--set", "task.name=digits"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert load_config(file).task.name == "digits"
    before = file.read_bytes()
    for again in (words, ["config", "new", str(tmp_path / "b"), "--set", "task.nam=digits"]):
        assert isinstance(CliRunner().invoke(cli, again).exception, ConfigError)
    assert file.read_bytes() == before and not (tmp_path / "b").exists()
