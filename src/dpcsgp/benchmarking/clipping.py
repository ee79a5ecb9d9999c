"""Private gradients against plain SGD and against Opacus in all its modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from dpcsgp.benchmarking import opacus_modes
from dpcsgp.benchmarking.peak import gradient_memory
from dpcsgp.benchmarking.peers import Peer
from dpcsgp.benchmarking.stopwatch import Clock, Ratio, Times, compare, deciding_clock, measure
from dpcsgp.benchmarking.workload import RESNET18, TINY, TWO_LAYERS, WORKLOADS, Workload
from dpcsgp.errors import DpcsgpError

OURS: Final = "private gradient"
TORCH_NOISE: Final = "private gradient, torch noise"
PLAIN: Final = "plain SGD"
MODES: Final = {mode: f"Opacus {mode}" for mode in opacus_modes.MODES}


def benchmark_clipping(quick: bool = False) -> list[Ratio]:
    """Compare private gradients of two layers (10 nodes) and ResNet-18 (one) with peers."""
    clock = deciding_clock()
    if quick:
        return _two_layers(TINY, clock, rounds=3, slow_rounds=2)
    ratios = _two_layers(TWO_LAYERS, clock, rounds=15, slow_rounds=7)
    return ratios + _resnet(RESNET18, clock, rounds=5)


def _two_layers(work: Workload, clock: Clock, rounds: int, slow_rounds: int) -> list[Ratio]:
    note = f"{work.model}, {work.num_nodes} nodes x batch {work.batch_size}"
    ways: dict[str, Callable[[], object]] = {
        PLAIN: work.plain(),
        TORCH_NOISE: work.private(secure=False),
        OURS: work.private(secure=True),
    }
    times = measure(ways, rounds, warm_up=2)
    ratios = [
        compare("clipping", times, TORCH_NOISE, PLAIN, clock=clock, limit=2.2, note=note),
        compare("clipping", times, OURS, PLAIN, clock=clock, limit=2.2, note=note),
    ]
    return ratios + _against_opacus(
        work, clock, slow_rounds, note, best_limit=2.0, default_limit=40.0
    )


def _resnet(work: Workload, clock: Clock, rounds: int) -> list[Ratio]:
    note = f"{work.model}, batch {work.batch_size}"
    times = measure({PLAIN: work.plain(), OURS: work.private(secure=True)}, rounds)
    ratios = [compare("clipping", times, OURS, PLAIN, clock=clock, limit=1.6, note=note)]
    ratios += _against_opacus(work, clock, 3, note, best_limit=1.3, default_limit=None)
    return ratios + (_memory() if opacus_modes.is_installed() else [])


def _against_opacus(
    work: Workload,
    clock: Clock,
    rounds: int,
    note: str,
    best_limit: float,
    default_limit: float | None,
) -> list[Ratio]:
    """Compare with every mode that works here; the best one is marked and held to its limit."""
    if not opacus_modes.is_installed():
        return []
    name = next(name for name, each in WORKLOADS.items() if each is work)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {
            OURS: work.private(secure=True),
            TORCH_NOISE: work.private(secure=False),
        }
        # each peer in a process of its own, which waits while others are timed
        for mode, label in MODES.items():
            peer = stack.enter_context(Peer(name, mode))
            try:
                peer()
            except DpcsgpError:  # a mode that does not run beside this torch is left out
                continue
            ways[label] = peer
        times = measure(ways, rounds, settle=True)
    return _ranked(times, clock, note, best_limit, default_limit)


def _ranked(
    times: dict[str, Times], clock: Clock, note: str, best_limit: float, default_limit: float | None
) -> list[Ratio]:
    """Divide every peer's time by ours; the best and the default mode get their limits."""
    peers = [name for name in times if name not in (OURS, TORCH_NOISE)]
    best = min(peers, key=lambda name: times[name].median(clock), default=None)
    default = MODES[opacus_modes.DEFAULT]
    ratios = []
    for name in peers:
        ratio = compare("clipping", times, OURS, name, clock=clock, at_least=True, note=note)
        if name == MODES[opacus_modes.SECURE]:
            ratio = replace(
                ratio, note=f"{note}; like for like: both resist attacks on floating point"
            )
        if name == default and default_limit is not None:
            ratio = replace(ratio, limit=default_limit, note=f"{note}; its default")
        # the best mode is held to a limit, and shown beside ours with noise as cheap as its own
        if name == best:
            alike = compare(
                "clipping", times, TORCH_NOISE, name, clock=clock, at_least=True, note=note
            )
            ratios.append(
                replace(alike, note=f"{note}; like for like: the peer's noise is torch's too")
            )
            ratio = replace(
                ratio,
                limit=max(best_limit, ratio.limit or 0.0),
                note=f"{ratio.note}; its best mode here",
            )
        ratios.append(ratio)
    return ratios


def _memory() -> list[Ratio]:
    """Compare peak memory of ResNet-18 with Opacus's and plain SGD's, in own processes."""
    ours = gradient_memory("resnet18", "ours")
    ratios = []
    for peer, way, limit in (
        (MODES[opacus_modes.DEFAULT], opacus_modes.DEFAULT, 1.0),
        (PLAIN, "plain", None),
    ):
        theirs = gradient_memory("resnet18", way)
        value = ours / max(theirs, 1)
        note = "resnet18, batch 32, peak memory of two gradients"
        ratios.append(
            Ratio.single(
                "clipping", OURS, peer, value, ours, theirs, unit="B", limit=limit, note=note
            )
        )
    return ratios
