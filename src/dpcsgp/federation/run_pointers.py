"""Which results folder belongs to which roster, as a party's folder remembers it.

Looking it up takes neither a roster nor a model: `dpcsgp party status` is asked often.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dpcsgp.errors import ConfigError
from dpcsgp.federation.party_folder import PartyFolder

RUNS: Final = "runs"
SHORT: Final = 16  # hexadecimal digits in names of folders


def latest_place(party: PartyFolder, fingerprint: str | None = None) -> Path:
    """Return the results folder of the run of a roster, or of the run that began last."""
    if fingerprint is not None:
        pointer = pointer_of(party, fingerprint)
        pointers = [pointer] if pointer.exists() else []
    else:
        pointers = sorted((party.path / RUNS).glob("*.json"), key=lambda it: it.stat().st_mtime)
    if not pointers:
        raise ConfigError(
            f"{party.name} has not run a roster yet; start with `dpcsgp party run FEDERATION.toml`"
        )
    return Path(read_pointer(pointers[-1])["folder"])


def pointer_of(party: PartyFolder, fingerprint: str) -> Path:
    """Return the file that remembers where a roster is run."""
    return party.path / RUNS / f"{fingerprint[:SHORT]}.json"


def read_pointer(pointer: Path) -> dict[str, str]:
    """Return the run's id and its results folder."""
    try:
        found = json.loads(pointer.read_bytes())
        return {"run_id": str(found["run_id"]), "folder": str(found["folder"])}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{pointer} is damaged; restore it from a backup") from None
