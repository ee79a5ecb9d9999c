"""What every experiment shares: where results go, repeats, how runs and pages are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from dpcsgp.records.files import write_atomically
from dpcsgp.reproduction.grid import Cell, Done, Show, run_grid

FIRST_SEED = 1  # seeds 1, 2, ... are for results; settings were chosen with others


@final
@dataclass(frozen=True)
class Experiment:
    """One call of `dpcsgp reproduce`."""

    name: str
    root: Path
    repeats: int
    quick: bool
    show: Show
    say: Callable[[str], None]
    processes: int | None = None

    @property
    def out(self) -> Path:
        """Folder of this experiment's tables and figures; runs are shared in `root/runs`."""
        return self.root / self.name

    @property
    def command(self) -> str:
        """The command that makes these results again."""
        quick = " --quick" if self.quick else ""
        return f"dpcsgp reproduce {self.name}{quick} --repeats {self.repeats}"

    def run(self, cells: Sequence[Cell]) -> list[Done]:
        """Run every cell once per seed."""
        return run_grid(
            [
                _seeded(cell, FIRST_SEED + repeat)
                for cell in cells
                for repeat in range(self.repeats)
            ],
            self.root,
            self.show,
            self.processes,
        )

    def write_page(self, title: str, *paragraphs: str) -> Path:
        """Write README.md of the experiment: the command first, then what was found."""
        note = (
            ["Shortened by `--quick`: fewer steps or repeats than the full command."]
            if self.quick
            else []
        )
        text = "\n\n".join([f"# {title}", f"Made by `{self.command}`.", *note, *paragraphs]) + "\n"
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "README.md"
        write_atomically(path, text.encode())
        return path


def _seeded(cell: Cell, seed: int) -> Cell:
    return replace(cell, settings=(*cell.settings, f"run.seed={seed}", f"privacy.seed={seed}"))


def cell(*settings: str, allow_divergence: bool = False, **tags: Any) -> Cell:
    """Return a cell from `section.key=value` settings and its tags."""
    return Cell(settings, tags, allow_divergence)
