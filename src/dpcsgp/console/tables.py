"""Tables that commands print."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dpcsgp.config import Config
from dpcsgp.runs.design import RunDesign


def plan_table(design: RunDesign) -> Table:
    """Say what is about to happen and what it will cost."""
    config, mechanism = design.config, design.mechanism
    table = Table(title="about to train", show_header=False, title_justify="left")
    noise = sorted(set(mechanism.noise_multipliers))
    rows = {
        "task": f"{config.task.name}, {config.task.model}, features {config.task.features} "
        f"({design.dim:,} coordinates)",
        "nodes": f"{design.topology.num_nodes}, graph {config.graph.name}, partition "
        f"{config.task.partition}",
        "method": _method(config),
        "mixing rate": _mixing(design),
        "noise": f"{config.privacy.noise}, multiplier {_range(noise)}, clip norm "
        f"{config.privacy.clip_norm:g}",
        "batch": f"{config.privacy.sampling}, expected size "
        f"{_range(sorted(set(mechanism.expected_batch_sizes)))}",
        "traffic": f"{design.bytes_per_edge() / 1e6:.3f} MB per edge",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def outcome_table(summary: dict[str, Any]) -> Table:
    """Show the closing numbers of one run."""
    return comparison_table([summary])


def comparison_table(summaries: list[dict[str, Any]]) -> Table:
    """Show closing numbers side by side, one column per run."""
    table = Table(title="outcome", title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(str(summary["algorithm"]), justify="right")
    rows = {
        "accuracy, mean over nodes": lambda s: _percent(s.get("accuracy_node_mean")),
        "accuracy, worst node": lambda s: _percent(s.get("accuracy_node_min")),
        "accuracy, average model": lambda s: _percent(s.get("accuracy_average_model")),
        "verified eps": lambda s: (
            f"{float(s['epsilon']):.4f} (claimed {float(s['epsilon_claimed']):g})"
        ),
        "delta": lambda s: f"{s['delta']:g}",
        "neighbouring data sets": lambda s: s["neighbouring_relation"],
        "private": lambda s: _private(s),
        "sent per edge": lambda s: f"{s['bytes_per_edge'] / 1e6:.3f} MB",
        "sent per node": lambda s: f"{s['bytes_sent_per_node'] / 1e6:.3f} MB",
        "seconds": lambda s: f"{s['seconds']:.1f}",
        "stopped because": lambda s: s["stopped_because"],
    }
    for name, show in rows.items():
        table.add_row(name, *(show(summary) for summary in summaries))
    return table


def _method(config: Config) -> str:
    compression = f", compression {config.compression.spec}" if config.method.compresses else ""
    return f"{config.algorithm.name}, {config.algorithm.steps} steps{compression}"


def _mixing(design: RunDesign) -> str:
    if design.mixing_rate is None or design.mixing_radius is None:
        return ""
    radius = design.mixing_radius
    known = f"radius {radius:.3f}" if radius == radius else "no radius exists for this compressor"
    return f"{design.mixing_rate:.3g} ({known})"


def _range(values: list[Any]) -> str:
    low, high = values[0], values[-1]
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _private(summary: dict[str, Any]) -> str:
    if summary["private"]:
        return "yes"
    if summary["seeded"]:
        return "no: the noise is seeded"
    return "no: verified eps is above the claim"
