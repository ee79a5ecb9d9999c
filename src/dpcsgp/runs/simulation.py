"""The simulator that a design asks for: in step, or with lag and a clock that is played."""

from __future__ import annotations

from typing import Any

from dpcsgp.network import Simulator
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import Course, Pace, Timeline, play
from dpcsgp.runs.design import RunDesign


def simulated_network(design: RunDesign, key: bytes | None = None) -> Simulator:
    """Return a network that hosts all nodes of a design."""
    config = design.config
    if not config.network.max_lag and not config.simulation.step_seconds:
        return Simulator(design.topology, key)
    timeline = play(course_of(design), pace_of(design), config.run.seed)
    return LateSimulator(design.topology, timeline, config.network.max_lag, key)


def course_of(design: RunDesign) -> Course:
    """Return what has to be played of a design."""
    config = design.config
    return Course(
        design.topology,
        design.rounds,
        config.algorithm.polish_rounds,
        config.network.max_lag,
        config.network.late_gradients == "skip",
        design.mixing_rate or 1.0,
        config.algorithm.gossip_every,
    )


def pace_of(design: RunDesign) -> Pace:
    """Return the speed of nodes and lines; one second a step where none is given."""
    settings = design.config.simulation.model_dump()
    return Pace(**{**settings, "step_seconds": settings["step_seconds"] or 1.0})


def virtual_summary(network: Any) -> dict[str, Any]:
    """Return the figures of a clock that was played; none without one."""
    timeline = getattr(network, "timeline", None)
    if not isinstance(timeline, Timeline):
        return {}
    made = min(network.traffic.rounds, timeline.rounds)  # fewer than planned after a stop
    return {
        "simulated": {
            "seconds": timeline.seconds,
            "rounds_per_minute": timeline.rounds_per_minute,
            "rounds": made,
            "contributed": list(timeline.contributed_before(made)),
            "waiting_share": list(timeline.waiting_share),
        }
    }
