"""Writing files so that a crash leaves either the old or the new content."""

from __future__ import annotations

import os
from pathlib import Path


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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
