"""Whole training steps: what a step of the demo costs beside plain SGD, and where its time goes.

The demo's sizes (784-128-10, 10 nodes, batch 2048 of 6,000, `rot:1`, momentum) on synthetic
examples, with ledger files in a temporary folder: everything that a step of `dpcsgp run` does
between two evaluations.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.algorithms import DPCSGP
from dpcsgp.algorithms.optimizers import Momentum
from dpcsgp.benchmarking.stopwatch import Clock, Ratio, Times, compare, deciding_clock, measure
from dpcsgp.benchmarking.workload import NOISE, TINY, Workload
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import directed_exponential
from dpcsgp.network import Simulator
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import (
    Budget,
    GaussianMechanism,
    LedgerBook,
    PrivateGradients,
    clipping_engine,
)
from dpcsgp.privacy.kept_releases import KeptReleases
from dpcsgp.privacy.pair_noise import PairNoise
from dpcsgp.privacy.shared_noise import SharedNoise, calibrate_shared_noise
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.metrics import Recorder
from dpcsgp.training import Progress, Run, Schedule, train

DEMO: Final = Workload("mlp:128", (784,), num_nodes=10, batch_size=2048, examples_per_node=6000)
SPEC: Final = "rot:1"
# near the best for rot:1 on exponential graphs; the rate does not change the cost
MIXING_RATE: Final = 0.467


@final
@dataclass(frozen=True)
class Hotspot:
    """One function of a profile; seconds per step in itself, calls per step."""

    function: str
    seconds: float
    share: float
    calls: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@contextmanager
def training_run(
    work: Workload,
    steps: int,
    momentum: float = 0.0,
    *,
    max_colluders: int | None = None,
    keeps: bool = False,
) -> Iterator[Run]:
    """Put together a run of DP-CSGP on an exponential graph, with ledgers in a temporary folder.

    With `max_colluders` all pairs of nodes share noise; with `keeps` releases stay on disk.
    """
    nodes, topology = range(work.num_nodes), directed_exponential(work.num_nodes)
    random = PrivateRandomness.fresh(nodes)
    mechanism = work.mechanism(NOISE)
    if max_colluders is not None:
        mechanism = _with_pairs(mechanism, max_colluders, random)
    algorithm = DPCSGP(parse_compressor(SPEC), learning_rate=0.1, mixing_rate=MIXING_RATE)
    with tempfile.TemporaryDirectory(prefix="dpcsgp-benchmark-") as folder:
        ledger = LedgerBook(Path(folder) / "ledger", nodes, "benchmark")
        model_D = ParameterLayout.of(work.module).flatten(work.module)
        gradients = PrivateGradients(
            source=work.task,
            engine=clipping_engine(work.module, work.task.loss),
            mechanism=mechanism,
            budget=Budget.unlimited(nodes),
            ledger=ledger,
            random=random,
            nodes=nodes,
            kept=KeptReleases(Path(folder) / "kept", "run", tuple(nodes)) if keeps else None,
        )
        try:
            yield Run(
                task=work.task,
                gradients=gradients.checked(model_D),
                algorithm=algorithm,
                polish=algorithm,
                network=Simulator(topology),
                public=PublicRandomness(0, nodes),
                recorder=Recorder(None),
                schedule=Schedule(steps=steps, evaluate_every=0),
                optimizer=Momentum(momentum),
                anchor_D=model_D,
            )
        finally:
            ledger.close()


def _with_pairs(
    mechanism: GaussianMechanism, max_colluders: int, random: PrivateRandomness
) -> GaussianMechanism:
    """Return the mechanism with noise that cancels between all pairs of its equal nodes."""
    sizes, num_nodes = mechanism.expected_batch_sizes, len(mechanism.num_examples)
    factors = tuple(1 / batch for batch in sizes)
    sensitivities = [factor * mechanism.clip_norm for factor in factors]
    own, shared = calibrate_shared_noise(
        mechanism.noise_multipliers, sensitivities, max_colluders, price=0.01
    )
    rates = tuple(b / total for b, total in zip(sizes, mechanism.num_examples, strict=True))
    law = SharedNoise(
        own, shared, factors, mechanism.clip_norm, rates, mechanism.sampling, max_colluders
    )
    pairs = PairNoise(law, range(num_nodes), random, "benchmark", [(1.0, 1e-4)] * num_nodes)
    pairs.meet(lambda name, value: [value])
    pairs.begin(0, [2**40] * num_nodes)
    return replace(mechanism, shared=law, pairs=pairs)


def _compare_gradients(work: Workload, rounds: int, clock: Clock, quick: bool) -> list[Ratio]:
    """Time private gradients with shared noise, and with kept releases, beside bare ones."""
    colluders = min(3, work.num_nodes - 2)
    with (
        training_run(work, 1) as bare,
        training_run(work, 1, max_colluders=colluders) as shared,
        training_run(work, 1, keeps=True) as kept,
    ):
        model_ND = bare.anchor_D.expand(work.num_nodes, -1)
        counter = itertools.count()

        def gradient(run: Run) -> Callable[[], object]:
            return lambda: run.gradients(model_ND, next(counter))

        runs = {"private gradient": bare, "shared noise": shared, "kept on disk": kept}
        times = measure({name: gradient(run) for name, run in runs.items()}, rounds=rounds)
    size = f"{work.num_nodes} nodes x batch {work.batch_size}, ledger on disk"
    notes = {
        "shared noise": f"all pairs of {size}",
        "kept on disk": f"{size}; waits for the disk, so by the wall clock",
    }
    limits = {"shared noise": 1.5, "kept on disk": None}
    return [
        compare(
            "step",
            times,
            name,
            "private gradient",
            clock="wall" if name == "kept on disk" else clock,
            limit=None if quick else limits[name],
            note=note,
        )
        for name, note in notes.items()
    ]


def time_steps(run: Run, around: Callable[[int, bool], None] = lambda step, starts: None) -> Times:
    """Train to the end; return the times of every step but the first, without evaluations.

    `around(step, True)` is called before each step and `around(step, False)` after it.
    """
    marks: list[tuple[float, float]] = []
    walls: list[float] = []
    cpus: list[float] = []

    def before(step: int) -> bool:
        around(step, True)
        marks.append((time.perf_counter(), time.process_time()))
        return False

    def after(progress: Progress) -> None:
        walls.append(time.perf_counter() - marks[-1][0])
        cpus.append(time.process_time() - marks[-1][1])
        around(progress.state.step - 1, False)

    train(run, watch=after, should_stop=before)
    return Times(tuple(walls[1:]), tuple(cpus[1:]))


def profile_steps(
    work: Workload, steps: int, momentum: float = 0.0, top: int = 10
) -> list[Hotspot]:
    """Profile all steps but the first; return the functions that take most time themselves."""
    profile = cProfile.Profile()

    def around(step: int, starts: bool) -> None:
        if step > 0:
            (profile.enable if starts else profile.disable)()

    with training_run(work, steps + 1, momentum) as run:
        time_steps(run, around)
    # (file, line, function) -> (primitive calls, calls, own seconds, total seconds, callers)
    stats: Any = pstats.Stats(profile)
    rows: dict[Any, Any] = stats.stats
    total = sum(row[2] for row in rows.values())
    hottest = sorted(rows.items(), key=lambda item: item[1][2], reverse=True)[:top]
    return [
        Hotspot(_label(*key), row[2] / steps, row[2] / total, row[1] / steps)
        for key, row in hottest
    ]


def _label(file: str, line: int, function: str) -> str:
    """Name a function by its room, or as built in."""
    if file == "~":
        return function.strip("<>").replace("built-in method ", "").replace("method ", "")
    path = Path(file)
    return f"{path.parent.name}/{path.name}:{function}"


def _time_ledger(run: Run, rounds: int) -> list[float]:
    """Return the wall seconds of recording one release of every node: it waits for the disk."""
    gradients = run.gradients
    events = {node: gradients.mechanism.event(row) for row, node in enumerate(gradients.nodes)}
    found = []
    for step in range(rounds):
        start = time.perf_counter()
        gradients.ledger.record(10_000 + step, gradients.attempt, events)
        found.append(time.perf_counter() - start)
    return found


def benchmark_step(quick: bool = False) -> tuple[list[Ratio], list[Hotspot]]:
    """Time steps of the demo's size in turn with plain SGD of that batch size; profile them."""
    work, rounds = (TINY, 2) if quick else (DEMO, 8)
    clock = deciding_clock()
    plain = work.plain()
    plain()  # warm up
    peers: list[Times] = []

    # after every step but the first one gradient of the peer, so that both meet the same machine
    def around(step: int, starts: bool) -> None:
        if step > 0 and not starts:
            peers.append(measure({"plain SGD": plain}, rounds=1, warm_up=0)["plain SGD"])

    with training_run(work, rounds + 1, momentum=0.5) as run:
        ours = time_steps(run, around)
        ledger = _time_ledger(run, 2 * rounds)
    theirs = Times(tuple(t.wall[0] for t in peers), tuple(t.cpu[0] for t in peers))
    times = {"whole private step": ours, "plain SGD": theirs}
    # the ledger waits for the disk, not for the processor: by the wall clock
    whole, middle = ours.median("wall"), statistics.median(ledger)
    written = Ratio(
        group="step",
        name="ledger, on disk",
        peer="whole private step",
        value=middle / whole,
        low=min(ledger) / whole,
        high=max(ledger) / whole,
        ours=middle,
        peers=whole,
        limit=None if quick else 0.1,
        note=f"{work.num_nodes} nodes: one record each, flushed to the disk; smallest and "
        "largest in brackets",
    )
    note = f"{work.model}, {work.num_nodes} nodes x batch {work.batch_size}, {SPEC}, ledger on disk"
    ratios = [
        compare("step", times, "whole private step", "plain SGD", clock=clock, limit=1.6, note=note)
    ]
    ratios += _compare_gradients(work, rounds, clock, quick)
    return [*ratios, written], profile_steps(work, rounds, momentum=0.5)
