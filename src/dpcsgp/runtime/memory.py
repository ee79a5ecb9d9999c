"""How this process asks the operating system for memory.

A training step makes and frees a dozen tensors of N x D numbers. The C library returns blocks above
32 MB to the system at once and gets them back as fresh, zeroed pages: with 300 nodes of 101,770
coordinates that was 1,350 page faults and 5 ms of system time per node and step, as much as two
thirds of the computing itself. Keeping freed blocks makes it 200 faults and 0.5 ms, as with ten
nodes.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# larger ones still go back: keeping all took 8.1 GB instead of 6.9 with a thousand nodes
_KEPT = 2**29


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, for the next step; return whether it can.

    Only glibc can; elsewhere the call is harmless.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))


def return_freed_memory() -> None:
    """Give back what the C library keeps: nothing will be computed for a while.

    A party of the demo's size that waits for others has 0.6 GB of it after its first step.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
