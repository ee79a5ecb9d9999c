"""Shared noise among processes that are threads here: the same messages, one barrier."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.privacy.shared_noise import SharedNoise
from dpcsgp.randomness import PrivateRandomness

Tamper = Callable[[str, int, Any], Any]


def law_of(
    num_nodes: int,
    *,
    own: float | Sequence[float] = 0.5,
    shared: float = 0.6,
    factors: Sequence[float] | None = None,
    max_colluders: int = 0,
) -> SharedNoise:
    """Return a law in which all nodes draw half of their examples."""
    owns = tuple(own) if isinstance(own, Sequence) else (own,) * num_nodes
    return SharedNoise(
        own=owns,
        shared=shared,
        factors=tuple(factors or (1.0,) * num_nodes),
        clip_norm=1.0,
        sampling_rates=(0.5,) * num_nodes,
        sampling="poisson",
        max_colluders=max_colluders,
    )


def joined(
    law: SharedNoise,
    hosting: Sequence[Sequence[int]],
    *,
    randoms: Sequence[PrivateRandomness] | None = None,
    promises: Sequence[tuple[float, float]] | None = None,
    spent: Mapping[int, list[tuple[ReleaseEvent, int]]] | None = None,
    steps: int = 5,
    first_step: int = 0,
    tamper: Tamper = lambda name, rank, value: value,
    run_id: str = "a run",
) -> list[PairNoise]:
    """Let one thread per process join; return their parts of the noise."""
    promises = promises or [(1e6, 1e-4)] * len(law.own)
    randoms = randoms or [PrivateRandomness.fresh(nodes) for nodes in hosting]
    barrier = threading.Barrier(len(hosting))
    said: dict[tuple[str, int], str] = {}

    def gather_of(rank: int) -> Callable[[str, Any], list[Any]]:
        def gather(name: str, value: Any) -> list[Any]:
            said[name, rank] = json.dumps(tamper(name, rank, value))
            barrier.wait(30)
            return [json.loads(said[name, other]) for other in range(len(hosting))]

        return gather

    def join(rank: int) -> PairNoise:
        noise = PairNoise(law, hosting[rank], randoms[rank], run_id, promises)
        own = {node: (spent or {}).get(node, []) for node in hosting[rank]}
        try:
            noise.join(first_step, steps, own, gather_of(rank))
        except BaseException:
            barrier.abort()
            raise
        return noise

    with ThreadPoolExecutor(len(hosting)) as pool:
        futures = [pool.submit(join, rank) for rank in range(len(hosting))]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
