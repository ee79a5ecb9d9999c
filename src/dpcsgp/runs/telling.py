"""Warnings that name the caller's own line, however deep in this package they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def tell(text: str) -> None:
    """Warn, at the line outside of this package that called it."""
    depth, frame = 1, sys._getframe(0)
    while frame is not None and _is_ours(frame):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=depth)


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("dpcsgp", "contextlib")  # decorators are contextlib's
