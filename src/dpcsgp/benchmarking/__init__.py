"""Ratios against peers and limits, measured in one run: `dpcsgp benchmark`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from dpcsgp.benchmarking import opacus_modes
from dpcsgp.benchmarking.clipping import benchmark_clipping
from dpcsgp.benchmarking.compression import benchmark_compression
from dpcsgp.benchmarking.mixing import benchmark_mixing
from dpcsgp.benchmarking.models import benchmark_models
from dpcsgp.benchmarking.noise import benchmark_noise
from dpcsgp.benchmarking.scale import ScalePoint, benchmark_scale
from dpcsgp.benchmarking.step import Hotspot, benchmark_step
from dpcsgp.benchmarking.stopwatch import Ratio, deciding_clock
from dpcsgp.errors import ConfigError

__all__ = ["GROUPS", "Hotspot", "Measurements", "Ratio", "ScalePoint", "benchmark"]

GROUPS: Final = ("clipping", "models", "compression", "mixing", "noise", "step", "scale")


@final
@dataclass
class Measurements:
    """Everything that a benchmark found."""

    ratios: list[Ratio] = field(default_factory=list)
    hotspots: list[Hotspot] = field(default_factory=list)
    scale: list[ScalePoint] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "ratios": [ratio.as_dict() for ratio in self.ratios],
            "profile": [spot.as_dict() for spot in self.hotspots],
            "scale": [point.as_dict() for point in self.scale],
            "curves": self.curves,
            "notes": self.notes,
            "passed": all(ratio.passed is not False for ratio in self.ratios),
        }


def benchmark(group: str = "all", quick: bool = False) -> Measurements:
    """Measure one group or all; `quick` uses tiny sizes that are held to no limit."""
    if group not in (*GROUPS, "all"):
        raise ConfigError(f"benchmark {group!r}: expected one of {', '.join(GROUPS)}, all")
    outcome = Measurements()
    simple = {
        "clipping": benchmark_clipping,
        "compression": benchmark_compression,
        "mixing": benchmark_mixing,
        "noise": benchmark_noise,
    }
    for name in GROUPS if group == "all" else (group,):
        if name in simple:
            outcome.ratios += simple[name](quick)
        elif name == "models":
            ratios, notes = benchmark_models(quick)
            outcome.ratios += ratios
            outcome.notes += notes
        elif name == "step":
            ratios, outcome.hotspots = benchmark_step(quick)
            outcome.ratios += ratios
        else:
            ratios, outcome.scale = benchmark_scale(quick)
            outcome.ratios += ratios
    if quick:
        outcome.ratios = [replace(ratio, limit=None) for ratio in outcome.ratios]
    outcome.notes += _notes(group, quick)
    return outcome


def _notes(group: str, quick: bool) -> list[str]:
    notes = ["--quick: tiny sizes, no limits; the figures say nothing about speed"] if quick else []
    if group in ("clipping", "models", "all") and not opacus_modes.is_installed():
        notes.append(opacus_modes.MISSING)
    if deciding_clock() == "cpu":
        notes.append(
            "the machine is busy with other work: ratios of processor time decide, not those of "
            "the wall clock"
        )
    return notes
