"""Compile the few inner loops that numpy and torch would run through memory many times.

A loop is compiled when it is first called (a second or so) and kept on disk beside the module or in
the user's cache folder, where later processes find it; until then numba is not even imported.
Compiled loops let other threads run, follow the order of arithmetic as written (no fast-math: the
same bits on every machine) unless they say `any_order`, and do not check divisors, which would keep
them from becoming vector instructions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, final

# Sums may be taken apart into several; infinities and NaN keep their meaning.
_ANY_ORDER: Final = {"reassoc", "nsz", "contract"}
_INLINED: Final[list[Callable[..., Any]]] = []


def compiled(
    *signatures: str, any_order: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that compiles a loop for arguments of these types, at its first call.

    With `any_order` the compiler may reorder sums: the last bit then depends on the processor.

    >>> @compiled("void(float64[::1])")
    ... def double(x):
    ...     for i in range(x.size):
    ...         x[i] *= 2
    >>> import numpy as np
    >>> values = np.ones(3)
    >>> double(values)
    >>> values.tolist()
    [2.0, 2.0, 2.0]
    """
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": _ANY_ORDER if any_order else False,
    }
    return lambda loop: _Loop(loop, list(signatures), options)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function part of the compiled loops that call it; by itself it is plain Python."""
    _INLINED.append(function)
    return function


def compile_loops() -> None:
    """Compile, or fetch from the disk, all loops of the modules that are imported by now.

    A process that is going to be forked does it once for all its children.
    """
    for loop in _LOOPS:
        loop.compile()


@final
class _Loop:
    """A loop that is compiled when it is first called."""

    def __init__(
        self, function: Callable[..., None], signatures: list[str], options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._signatures, self._options = function, signatures, options
        self._compiled: Callable[..., None] | None = None
        _LOOPS.append(self)

    def __call__(self, *arguments: Any) -> None:
        run = self._compiled
        (run or self.compile())(*arguments)

    def compile(self) -> Callable[..., None]:
        """Return the compiled loop."""
        with _LOCK:  # several threads may call it first
            if self._compiled is None:
                self._compiled = self._made()
            return self._compiled

    def _made(self) -> Callable[..., None]:
        from numba import njit  # takes half a second, and many commands do without

        loop = _with_inlined(self._function, njit(inline="always"))
        try:
            return njit(self._signatures, cache=True, **self._options)(loop)
        # The cache on disk is damaged, or there is nowhere to write one (no space, a read-only
        # folder): compile in memory. A fault of the loop itself shows again here.
        except Exception:
            return njit(self._signatures, **self._options)(loop)


_LOOPS: Final[list[_Loop]] = []
_LOCK: Final = threading.Lock()


def _with_inlined(loop: Any, inline: Callable[[Any], Any]) -> Any:
    """Return a function with its calls of inlined ones bound to what the compiler inlines."""
    called = {name: loop.__globals__.get(name) for name in loop.__code__.co_names}
    names = [name for name, value in called.items() if any(value is one for one in _INLINED)]
    if not names:
        return loop
    bound = {name: inline(_with_inlined(loop.__globals__[name], inline)) for name in names}
    copied = FunctionType(loop.__code__, {**loop.__globals__, **bound}, loop.__name__)
    return functools.update_wrapper(copied, loop)
