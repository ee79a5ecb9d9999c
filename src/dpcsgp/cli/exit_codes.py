"""Exit codes of `dpcsgp party` and `dpcsgp federation`: stable numbers for scripts and services.

`docs/exit-codes.md` has a section per code: what happened, what was spent, what to do.
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any, Final, final

import typer
from typer.core import TyperGroup

from dpcsgp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    DivergenceError,
    DpcsgpError,
    JournalError,
    LedgerError,
    RestoredBackupError,
    WaitStoppedError,
)
from dpcsgp.records.ending import Ending

PAGE: Final = "docs/exit-codes.md"
_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


@final
class ExitCode(IntEnum):
    """What a command that takes part returns; a number is never given another meaning."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    GAVE_UP = 3
    RESTORED_BACKUP = 4
    DIVERGED = 5
    RECORDS = 6
    DISK = 7
    STOPPED = 130

    @property
    def title(self) -> str:
        """The title of its section in the documentation."""
        return _TITLES[self]

    @property
    def hint(self) -> str:
        """One line that names the code and its section."""
        anchor = f"{self.value}-{self.title.replace(' ', '-').replace(',', '')}"
        return f"exit code {self.value}, {self.title}: see {PAGE}#{anchor}"


_TITLES: Final = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "no, or failed",
    ExitCode.REFUSED: "refused",
    ExitCode.GAVE_UP: "waiting gave up",
    ExitCode.RESTORED_BACKUP: "restored from an older backup",
    ExitCode.DIVERGED: "diverged",
    ExitCode.RECORDS: "records damaged or in use",
    ExitCode.DISK: "disk full or read-only",
    ExitCode.STOPPED: "stopped",
}


def code_of_error(error: DpcsgpError) -> ExitCode:
    """Return the code of an error; the more special kinds come first."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK:
        return ExitCode.DISK
    kinds: list[tuple[type[DpcsgpError] | tuple[type[DpcsgpError], ...], ExitCode]] = [
        (RestoredBackupError, ExitCode.RESTORED_BACKUP),
        (DiskError, ExitCode.DISK),
        ((JournalError, LedgerError, CheckpointError), ExitCode.RECORDS),
        (DivergenceError, ExitCode.DIVERGED),
        (WaitStoppedError, ExitCode.STOPPED),
        ((ConfigError, DataError), ExitCode.REFUSED),
    ]
    known = next((code for kind, code in kinds if isinstance(error, kind)), None)
    if known is not None:
        return known
    from dpcsgp.network.health import SilentPeerError  # brings torch

    return ExitCode.GAVE_UP if isinstance(error, SilentPeerError) else ExitCode.FAILED


def code_of_ending(ending: Ending, handed_over: bool) -> ExitCode:
    """Return the code of a party's run that ended; only a complete one is a success."""
    if handed_over:
        return ExitCode.DONE
    codes = {Ending.INTERRUPTED: ExitCode.STOPPED, Ending.DIVERGED: ExitCode.DIVERGED}
    return codes.get(ending, ExitCode.FAILED)


@final
class CodedGroup(TyperGroup):
    """A group of commands whose errors carry these codes, and a line that says where to read."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command of the group."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.STOPPED) from None
        except DpcsgpError as error:
            _code(error)
            raise
        except OSError as error:
            # A reader that closed the pipe is none of ours; anything else is a file or the disk.
            if error.errno == errno.EPIPE:
                raise
            disk = _disk_error(error)
            _code(disk)
            raise disk from error


def _code(error: DpcsgpError) -> None:
    code = code_of_error(error)
    error.exit_code = code.value
    if code is not ExitCode.REFUSED:  # the text itself says what to mend
        error.add_note(code.hint)


def _disk_error(error: OSError) -> DiskError:
    where = f" ({error.filename})" if error.filename else ""
    return DiskError(
        f"a file cannot be written or read{where}: {error.strerror or error}; free space and start "
        "again with the same line. What was recorded before is intact"
    )
