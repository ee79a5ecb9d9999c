"""`--help` of every command: examples that can be copied from a terminal of 80 columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dpcsgp.cli.main import cli

WIDEST = 78  # the frame of a help page takes two columns of 80


def commands(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every command with the words that call it."""
    for info in app.registered_commands:
        assert info.callback is not None
        yield (*path, info.name or info.callback.__name__), info.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None and isinstance(group.name, str)
        yield from commands(group.typer_instance, (*path, group.name))


COMMANDS = {" ".join(path): callback for path, callback in commands(cli)}


def examples(callback: Callable[..., Any]) -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", inspect.getdoc(callback) or "", flags=re.DOTALL)
    return [str(line) for line in "".join(blocks).splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_fit_a_line(name: str) -> None:
    lines = examples(COMMANDS[name])
    assert lines, "a help page needs an example in ``` quotes"
    assert max(map(len, lines)) <= WIDEST
    shown = CliRunner().invoke(cli, [*name.split(), "--help"], env={"COLUMNS": "80"}).stdout
    printed = [line.strip() for line in shown.splitlines()]
    for example in lines:
        assert example.strip() in printed
