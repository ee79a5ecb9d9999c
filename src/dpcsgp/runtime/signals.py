"""Ctrl-C and SIGTERM as a request: finish the step, then save."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from dpcsgp.records.ending import Stop

STOPPING = "stopping after this step; once more to stop at once"


class SignalCatcher(ABC):
    """Handles both signals inside a `with` block, and gives them back afterwards."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @abstractmethod
    def _handle(self, number: int, frame: FrameType | None) -> None: ...


class StopSignal(SignalCatcher):
    """Turns a signal into "finish this step, then save"; a second one stops at once."""

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        also: Callable[[int], object] = lambda step: False,
    ) -> None:
        super().__init__()
        self._say = say
        self._also = also  # another reason to stop before a step
        self.asked = False

    def is_set(self, step: int) -> Stop | None:
        """Return which stop was asked for, if any; a signal asks for a pause."""
        return Stop.PAUSE if self.asked else Stop.of(self._also(step))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say(STOPPING)
