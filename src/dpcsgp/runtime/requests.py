"""What is to be trained, and where its results go.

Every way of driving a run takes such a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, final

from dpcsgp.compression import parse_compressor
from dpcsgp.config import Config
from dpcsgp.errors import RefusedDataError
from dpcsgp.runs.data import Downloads, RunData, load_builtin_data
from dpcsgp.runs.design import RunDesign, build_topology, design_run
from dpcsgp.runs.folder import open_config, refuse_taken
from dpcsgp.runs.node_noise import warn_about_dominating_noise


class RunRequest(Protocol):
    """A run that somebody wants; settings are read first, data later."""

    @property
    def out(self) -> Path | None:
        """The results folder; None: a new one under runs/."""
        ...

    @property
    def resume(self) -> bool:
        """Whether the run in the folder is to be continued."""
        ...

    def config(self) -> Config:
        """Return the settings, or refuse them before data are fetched."""
        ...

    def prepare(
        self, config: Config, downloads: Downloads | None = None
    ) -> tuple[RunDesign, RunData]:
        """Load the data and check the whole design; nothing is released by it."""
        ...


@final
@dataclass(frozen=True)
class BuiltinRequest:
    """A run that settings describe completely: a plain record, which can be given to a new process.

    Attributes:
        config_file: a TOML file; None: the defaults.
        settings: changes, `section.key=value`.
        out: the results folder; None: a new one under runs/.
        resume: continue the run in `out`; its settings are taken from there.
        allow_divergence: run even if gossip is known to diverge.
    """

    config_file: Path | None = None
    settings: tuple[str, ...] = ()
    out: Path | None = None
    resume: bool = False
    allow_divergence: bool = False

    def config(self) -> Config:
        """Return the settings; a graph, compressor or folder that cannot be is refused."""
        # Everything that needs no data is built once and thrown away: wrong settings are refused at
        # once.
        config = open_config(self.config_file, self.settings, self.out, self.resume)
        build_topology(config)
        parse_compressor(config.compression.spec)
        if config.algorithm.polish_compression:
            parse_compressor(config.algorithm.polish_compression)
        if self.out is not None and not self.resume:
            refuse_taken(self.out)
        return config

    def prepare(
        self, config: Config, downloads: Downloads | None = None
    ) -> tuple[RunDesign, RunData]:
        """Load the data set and design the run."""
        data = load_builtin_data(config, downloads)
        # A run that is resumed was allowed when it began.
        design = design_run(config, data.facts, self.allow_divergence or self.resume)
        warn_about_dominating_noise(design)
        return design, data


@final
@dataclass(frozen=True)
class PreparedRequest:
    """A run whose data and design are there already: a caller's own model, or a cell of a grid."""

    design: RunDesign
    data: RunData
    out: Path | None
    resume: bool = False

    def config(self) -> Config:
        """Return the settings of the design."""
        return self.design.config

    def prepare(
        self, config: Config, downloads: Downloads | None = None
    ) -> tuple[RunDesign, RunData]:
        """Return design and data as they are."""
        return self.design, self.data


@final
@dataclass(frozen=True)
class RefusedRequest:
    """A run whose data this process has refused: it joins the others only to tell them so."""

    settings: Config
    error: RefusedDataError
    out: Path | None
    resume: bool = False

    def config(self) -> Config:
        """Return the settings."""
        return self.settings

    def prepare(self, config: Config, downloads: Downloads | None = None) -> NoReturn:
        """Raise the refusal."""
        raise self.error
