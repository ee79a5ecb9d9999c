"""What one party sees of a federation that it runs: progress, and who contributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpcsgp.console.reporter import ConsoleReporter
from dpcsgp.federation.contributions import Contribution
from dpcsgp.runs.data import Downloads
from dpcsgp.runs.design import RunDesign
from dpcsgp.runtime.reporting import ShowStanding


@final
class PartyReporter:
    """Shows a party's run: as that of any run, and who contributed in which rounds."""

    def __init__(self, console: Console) -> None:
        self._console, self._shown = console, ConsoleReporter(console)

    def downloads(self) -> AbstractContextManager[Downloads | None]:
        """Show a bar while data are fetched."""
        return self._shown.downloads()

    def plan(self, design: RunDesign) -> None:
        """Print what is about to happen."""
        self._shown.plan(design)

    def progress(self) -> AbstractContextManager[ShowStanding]:
        """Show one live line, with the names of those that are waited for."""
        return self._shown.progress()

    def say(self, text: str) -> None:
        """Print one sentence."""
        self._shown.say(text)

    def outcome(self, summary: Mapping[str, Any], folder: Path, page: Path | None) -> None:
        """Print the closing table, and who contributed."""
        self._shown.outcome(summary, folder, page)
        parts = [Contribution(**entry) for entry in summary["contributions"]]
        self._console.print(contribution_table(summary["party"], parts))
        if not summary["handed_over"]:
            rounds = f"{summary['rounds']} of {summary['rounds_planned']}"
            self._console.print(
                f"not finished: this is the model after round {rounds}, not the result of the "
                "federation. The same line again goes on where this start ended",
                style="yellow",
                soft_wrap=True,
                highlight=False,
            )


def contribution_table(party: str, parts: Sequence[Contribution]) -> Table:
    """Show whose messages are in a party's model."""
    title = f"whose messages are in the model of {party}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("party", "node", "heard", "rounds"):
        table.add_column(name)
    for part in parts:
        heard = {0: "itself", 1: "directly"}.get(part.distance, f"over {part.distance} edges")
        table.add_row(escape(part.party), f"{part.node}", heard, part.text)
    return table
