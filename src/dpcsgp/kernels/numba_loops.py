"""Compile the few inner loops that numpy and torch would run through memory many times.

A loop is compiled when its module is first imported (a second or so) and kept on disk beside the
module or in the user's cache folder, where later processes find it. Compiled loops let other
threads run, follow the order of arithmetic as written (no fast-math: the same bits on every
machine) unless they say `any_order`, and do not check divisors, which would keep them from becoming
vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

# Sums may be taken apart into several; infinities and NaN keep their meaning.
_ANY_ORDER = {"reassoc", "nsz", "contract"}


def compiled(
    *signatures: str, any_order: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that compiles a loop for arguments of these types, at once.

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

    def decorate(loop: Callable[..., None]) -> Callable[..., None]:
        options: dict[str, Any] = {
            "nogil": True,
            "error_model": "numpy",
            "fastmath": _ANY_ORDER if any_order else False,
        }
        try:
            return njit(list(signatures), cache=True, **options)(loop)
        # The cache on disk is damaged, or there is nowhere to write one (no space, a read-only
        # folder): compile in memory. A fault of the loop itself shows again here.
        except Exception:
            return njit(list(signatures), **options)(loop)

    return decorate


def inlined(function: Callable[..., float]) -> Callable[..., float]:
    """Make a function part of the compiled loops that call it."""
    return njit(inline="always")(function)
