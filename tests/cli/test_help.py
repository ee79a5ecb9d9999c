"""`--help` of every command: examples that can be copied from a terminal of 80 columns."""

from __future__ import annotations

import inspect
import re

import pytest
from typer.testing import CliRunner

from dpcsgp.cli.main import cli

COMMANDS = {
    info.name: info.callback
    for info in cli.registered_commands
    if info.callback is not None and "```" in (info.callback.__doc__ or "")
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_example_stands_on_a_line_of_its_own(name: str) -> None:
    blocks = re.findall(r"```\n(.*?)```", inspect.getdoc(COMMANDS[name]) or "", flags=re.DOTALL)
    shown = CliRunner().invoke(cli, [name, "--help"], env={"COLUMNS": "80"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    for example in "".join(blocks).splitlines():
        assert example.strip() in lines
