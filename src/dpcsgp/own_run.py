"""A run of a caller's own model and data, once everything about it has been checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from rich.console import Console

from dpcsgp.console.session import watching
from dpcsgp.console.tables import outcome_table, plan_table
from dpcsgp.network.torch_distributed import ProcessEnvironment
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.user_data import UserData
from dpcsgp.runtime.process import RunRequest, take_part
from dpcsgp.runtime.session import Outcome, run_simulated
from dpcsgp.runtime.signals import StopSignal

# of this process; under torchrun every one needs names of its own in the store
_starts: Final = itertools.count()


@final
@dataclass(frozen=True)
class OwnRun:
    """What is to be trained, where it is recorded, and who is told."""

    design: RunDesign
    data: UserData
    folder: Path
    resume: bool
    on_row: Callable[[dict[str, Any]], None]
    should_stop: Callable[[int], bool]
    verbose: bool

    def simulate(self) -> Outcome:
        """Train all nodes in this process."""
        console = Console(quiet=not self.verbose)
        console.print(plan_table(self.design))
        config = self.design.config
        results = (
            ResultsFolder.reopen(self.folder)[0]
            if self.resume
            else ResultsFolder.create(self.folder, config)
        )
        with StopSignal(console.print, self.should_stop) as stop:
            outcome = run_simulated(
                self.design,
                self.data,
                results,
                resume=self.resume,
                watching=partial(watching, console)
                if self.verbose
                else lambda run: nullcontext(lambda progress: None),
                should_stop=stop.is_set,
                on_row=self.on_row,
            )
        if stop.asked:
            outcome.run.ledger.close()
            raise KeyboardInterrupt(f"stopped; continue with out={str(self.folder)!r}, resume=True")
        console.print(outcome_table(outcome.summary))
        return outcome

    def take_part(self, place: ProcessEnvironment) -> Outcome:
        """Train this process's nodes together with the other processes that torchrun started."""
        assignment = RunRequest(
            open_config=lambda: self.design.config,
            prepare=lambda config: (self.design, self.data),
            out=self.folder,
            resume=self.resume,
            should_stop=self.should_stop,
            on_row=self.on_row,
            quiet=not self.verbose,
        )
        return take_part(replace(place, attempt=place.attempt + 10**6 * next(_starts)), assignment)
