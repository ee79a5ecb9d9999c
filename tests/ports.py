"""Ports for servers of tests: free now, and taken by nobody before the server listens.

A port that the system chooses lies where it also takes ports for outgoing connections: while a
party is down, or before it listens, any connection on the machine may get it. These lie below, and
every process of a parallel test run has a range of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST, _EACH, _RANGES = 12_000, 2_500, 8
_PLACE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _RANGES
_START = random.SystemRandom().randrange(_EACH)
_NEXT = itertools.count(_START)


def free_port() -> int:
    """Return a port on which nobody listens, and that this process has not returned lately."""
    while True:
        port = _FIRST + _EACH * _PLACE + next(_NEXT) % _EACH
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
