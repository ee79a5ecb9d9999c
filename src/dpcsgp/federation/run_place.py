"""Where a party's run of a roster lives: one results folder per roster, found again at every start.

The results folder holds ledger, journal and checkpoints. A second folder for the same roster would
release everything a second time, so the party's own folder remembers the first one:

    PARTY/runs/FINGERPRINT.json    run id and path of the results folder
    PARTY/runs/FINGERPRINT/        the results folder, unless another was named
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.records.files import write_atomically
from dpcsgp.runs.folder import ResultsFolder, refuse_changed_settings, refuse_taken
from dpcsgp.runtime.process import MACHINE_SETTINGS

RUNS: Final = "runs"
JOURNAL: Final = "journal"
NOTICES: Final = "journal/notices.json"
STATUS: Final = "status.json"
ROSTER: Final = "federation.toml"
_SHORT: Final = 16  # hexadecimal digits in names of folders


def finished_summary(folder: ResultsFolder) -> dict[str, Any] | None:
    """Return the summary of a run that needs no further start; None: it goes on."""
    path = folder.path / "summary.json"
    summary = json.loads(path.read_bytes()) if path.exists() else {}
    return summary if summary.get("handed_over") else None


def open_place(
    party: PartyFolder, roster: Roster, out: Path | None, config: Config
) -> ResultsFolder:
    """Return the results folder of this roster: the one of earlier starts, or a new one.

    Args:
        party: the party's folder.
        roster: what is run.
        out: the results folder; None: inside of the party's folder.
        config: settings of this start.

    Raises:
        ConfigError: the run began in another folder or with other settings, or its folder is gone.
    """
    pointer = _pointer(party, roster)
    if not pointer.exists():
        return _begin(pointer, roster, out or pointer.with_suffix(""), config)
    begun = _read(pointer)
    path = out or Path(begun["folder"])
    if not (path / "environment.json").exists() and path != Path(begun["folder"]):
        raise ConfigError(
            f"--out {path}: this party's run of this roster is in {begun['folder']}, with its "
            "ledger; go on there (a second folder would release everything again)"
        )
    folder, started = _reopened(path)
    if folder.run_id != begun["run_id"]:
        raise ConfigError(
            f"--out {path} holds another run; that of this roster began in {begun['folder']}"
        )
    _refuse_changes(started, config, path)
    if path.resolve() != Path(begun["folder"]).resolve():  # the folder was moved
        _write(pointer, folder)
    return folder


def latest_place(party: PartyFolder, roster: Roster | None = None) -> Path:
    """Return the results folder of a roster's run, or of the run that began last."""
    if roster is not None:
        pointers = [pointer for pointer in [_pointer(party, roster)] if pointer.exists()]
    else:
        pointers = sorted((party.path / RUNS).glob("*.json"), key=lambda it: it.stat().st_mtime)
    if not pointers:
        raise ConfigError(
            f"{party.name} has not run a roster yet; start with `dpcsgp party run FEDERATION.toml`"
        )
    return Path(_read(pointers[-1])["folder"])


def _begin(pointer: Path, roster: Roster, path: Path, config: Config) -> ResultsFolder:
    """Make the results folder; the pointer comes last, as the sign that the run has begun."""
    # A start that was killed in between left some of the files: it goes on with those.
    if not (path / ROSTER).exists():
        refuse_taken(path)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / ROSTER, roster.text().encode())
    elif Roster.load(path / ROSTER).fingerprint != roster.fingerprint:
        raise ConfigError(f"--out {path} holds the run of another roster; name another folder")
    if (path / "config.toml").exists():
        folder, started = _reopened(path)
        _refuse_changes(started, config, path)
    else:
        folder = ResultsFolder.create(path, config)
    pointer.parent.mkdir(mode=0o700, exist_ok=True)
    _write(pointer, folder)
    return folder


def _reopened(path: Path) -> tuple[ResultsFolder, Config]:
    if not (path / "environment.json").exists():
        raise ConfigError(
            f"the results folder {path} of this roster is gone, and with it the ledger of what was "
            "released; restore it from a backup, or give --out where it was moved to"
        )
    folder, config = ResultsFolder.reopen(path)
    refuse_changed_settings(path, config)
    return folder, config


def _refuse_changes(started: Config, config: Config, path: Path) -> None:
    """Refuse another seed or another device than those of the first start."""
    before, now = started.flat(), config.flat()
    for name in MACHINE_SETTINGS:
        if before[name] != now[name] and name not in ("graph.edges_file", "run.trackers"):
            raise ConfigError(
                f"{name} = {now[name]!r}: the run in {path} began with {before[name]!r}; go on "
                "with the same options"
            )


def _pointer(party: PartyFolder, roster: Roster) -> Path:
    return party.path / RUNS / f"{roster.fingerprint[:_SHORT]}.json"


def _read(pointer: Path) -> dict[str, str]:
    try:
        found = json.loads(pointer.read_bytes())
        return {"run_id": str(found["run_id"]), "folder": str(found["folder"])}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{pointer} is damaged; restore it from a backup") from None


def _write(pointer: Path, folder: ResultsFolder) -> None:
    content = {"run_id": folder.run_id, "folder": str(folder.path.resolve())}
    write_atomically(pointer, json.dumps(content).encode())
