"""Encoding plus decoding against drawing uniform numbers and copying memory.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpcsgp.benchmarking.stopwatch import Ratio, compare, deciding_clock, measure
from dpcsgp.compression import Compressor, parse_compressor
from dpcsgp.compression.rotate import panels_of, plan_rotation, rotate
from dpcsgp.randomness import PublicRandomness

# Times `torch.rand`; None: shown, not held to a limit.
LIMITS: dict[str, float | None] = {
    "rand:0.5": 6.0,
    "sign:512": 6.0,
    "gsgd:8/512": 6.0,
    "gsgd:4/512": 6.0,
    "top:0.01": 12.0,
    "rot:1": None,
    "rot:2": None,
}

ROTATION = "rotation alone"


def benchmark_compression(quick: bool = False) -> list[Ratio]:
    """Encode and decode 10 x 1,000,000 float32 with every compressor."""
    num_nodes, dim = (2, 4000) if quick else (10, 1_000_000)
    clock = deciding_clock()
    x_ND, random = torch.randn(num_nodes, dim), PublicRandomness(0, range(num_nodes))
    target_ND = torch.empty_like(x_ND)
    ways: dict[str, Callable[[], object]] = {
        # no fresh memory: the sterner limit
        "torch.rand": lambda: torch.rand(num_nodes, dim, out=target_ND),
        "memory copy": lambda: target_ND.copy_(x_ND),
    }
    for spec in LIMITS:
        ways[spec] = _both_ways(parse_compressor(spec), x_ND, random)
    ways[ROTATION] = _rotation(x_ND, random)
    times = measure(ways, rounds=3 if quick else 9)
    note = f"encode + decode, {num_nodes} x {dim:,}"
    alone = f"of rot:1, {num_nodes} x {dim:,}, one way: signs and butterflies"
    against_rand = [
        compare("compression", times, spec, "torch.rand", clock=clock, limit=limit, note=note)
        for spec, limit in LIMITS.items()
    ]
    rotation = compare(
        "compression", times, ROTATION, "torch.rand", clock=clock, limit=1.0, note=alone
    )
    copies = [compare("compression", times, spec, "memory copy", clock=clock) for spec in LIMITS]
    return [*against_rand, rotation, *copies]


def _both_ways(
    compressor: Compressor, x_ND: Tensor, random: PublicRandomness
) -> Callable[[], Tensor]:
    return lambda: compressor.decode(compressor.encode(x_ND, random, 0), x_ND.shape[1], random, 0)


def _rotation(x_ND: Tensor, random: PublicRandomness) -> Callable[[], None]:
    """Rotate the vectors in place as the encoder does, node by node and panel by panel."""
    panels = {
        start: plan_rotation(stop - start, bits=1) for start, stop in panels_of(x_ND.shape[1])
    }
    streams = [random.of([node]) for node in random.nodes]
    # contents do not matter
    rotated = [
        {start: torch.randn(1, plan.width).numpy() for start, plan in panels.items()}
        for _ in streams
    ]

    def turn() -> None:
        for stream, parts in zip(streams, rotated, strict=True):
            for start, part_1W in parts.items():
                rotate(part_1W, panels[start], stream, 0, start)

    return turn
