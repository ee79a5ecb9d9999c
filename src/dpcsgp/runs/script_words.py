"""Errors in the words of a script: the command line's --resume is resume=True in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dpcsgp.errors import ConfigError, DpcsgpError, PrivateStepError, RefusedDataError

_WORDS: Final = (
    (r"`dpcsgp run --resume`", "the script by itself and resume=True"),
    (r"`dpcsgp launch --resume --processes (\d+)`", r"\1 processes of torchrun and resume=True"),
    (r"--out FOLDER", "out=..."),
    (r"--out folder", "out folder"),
    (r"--out (\S+)", r"out='\1'"),
    (r"--resume", "resume=True"),
    (r"--allow-divergence", "allow_divergence=True"),
)


def named_callback(name: str, call: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return a function of the caller's own whose errors say where they come from.

    What was released before is on disk: the errors pass as they are, with a note.
    """
    if call is None:
        return lambda value: None
    if not callable(call):
        raise ConfigError(f"{name} = {call!r}: expected a function of one argument")

    def noted(value: Any) -> Any:
        try:
            return call(value)
        except Exception as error:
            error.add_note(f"in {name}; what was released before is saved: resume=True goes on")
            raise

    return noted


@contextmanager
def script_words() -> Iterator[None]:
    """Let errors of this package speak to somebody who writes Python, without a chain of others.

    What failed below, such as a broken connection, is said in the message already. Errors about
    private data keep their cause and end with it: the others have heard the message without it by
    then, and what is raised here is shown on this machine only.
    """
    try:
        yield
    except RefusedDataError:
        raise
    except PrivateStepError as error:
        cause = error.__cause__
        if cause is None:
            raise
        raise PrivateStepError(f"{error}: {type(cause).__name__}: {cause}") from cause
    except DpcsgpError as error:
        text = str(error)
        for pattern, words in _WORDS:
            text = re.sub(pattern, words, text)
        raise type(error)(text) from None
