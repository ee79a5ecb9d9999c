"""Where a party's run of a roster lives: one results folder per roster, found again at every start.

The results folder holds ledger, journal and checkpoints. A second folder for the same roster would
release everything a second time, so the party's own folder remembers the first one:

    PARTY/runs/FINGERPRINT.json    run id and path of the results folder
    PARTY/runs/FINGERPRINT/        the results folder, unless another was named

An amended roster goes on in the folder of the version before it, with the same ledger. What belongs
to one version alone (roster, settings, journal, checkpoints) lies in `version-N/` there, for all
but the version with which the folder began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dpcsgp.config import Config, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.federation.differences import differences
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_pointers import RUNS, SHORT, pointer_of, read_pointer
from dpcsgp.federation.turn_log import TURNS
from dpcsgp.privacy import composed_epsilon
from dpcsgp.privacy.ledger import read_ledger
from dpcsgp.records.files import write_atomically
from dpcsgp.runs.folder import ResultsFolder, refuse_changed_settings, refuse_taken
from dpcsgp.runtime.process_agreement import MACHINE_SETTINGS

JOURNAL: Final = "journal"
NOTICES: Final = "journal/notices.json"
ROSTER: Final = "federation.toml"
START: Final = "start"  # in the folder of a later version: the models it began with


def finished_summary(folder: ResultsFolder, roster: Roster) -> dict[str, Any] | None:
    """Return the summary of a run that needs no further start; None: it goes on."""
    path = folder.path / "summary.json"
    summary = json.loads(path.read_bytes()) if path.exists() else {}
    ended = summary.get("handed_over") and summary.get("fingerprint") == roster.fingerprint
    return summary if ended else None


def open_place(
    party: PartyFolder, roster: Roster, out: Path | None, config: Config
) -> ResultsFolder:
    """Return the results folder of this roster: the one of earlier starts, or a new one.

    Args:
        party: the party's folder.
        roster: what is run.
        out: the results folder; None: inside of the party's folder.
        config: settings of this start.

    Returns:
        The folder, with an absolute path.

    Raises:
        ConfigError: the run began in another folder or with other settings, or its folder is gone.
    """
    own, pointer = pointer_of(party, roster.fingerprint), _known_pointer(party, roster)
    if pointer is None:
        _refuse_lost(party, roster)
        begun = _begin(own, roster, (out or own.with_suffix("")).resolve(), config)
        return _of_version(begun, party, roster, config)
    folder = _found(pointer, out, config)
    if pointer != own:
        _write(own, folder)
    return _of_version(folder, party, roster, config)


def _found(pointer: Path, out: Path | None, config: Config) -> ResultsFolder:
    """Return the folder that a pointer names, or where it was moved to."""
    begun = read_pointer(pointer)
    path = out.resolve() if out is not None else Path(begun["folder"])
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


def home_of(path: Path, roster: Roster) -> Path:
    """Return where in a results folder the files of one version are."""
    first = Roster.load(path / ROSTER)
    return path if first.fingerprint == roster.fingerprint else path / f"version-{roster.version}"


def known_place(party: PartyFolder, roster: Roster, out: Path | None = None) -> Path | None:
    """Return the results folder in which a roster was run or would go on; None: there is none."""
    pointer = _known_pointer(party, roster)
    return None if pointer is None else out or Path(read_pointer(pointer)["folder"])


def has_begun(path: Path, roster: Roster) -> bool:
    """Say whether a later version has begun in a results folder: its first model is on disk."""
    return any((home_of(path, roster) / START).glob("step-*.json"))


def previous_roster(party: PartyFolder, roster: Roster, out: Path | None = None) -> Roster | None:
    """Return the version before a roster, as this party has run it; None: it has not."""
    pointer = pointer_of(party, roster.history[-1].fingerprint) if roster.history else None
    if pointer is None or not pointer.exists():
        return None
    return roster_in(out or Path(read_pointer(pointer)["folder"]), roster.history[-1].fingerprint)


def roster_in(path: Path, fingerprint: str) -> Roster | None:
    """Return the version of this fingerprint that was run in a results folder; None: none was."""
    rosters = _rosters_in(path)
    return next((found for found in rosters if found.fingerprint == fingerprint), None)


def turns_in(path: Path, roster: Roster) -> int:
    """Return how many rounds of a version the turn log of a results folder has; 0: no such log."""
    turns = home_of(path, roster) / JOURNAL / TURNS
    return turns.read_bytes().count(b"\n") if turns.exists() else 0


def _rosters_in(path: Path) -> Iterator[Roster]:
    """Yield the versions that were run in a results folder."""
    files = [path / ROSTER, *sorted(path.glob(f"version-*/{ROSTER}"))]
    yield from (Roster.load(file) for file in files if file.exists())


def _of_version(
    folder: ResultsFolder, party: PartyFolder, roster: Roster, config: Config
) -> ResultsFolder:
    """Return the folder as this version uses it; a version that has been left is refused."""
    path, home = folder.path, home_of(folder.path, roster)
    newer = [
        found
        for found in _rosters_in(path)
        if found.version > roster.version and has_begun(path, found)
    ]
    if newer:
        raise ConfigError(
            f"version {roster.version} of the roster is over: this party went on with version "
            f"{newer[-1].version} ({newer[-1].words}); run that one"
        )
    if home != path:
        if (home / ROSTER).exists():
            _make_room(path, home, roster)
        home.mkdir(exist_ok=True)
        write_atomically(home / "config.toml", to_toml(config).encode())
        write_atomically(home / ROSTER, roster.text().encode())
    node = Roster.load(path / ROSTER).node_of(party.name)
    return replace(folder, checkpoints=home / "checkpoint", ledger_node=node)


def _make_room(path: Path, home: Path, roster: Roster) -> None:
    """Put another roster of the same version aside if nothing was released under it."""
    other = Roster.load(home / ROSTER)
    if other.fingerprint == roster.fingerprint:
        return
    if _has_moved(path, other):
        found = "; ".join(map(str, differences(other, roster)))
        raise ConfigError(
            f"version {roster.version}: this party has gone on with another roster of this version "
            f"({other.words}); they differ in {found} (that one / this one). Agree on one of "
            "them, or amend the one that is in use"
        )
    home.rename(home.with_name(f"unused-{home.name}-{other.fingerprint[:SHORT]}"))


def _has_moved(path: Path, roster: Roster) -> bool:
    """Say whether a later version has made a release or a round in a results folder.

    What the version before had released of later steps already is not its own.
    """
    start = next((home_of(path, roster) / START).glob("step-*.json"), None)
    if start is None:
        return False
    ahead = {*json.loads(start.read_bytes())["meta"].get("ahead", [])}
    steps = roster.history[-1].steps
    # Where gradients may be late, a round needs no release.
    made = turns_in(path, roster) > 0
    return made or any(step >= steps for step in released_steps(path) - ahead)


def released_steps(path: Path) -> set[int]:
    """Return the steps that were released in a results folder, by ledger and disk."""
    files = (path / "ledger").glob("node-*.jsonl")
    recorded = {step for file in files for step, _ in read_ledger(file).places}
    return recorded | kept_steps(path)


def spent_in(path: Path, delta: float) -> tuple[int, float]:
    """Return how many releases the ledger of a results folder has, and the eps of all of them."""
    files = (path / "ledger").glob("node-*.jsonl")
    spent = [each for file in files for each in read_ledger(file).releases()]
    return sum(count for _, count in spent), composed_epsilon(spent, delta)


def kept_steps(path: Path) -> set[int]:
    """Return the steps whose releases are kept on disk."""
    files = (path / "ledger" / "kept").glob("step-*.safetensors")
    return {int(file.name.split(".")[0].removeprefix("step-")) for file in files}


def _refuse_lost(party: PartyFolder, roster: Roster) -> None:
    """Refuse to begin anew where this party has released something before."""
    last = roster.history[-1] if roster.history else None
    taken_part = any(party.name in chapter.parties for chapter in roster.history)
    if last is not None and taken_part and party.name not in last.restored:
        raise ConfigError(
            f"{party.name} took part in an earlier version of this roster, and its run of it is "
            f"not in {party.path / RUNS}: without its ledger nobody knows what was released; "
            f"restore that folder, or have the roster amended with --rejoin {party.name}"
        )


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


def _known_pointer(party: PartyFolder, roster: Roster) -> Path | None:
    """Return the pointer of this version, or of the newest one before it that was run here."""
    before = [chapter.fingerprint for chapter in reversed(roster.history)]
    pointers = (pointer_of(party, each) for each in (roster.fingerprint, *before))
    return next((pointer for pointer in pointers if pointer.exists()), None)


def _write(pointer: Path, folder: ResultsFolder) -> None:
    content = {"run_id": folder.run_id, "folder": str(folder.path.resolve())}
    write_atomically(pointer, json.dumps(content).encode())
