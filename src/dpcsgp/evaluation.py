"""One row of public figures: scores on public data, disagreement, bytes and eps so far.

Only values that are public, or post-processing of what was released, go into a row.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dpcsgp.training import Run

WATCHED_EVALUATIONS: Final = 5
# Per node like metrics, but not measured on test data.
RESERVED_KEYS: Final = ("epsilon_nodes", "epsilon_all_collude_nodes", "bytes_sent_nodes")
MANY_NODES: Final = 32  # above this, intermediate evaluations look at a sample of the nodes


def evaluation_row(run: Run, state: Any, seconds: float, final: bool) -> dict[str, Any]:
    """Return what is known of the models in this state.

    Args:
        run: the run; all its nodes are evaluated, or a sample of many unless it is the last row.
        state: the state of its algorithm.
        seconds: time of training so far.
        final: whether this is the last row.

    Returns:
        Names to numbers, or to lists (`*_nodes`) with one number per evaluated node; those of bytes
        and eps (`RESERVED_KEYS`) have one per hosted node.
    """
    models_ND = run.algorithm.model(state)
    num_nodes = models_ND.shape[0]
    every = 1 if final or num_nodes <= MANY_NODES else num_nodes // 16
    looked_at = range(0, num_nodes, every)
    row: dict[str, Any] = {
        "step": state.step,
        "round": state.round,
        "nodes": [run.network.nodes[index] for index in looked_at],
        "bytes_per_edge": run.network.traffic.bytes_per_edge,
        "bytes_sent_nodes": run.network.traffic.bytes_sent,
        "epsilon_nodes": run.gradients.epsilon_spent(),
    }
    if run.gradients.mechanism.pairs is not None:  # otherwise it is the same
        row["epsilon_all_collude_nodes"] = run.gradients.epsilon_all_collude()
    for name, values in run.task.evaluate(models_ND[list(looked_at)]).items():
        row[f"{name}_nodes"] = values.tolist()
        row[f"{name}_node_mean"] = float(values.mean())
        row[f"{name}_node_min"] = float(values.min())
    if run.hosts_all:
        row |= average_scores(run, state)
    residual = run.algorithm.residual_ratio(state)
    if residual is not None:
        row["residual_ratio"] = residual
    row["seconds"] = seconds
    if final:
        row["final"] = True
    return row


def average_scores(run: Run, state: Any) -> dict[str, float]:
    """Return what only somebody with all models can tell: the average's score, the disagreement."""
    models_ND, average_D = run.algorithm.model(state), run.algorithm.average(state)
    scores = run.task.evaluate(average_D[None])
    apart = float((models_ND - models_ND.mean(0)).pow_(2).sum(1).mean().sqrt())
    return {
        **{f"{name}_average_model": float(values[0]) for name, values in scores.items()},
        "disagreement": apart,
    }


def warn_if_not_finite(rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn when a metric on public test data stops being a finite number; of each metric once."""

    def broken(row: Mapping[str, Any]) -> set[str]:
        names = [key.removesuffix("_node_mean") for key in row if key.endswith("_node_mean")]
        return {name for name in names if not all(map(math.isfinite, row[f"{name}_nodes"]))}

    new = sorted(broken(rows[-1]).difference(*map(broken, rows[:-1]))) if rows else []
    if new:
        row = rows[-1]
        bad = sum(not math.isfinite(value) for value in row[f"{new[0]}_nodes"])
        warnings.warn(
            f"{', '.join(new)}: not a finite number on the public test data at step {row['step']} "
            f"({bad} of {len(row[f'{new[0]}_nodes'])} models); lower algorithm.learning_rate if "
            "outputs grow without bound, otherwise look at the metric itself",
            stacklevel=2,
        )


def warn_if_residual_grows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn when the residual ratio rose at all of the last evaluations and has doubled.

    The ratio is |x - x_hat| / |x|. Needed for top and sign, for which no radius is known.
    """
    ratios = [row["residual_ratio"] for row in rows if "residual_ratio" in row]
    ratios = ratios[-WATCHED_EVALUATIONS:]
    rising = all(after > before for before, after in itertools.pairwise(ratios))
    if len(ratios) == WATCHED_EVALUATIONS and rising and ratios[-1] > 2 * ratios[0] > 0:
        warnings.warn(
            f"the residual |x - x_hat| / |x| has grown from {ratios[0]:.3g} to {ratios[-1]:.3g}: "
            "gossip may be diverging; "
            "lower algorithm.mixing_rate, or use a compressor with a known radius such as 'rot:1'",
            stacklevel=2,
        )
