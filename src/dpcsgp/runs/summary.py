"""The closing figures of a run.

Eps is verified from the ledger, bytes are those sent, accuracy is as measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dpcsgp.compression import parse_compressor
from dpcsgp.config import per_node
from dpcsgp.graphs import graph_constants
from dpcsgp.privacy import neighbouring_relation
from dpcsgp.privacy.events import relation_of_unit
from dpcsgp.records.metrics import plain
from dpcsgp.runs.default_settings import CHOSEN
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.training import Progress, Run

_FINAL: Final = ("_node_mean", "_node_min", "_average_model")  # endings of keys of the last row
_ROUNDING: Final = 1e-9  # eps is compared with its claim up to this share


def write_results(
    folder: ResultsFolder, design: RunDesign, run: Run, progress: Progress
) -> dict[str, Any]:
    """Write the models and the summary of a run that one process hosted; return the summary."""
    state = progress.state
    folder.write_model(run.algorithm.average(state), run.algorithm.model(state))
    summary = summarise(design, run, progress)
    folder.write_summary(summary)
    return summary


def summarise(design: RunDesign, run: Run, progress: Progress) -> dict[str, Any]:
    """Put together what the hosted nodes released, sent and reached."""
    # The last row holds the verified eps and the bytes that were counted.
    config, state, row = design.config, progress.state, run.recorder.rows[-1]
    num_nodes, seeded = design.topology.num_nodes, run.gradients.random.reproducible
    epsilon, claimed, kept = _promise(design, row)
    polished = progress.rounds_polished
    return {
        "algorithm": config.algorithm.name,
        "task": config.task.name,
        "model": config.task.model,
        "features": config.task.features,
        "partition": config.task.partition,
        "graph": config.graph.name,
        "num_nodes": num_nodes,
        "num_coordinates": design.dim,
        "steps": state.step,
        "compression": config.compression.spec,
        "optimizer": config.algorithm.optimizer,
        "mixing_rate": design.mixing_rate,
        "mixing_radius": design.mixing_radius,
        "theorem_satisfied": theorem_satisfied(design),
        "private": not seeded and math.isfinite(epsilon) and kept,
        "seeded": seeded,
        "epsilon": epsilon,
        "epsilon_claimed": claimed,
        "epsilon_all_collude": max(run.gradients.epsilon_all_collude()),
        "max_colluders": config.privacy.max_colluders,
        "delta": max(per_node(config.privacy.delta, num_nodes)),
        "neighbouring_relation": relation_of_unit(
            neighbouring_relation(config.privacy.sampling), design.facts.unit
        ),
        "noise_multiplier": list(design.mechanism.noise_multipliers),
        "releases": run.gradients.num_releases(),
        **{key: value for key, value in row.items() if key.endswith(_FINAL)},
        **worst_scores(row, run.task.directions),
        "metric_directions": dict(run.task.directions),
        "disagreement": row.get("disagreement"),
        "bytes_per_edge": row["bytes_per_edge"],
        "bytes_sent_per_node": max(row["bytes_sent_nodes"]),
        "bits_paper": design.paper_bits(state.round - polished, polished),
        "seconds": row["seconds"],
        "seconds_per_step": row["seconds"] / max(state.step, 1),
        "stopped_because": progress.stopped_because,
        **_chosen(design),
    }


def _chosen(design: RunDesign) -> dict[str, Any]:
    """Return what the caller of `dpcsgp.train` left open, and what the rule made of it."""
    names = dict(design.facts.details).get(CHOSEN, "")
    if not names:
        return {}
    values = design.config.flat()
    return {"settings_by_rule": {name: values[name] for name in names.split(", ")}}


def _promise(design: RunDesign, row: Mapping[str, Any]) -> tuple[float, float, bool]:
    """Return the largest eps, the largest claim, and whether every hosted node keeps its own."""
    privacy = design.config.privacy
    epsilon = max(row["epsilon_nodes"])
    if privacy.noise == "none":
        return epsilon, math.inf, False
    # Every node is held to its own claim: budgets may differ.
    claims = per_node(privacy.epsilon, design.topology.num_nodes)
    pairs = zip(row["epsilon_nodes"], (claims[node] for node in row["nodes"]), strict=True)
    kept = all(spent <= claim * (1 + _ROUNDING) for spent, claim in pairs)
    return epsilon, max(claims), kept


def worst_scores(row: Mapping[str, Any], directions: Mapping[str, str]) -> dict[str, float]:
    """Return every metric's value at the node where it is worst (`_node_min` is the smallest)."""
    return {
        f"{name}_node_worst": (max if direction == "lower" else min)(row[f"{name}_nodes"])
        for name, direction in directions.items()
        if row.get(f"{name}_nodes")
    }


def theorem_satisfied(design: RunDesign) -> bool | None:
    """Say whether the compressor's omega is what Theorem 1 permits.

    None: nothing is compressed, or nodes do not descend along gradients, as the theorem assumes.
    """
    if design.mixing_rate is None or design.config.algorithm.optimizer != "sgd":
        return None
    if design.topology.num_nodes == 1:
        return True
    constants = graph_constants(design.topology, design.mixing_rate)
    compressor = parse_compressor(design.config.compression.spec)
    return compressor.omega_squared(design.dim) <= constants.largest_omega_spectral**2


def merge_summaries(
    parts: Sequence[Mapping[str, Any]], last_row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary of the whole run from those of its processes and the last row of all."""
    summaries = [part["summary"] for part in parts]
    seconds, steps = max(summary["seconds"] for summary in summaries), summaries[0]["steps"]
    return {
        # What all processes agree on is taken from rank 0, the rest is put together below.
        **summaries[0],
        **{key: value for key, value in last_row.items() if key.endswith(_FINAL)},
        **worst_scores(last_row, summaries[0]["metric_directions"]),
        "epsilon": plain(max(float(summary["epsilon"]) for summary in summaries)),
        "epsilon_all_collude": plain(
            max(float(summary["epsilon_all_collude"]) for summary in summaries)
        ),
        "private": all(summary["private"] for summary in summaries),
        "seeded": any(summary["seeded"] for summary in summaries),
        "releases": [count for summary in summaries for count in summary["releases"]],
        "disagreement": last_row.get("disagreement"),
        "bytes_sent_per_node": max(last_row["bytes_sent_nodes"]),
        "seconds": seconds,
        "seconds_per_step": seconds / steps if steps else None,
        "processes": len(parts),
        "bytes_between_processes": sum(part["bytes_between_processes"] for part in parts),
    }
