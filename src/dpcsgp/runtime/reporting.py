"""Who is told how a run goes. The runtime tells; what is printed is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, final

from dpcsgp.runs.data import Downloads
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.wording import Standing, outcome_rows, plan_rows

ShowStanding = Callable[[Standing], None]


class Reporter(Protocol):
    """Hears of a run's stages, in this order; all it hears is public."""

    def downloads(self) -> AbstractContextManager[Downloads | None]:
        """Return what is told of downloads while data are loaded."""
        ...

    def plan(self, design: RunDesign) -> None:
        """Hear what is about to happen."""
        ...

    def progress(self) -> AbstractContextManager[ShowStanding]:
        """Return what is told after every step."""
        ...

    def say(self, text: str) -> None:
        """Hear one sentence, such as that the run will stop after this step."""
        ...

    def outcome(self, summary: Mapping[str, Any], folder: Path, page: Path | None) -> None:
        """Hear how the run ended, and where its results and its page are."""
        ...


@final
class Silent:
    """Says nothing."""

    @contextmanager
    def downloads(self) -> Iterator[None]:
        """Show nothing of downloads."""
        yield None

    def plan(self, design: RunDesign) -> None:
        """Say nothing."""

    @contextmanager
    def progress(self) -> Iterator[ShowStanding]:
        """Show nothing of progress."""
        yield lambda standing: None

    def say(self, text: str) -> None:
        """Say nothing."""

    def outcome(self, summary: Mapping[str, Any], folder: Path, page: Path | None) -> None:
        """Say nothing."""


@final
class PlainText:
    """Prints plain lines: the plan, about ten lines of progress, and the outcome."""

    @contextmanager
    def downloads(self) -> Iterator[None]:
        """Show nothing of downloads: a caller's own data are there already."""
        yield None

    def plan(self, design: RunDesign) -> None:
        """Print what is about to happen."""
        _print_rows("about to train", plan_rows(design))

    @contextmanager
    def progress(self) -> Iterator[ShowStanding]:
        """Print about ten lines in all, the last one at the end."""
        yield every_tenth(lambda standing: print(standing, flush=True))

    def say(self, text: str) -> None:
        """Print one sentence."""
        print(text, flush=True)

    def outcome(self, summary: Mapping[str, Any], folder: Path, page: Path | None) -> None:
        """Print how the run ended."""
        _print_rows("outcome", outcome_rows(summary))
        print(f"results: {folder}" + (f"    page: {page}" if page else ""), flush=True)


def every_tenth(show: ShowStanding) -> ShowStanding:
    """Pass on about ten standings of a run: those at which another tenth of it is done.

    A wait for other parties is passed on when it begins.
    """
    shown, waited_for = -1, ()

    def thinned(standing: Standing) -> None:
        nonlocal shown, waited_for
        # Steps and polish rounds count alike.
        tenth = 10 * standing.done // max(standing.total, 1)
        begins = bool(standing.waiting_for) and standing.waiting_for != waited_for
        if tenth > shown or begins:
            shown = tenth
            show(standing)
        waited_for = standing.waiting_for

    return thinned


def _print_rows(title: str, rows: Mapping[str, str]) -> None:
    width = max(len(name) for name in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))
