"""Writing files so that a crash leaves either the old or the new content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SYNCS_FOLDERS: Final = os.name != "nt"  # Windows opens no folders; there names are on disk at once


def write_atomically(path: Path, body: bytes) -> None:
    """Write a file so that a crash leaves either the old or the new content.

    The way: temporary file, fsync, rename, fsync.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a file's fsync leaves its name out."""
    if not SYNCS_FOLDERS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
