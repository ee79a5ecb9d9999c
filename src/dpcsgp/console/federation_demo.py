"""The demonstration of a federation at the terminal: one row per party, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, final

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dpcsgp.federation.demonstration import DemoResult

_PLAIN_SECONDS: Final = 5.0  # between two tables where there is no terminal


@final
class DemoView:
    """Shows the parties live; without a terminal a table every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._next = console, 0.0
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one sentence above the table."""
        self._console.print(text, style="yellow", soft_wrap=True, highlight=False)

    def show(self, statuses: Sequence[dict[str, Any]]) -> None:
        """Show where all parties stand."""
        if self._live is not None:
            self._live.update(_standing_table(statuses))
        elif time.monotonic() > self._next and statuses:
            self._next = time.monotonic() + _PLAIN_SECONDS
            self._console.print(_standing_table(statuses))


def _standing_table(statuses: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("party", "state", "step", "eps", "sent per edge", "waiting for"):
        table.add_column(name)
    for status in statuses:
        gone = not status["running"] and status["phase"] != "ended"
        table.add_row(
            status["party"],
            "gone" if gone else status["phase"],
            f"{status['step']}/{status['steps']}",
            f"{float(status['epsilon']):.3f}",
            f"{status['bytes_per_edge'] / 1e3:.1f} kB",
            "" if gone else ", ".join(status["waiting_for"]),
        )
    return table


def demo_table(results: Sequence[DemoResult]) -> Table:
    """Show what everybody ended with."""
    title = "how it ended"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("party", "accuracy", "verified eps", "sent", "releases", "starts", "as it should"):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(
            result.party,
            f"{100 * result.accuracy:.1f} %",
            f"{result.epsilon:.3f}",
            f"{result.bytes_sent / 1e3:.1f} kB",
            f"{result.releases}",
            f"{result.starts}",
            "; ".join(result.faults) or "yes",
        )
    return table
